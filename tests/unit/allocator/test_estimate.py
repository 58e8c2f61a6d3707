"""Estimate: the seed's rules for its own cases, numbers read as numbers, and nothing guessed from what cannot be right."""

import math

import pytest

from gpuscale.allocator.domain.estimate import BYTES_OF_TYPE, MIB, ModelWish, estimate, parallelism, size_in
from gpuscale.common.errors import InvalidArgumentError

LONG = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "dcp": "decode-context"}
SPELLINGS = [
    (kind, spelling)
    for kind, long in LONG.items()
    for spelling in (
        f"{long}-parallel-size", f"{long}-parallel-size".replace("-", "_"), f"{kind}-size", f"{kind}_size",
        kind, kind.upper(),
    )
]  # fmt: skip


def violations(parameters: dict[str, object]) -> list[str]:
    with pytest.raises(InvalidArgumentError) as caught:
        parallelism(parameters)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(("kind", "spelling"), SPELLINGS)
def test_every_spelling_means_the_same(kind: str, spelling: str) -> None:
    found = parallelism({spelling: [2, 4, 1]})
    assert {name: getattr(found, name) for name in LONG} == dict.fromkeys(LONG, 1) | {kind: 4}
    assert found.ignored == ()


@pytest.mark.parametrize("given", [4, 4.0, "4", [4], [1, 2, 4], [4, "2"], (4, 1), {"values": [1, 4]}])
def test_scalars_lists_and_values(given: object) -> None:
    assert parallelism({"tp": given}).world_size == 4


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        ({}, 1),
        ({"tp-size": [1, 2, 4], "pp-size": [1], "dp-size": [1]}, 4),  # the seed's own example
        ({"tp": 2, "pp": 3}, 6),
        ({"tp": 2, "pp": 3, "dp": 4}, 24),
        ({"tp": 2, "dp": 2, "dcp": 5, "cp": 3}, 10),
        ({"cp": 3, "dcp": 2}, 3),
        ({"tp": 64, "pp": 64}, 4096),
    ],
)
def test_world_size(parameters: dict[str, object], size: int) -> None:
    """World size = tp x pp x max(dp, dcp, cp)."""
    assert parallelism(parameters).world_size == size


@pytest.mark.parametrize(
    "given",
    [
        0, -1, 1.5, True, False, None, "auto", "", "-2", "2.0", "²", "1" * 10, 4097, 1e300, math.inf, math.nan,
        [], [1, 0], [1, "auto"], [[2]], [None], {},
        {"values": []}, {"values": [0]}, {"values": "auto"}, {"values": [1], "more": 1}, {"value": [1]},
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_by_name(given: object) -> None:
    """The seed made 0 GPUs of a 0 and raised ValueError for an empty list and for "auto"."""
    assert violations({"tp-size": given, "pp": 2}) == ['parameters["tp-size"]']


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert violations({"tp": 0, "pp": "auto", "dp": 1}) == ['parameters["pp"]', 'parameters["tp"]']


def test_two_spellings_must_agree() -> None:
    assert violations({"tp": 2, "tp-size": 4}) == ['parameters["tp-size"]']
    assert violations({"tp": [1, 4], "tp_size": 4}) == ['parameters["tp_size"]']
    assert parallelism({"tp": [1, 4], "tensor_parallel_size": [4.0, "1"]}).tp == 4


def test_more_than_one_request_may_name_is_refused() -> None:
    assert violations({"tp": 64, "pp": 65}) == ["parameters"]


def test_names_that_mean_nothing_are_listed() -> None:
    found = parallelism({"tp": 2, "mem-fraction-static": 0.9, "ep-size": "auto", "dtype": None})
    assert (found.ignored, found.world_size) == (("dtype", "ep-size", "mem-fraction-static"), 2)


SIZES = r"""
    llama-3-70b=70 meta-llama/Llama-2-13b-chat-hf=13 Qwen2.5-72B-Instruct=72 llama-405b=405
    nemotron-340b=340 deepseek-67b=67 qwen3-1.7b=1.7 some-17b=17 llama3.1:70b=70 model_7B_awq=7
    SOLAR-10.7B-v1.0=10.7 bert-110m=0.11 kimi-k2-1t=1000 yi-34b-200k=34 qwen3-30b-a3b=30 mixtral-8x7b=56
    phi-16x3.8b=60.8 llama-4-scout-17b-16e=272 distill-1.5b-of-70b=70 /models/70b/llama-7b=7
    /models/llama-7b/snapshot-1=7 /models/7b/=7 C:\models\llama-7b=7 falcon180B=180 llama70b=70
    vicuna13b-v1.5=13 chatglm6b=6 Mixtral8x7B-Instruct=56
"""


@pytest.mark.parametrize("case", SIZES.split())
def test_a_name_tells_its_size(case: str) -> None:
    """The seed looked for "7b" anywhere: 1.7b and 17b were 7b to it, and 72b and 405b were small."""
    name, _, billions = case.rpartition("=")
    size = size_in(name)
    assert size.parameter_count == pytest.approx(float(billions) * 1e9)


@pytest.mark.parametrize(
    "name",
    ["", "gpt-4", "llama", "phi-3-mini-4k", "qwen1.5-moe-a2.7b", "int4", "4bit", "w4a16", "0b", "7bx", "x7b"],
)
def test_a_name_without_a_size(name: str) -> None:
    assert size_in(name) is None


MEMORY = r"""
    llama-70b=20000 llama-65b=20000 llama-13b=12000 llama-7b=12000 llama-3b=8000 nothing-known=8000 =8000
    qwen2.5-72b=20000 llama-405b=20000 qwen3-1.7b=8000 some-17b=12000 x-4.9b=8000 x-5b=12000 x-28.9b=12000
    x-29b=20000 mixtral-8x7b=20000
"""


@pytest.mark.parametrize("case", MEMORY.split())
def test_memory_by_the_table(case: str) -> None:
    model, _, mib = case.rpartition("=")
    found = estimate(ModelWish(model=model))
    assert (found.gpu_count, found.memory_bytes) == (1, int(mib) * MIB)


def test_the_example_of_the_seed() -> None:
    """`estimate_gpu_requirements` of the document returns (4, 20000)."""
    parameters = {"tp-size": [1, 2, 4], "pp-size": [1], "dp-size": [1]}
    found = estimate(ModelWish("llama-3-70b", parameters))
    assert (found.gpu_count, found.memory_bytes) == (4, 20_000 * MIB)
    assert found.notes[0] == "GPUs: 4 = tp 4 x pp 1 x max(dp 1, dcp 1, cp 1)"
    assert "70 billion, from '70b' in the name" in found.notes[1]
    assert "the weights alone take 33379 MiB" in found.notes[-1]


def test_a_count_that_is_given_goes_before_the_name() -> None:
    found = estimate(ModelWish("llama-7b", parameter_count=70e9))
    assert (found.parameter_count, found.memory_bytes) == (70e9, 20_000 * MIB)


@pytest.mark.parametrize(("dtype", "size"), [*BYTES_OF_TYPE.items(), ("BF16", 2)])
def test_memory_from_the_data_type(dtype: str, size: float) -> None:
    assert estimate(ModelWish(parameter_count=8e9, dtype=dtype)).memory_bytes == 8e9 * size


def test_weights_are_divided_by_tp_and_pp_and_the_cache_by_all() -> None:
    """Data and context parallelism repeat the weights on each GPU."""
    parameters: dict[str, object] = {"tp": 2, "pp": 2, "dp": 2}
    bare = estimate(ModelWish("x-8b", parameters, dtype="fp16"))
    assert (bare.gpu_count, bare.memory_bytes) == (8, 4_000_000_000)
    cached = estimate(ModelWish("x-8b", parameters, None, "fp16", 1000, 80_001))
    assert cached.memory_bytes == 4_000_000_000 + 10_000_125


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (ModelWish("x-7b", dtype="auto"), "dtype"),
        (ModelWish("x-7b", dtype="fp12"), "dtype"),
        (ModelWish("unknown", dtype="fp16"), "parameter_count"),
        (ModelWish("x-7b", dtype="fp16", kv_cache_tokens=5), "kv_cache_bytes_per_token"),
        (ModelWish("x-7b", dtype="fp16", kv_cache_bytes_per_token=5), "kv_cache_tokens"),
        (ModelWish("x-7b", kv_cache_tokens=5, kv_cache_bytes_per_token=5), "dtype"),
    ],
)
def test_what_cannot_be_computed_is_refused(wish: ModelWish, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        estimate(wish)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan, math.inf, 1e308, 2e18])
@pytest.mark.parametrize("dtype", ["", "fp32"])
def test_a_number_of_parameters_that_no_model_has_is_refused(count: float, dtype: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        estimate(ModelWish(parameter_count=count, dtype=dtype))
    assert caught.value.violations[0].field == "parameter_count"


def test_the_largest_numbers_there_are_are_reckoned_with() -> None:
    assert estimate(ModelWish(parameter_count=1e18, dtype="fp32")).memory_bytes == 4 * 10**18
    most = 2**63 - 1
    with pytest.raises(InvalidArgumentError):
        estimate(ModelWish("70b", dtype="fp8", kv_cache_tokens=most, kv_cache_bytes_per_token=most))
