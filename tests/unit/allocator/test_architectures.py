"""Architectures and what they take: the counts and measurements that makers of models publish, and GPUs that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpuscale.allocator.domain.architectures import (
    MODELS,
    Architecture,
    Footprint,
    GpuKind,
    Split,
    footprint,
    from_config,
    known,
)
from gpuscale.allocator.domain.estimate import ModelWish, sized
from gpuscale.common.errors import InvalidArgumentError

DOCS = Path(__file__).parents[3] / "docs" / "allocation.md"
GIB = 1 << 30
PUBLISHED = """
    llama-2-7b=6.74 llama-2-13b=13.0 llama-2-70b=69.0 llama-3.1-8b=8.03 llama-3-70b=70.6 llama-3.1-405b=406
    llama-3.2-1b=1.24 llama-3.2-3b=3.21 mistral-7b=7.25 mistral-nemo=12.2 mistral-small-24b=23.6 mixtral-8x7b=46.7
    mixtral-8x22b=141 qwen2.5-0.5b=0.494 qwen2.5-1.5b=1.54 qwen2.5-3b=3.09 qwen2.5-7b=7.62 qwen2.5-14b=14.8
    qwen2.5-32b=32.8 qwen2.5-72b=72.7 qwen3-0.6b=0.596 qwen3-1.7b=1.72 qwen3-4b=4.02 qwen3-8b=8.19 qwen3-14b=14.8
    qwen3-32b=32.8 qwen3-30b-a3b=30.5 qwen3-235b-a22b=235 gemma-2-9b=9.24 gemma-2-27b=27.2 phi-3-mini=3.82 phi-4=14.7
"""


def test_parameters_are_as_many_as_the_makers_say() -> None:
    said = dict(case.split("=") for case in PUBLISHED.split())
    assert {id(MODELS[name]) for name in said} == {id(one) for one in MODELS.values()}
    for name, billions in said.items():
        assert MODELS[name].parameter_count == pytest.approx(float(billions) * 1e9, rel=0.005), name


def test_published_memory_is_what_is_computed_and_the_page_says_so() -> None:
    page = DOCS.read_text()
    rows = dict(
        re.findall(r"^\| (GiB in all, 32,768 tokens|published|estimate) \| (.*) \|$", page, re.MULTILINE)
    )
    sizes, published, ours = (cells.split(" | ") for cells in rows.values())
    for size, measured, shown in zip(sizes, published, ours, strict=True):
        least = footprint(MODELS[f"qwen3-{size.removeprefix('qwen3-')}"], 2, 32768, 1).least / GIB
        assert f"{least:.2f}" == shown, size
        assert least == pytest.approx(float(measured), rel=0.01), size
    assert len(sizes) == 7
    for model, gib in (("llama-3.1-8b", 15.62), ("llama-3.1-70b", 39.06)):
        cache = footprint(MODELS[model], 2, 128000, 1).kv_cache / GIB
        assert f"{cache:.2f}" == str(gib)
        assert f"{model.rpartition('-')[2]} {gib} GiB" in page
    weights = footprint(MODELS["llama-3.1-405b"], 2, 0, 1).weights / 1e9
    assert weights == pytest.approx(810, rel=0.01)
    assert f"405b: 810 GB published, {weights:.2f} estimated" in page


@pytest.mark.parametrize(
    "typed",
    [
        "meta-llama/Llama-3.1-8B-Instruct=llama-3.1-8b",
        "meta-llama/Meta-Llama-3-70B=llama-3-70b",
        "llama3-8b=llama-3.1-8b",
        "Qwen/Qwen2.5-7B-Instruct=qwen2.5-7b",
        "mistralai/Mistral-7B-Instruct-v0.3=mistral-7b",
        "Qwen3-8B-FP8=qwen3-8b",
        "google/gemma-2-9b-it=gemma-2-9b",
        "microsoft/Phi-3-mini-4k-instruct=phi-3-mini",
        "/models/llama_2_7b_chat_hf=llama-2-7b",
        "mistralai/Mistral-Nemo-Instruct-2407=mistral-nemo",
    ],
)
def test_a_model_is_known_by_its_names(typed: str) -> None:
    name, _, meant = typed.partition("=")
    assert known(name) is MODELS[meant]


def test_an_unknown_model_is_an_error_with_those_spelt_alike() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"unknown model 'lama-3-8b': did you mean llama-3-8b or .*config\.json"
    ):
        known("lama-3-8b")


CONFIG: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


def test_a_config_tells_the_same() -> None:
    assert from_config(json.loads(json.dumps(CONFIG))) == MODELS["llama-3.1-8b"]
    assert from_config({"text_config": CONFIG}) == MODELS["llama-3.1-8b"]
    mixtral = from_config(CONFIG | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000})
    assert mixtral == MODELS["mixtral-8x7b"]
    assert from_config({key: one for key, one in CONFIG.items() if "key_value" not in key}).kv_heads == 32


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"hidden_size": None}, "config.hidden_size"),
        ({"vocab_size": 0}, "config.vocab_size"),
        ({"num_hidden_layers": "many"}, "config.num_hidden_layers"),
        ({"num_hidden_layers": 1.5}, "config.num_hidden_layers"),
        ({"intermediate_size": True}, "config.intermediate_size"),
        ({"kv_lora_rank": 512}, "config.kv_lora_rank"),
    ],
)
def test_a_config_that_cannot_be_right_names_its_key(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        from_config(CONFIG | changed)
    assert [one.field for one in raised.value.violations] == [field]


SMALL = Architecture(layers=2, hidden=64, heads=12, kv_heads=4, head_dim=8, intermediate=64, vocab=10)


@pytest.mark.parametrize(
    ("memory", "on_one_node", "count", "split"),
    [
        (1000, 1, 1, Split(1)),
        (500, 8, 8, Split(2)),
        (210, 8, 8, Split(6)),  # 5 does not divide 12 heads
        (210, 4, 8, Split(4, 2)),
        (210, 4, 7, None),
        (210, 0, 0, None),
    ],
)
def test_the_fewest_gpus_hold_it_of_one_node_first(
    memory: int, on_one_node: int, count: int, split: Split | None
) -> None:
    needs = Footprint(SMALL, weights=900.0, kv_cache=0.0, activations=0.0)
    assert needs.split_over(GpuKind("x", memory, count, on_one_node)) == split


def test_kv_heads_are_repeated_where_there_are_fewer_than_gpus() -> None:
    needs = Footprint(SMALL, weights=0.0, kv_cache=900.0, activations=0.0)
    assert [needs.of_each(Split(width)) for width in (1, 4, 12)] == [1000, 250, 250]


def test_the_fleet_that_is_there_answers_and_what_is_given_is_kept() -> None:
    kinds = [GpuKind("A", 24 * GIB, 4, 2), GpuKind("B", 80 * GIB, 8, 8)]
    found, needs, fits = sized(ModelWish("llama-3-70b"), known("llama-3-70b"), 4096, 1, kinds)
    assert (found.gpu_count, [fit.kind.model for fit in fits]) == (2, ["B", "A"])
    assert fits[0].text == "2 of your 8 B (80 GiB each), tensor parallel 2"
    assert fits[1].text == "all of your 4 A (24 GiB each) are too few"
    assert needs.least < 2 * found.memory_bytes == pytest.approx(needs.most, rel=1e-6)
    given, _, fits = sized(ModelWish("x", {"tp": 4}, dtype="int4"), known("llama-3-70b"), 4096, 1, kinds)
    assert (given.gpu_count, [fit.split for fit in fits]) == (4, [Split(4), None])
    nothing, _, _ = sized(ModelWish("x"), known("llama-3.1-405b"), 4096, 1, [])
    assert nothing.gpu_count == 16
    assert "no GPUs are known in this fleet: with 80 GiB each, 16 would" in nothing.notes[-1]
