"""Estimate: how many GPUs a model needs, and how much memory on each. Pure.

The number of GPUs is the world size given by the parameters (`parallelism`); the parameter count is given or read from the
model's name (`size_in`). Memory follows the table of the GPU tracking seed (seeds/001): 20,000 MB for 65B and 70B models,
12,000 for 7B and 13B, 8,000 for all others, where MB means MiB, as in the nvidia-smi output that the seed compares it with.
Other sizes use the class of the nearest size, by ratio: the boundary between 13 and 65 billion is 29. With a data type, memory
is computed instead; with a context length, it is computed from the model's architecture (`sized`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gpuscale.allocator.domain.architectures import (
    STEP_TOKENS,
    Architecture,
    Footprint,
    GpuKind,
    Split,
    footprint,
)
from gpuscale.common.errors import FieldViolation, InvalidArgumentError

_UNITS: Mapping[str, float] = {"m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"\d{1,6}(?:\.\d{1,6})?"
_APART = r"(?<![a-z0-9.])"
_BEGINS = rf"(?:{_APART}|(?<=[a-z]{{3}}))"
_SIZE = re.compile(rf"{_BEGINS}(?:(?P<experts>\d{{1,4}})x)?(?P<number>{_NUMBER})(?P<unit>[mbt])(?![a-z0-9])")
_EXPERTS = re.compile(rf"{_APART}(?P<experts>\d{{1,4}})e(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The parameter count found in a name, the text it was found in, and a note on it."""

    parameter_count: float
    text: str
    note: str = ""


def size_in(name: str) -> ModelSize | None:
    """The parameter count in the name or path of a model; None if there is none.

    In a path the last part that contains a size counts, and in it the largest size. A mixture of experts (`8x7b`, `17b-16e`)
    counts as the product, which is an upper bound since experts share layers: the estimate may be too large but never too
    small.
    """
    for part in reversed(re.split(r"[/\\]", name.lower())):
        sizes: list[ModelSize] = []
        beside = _EXPERTS.search(part)
        for found in _SIZE.finditer(part):
            count = float(found["number"]) * _UNITS[found["unit"]]
            of_experts = found if found["experts"] else beside
            if of_experts is None:
                sizes.append(ModelSize(count, found[0]))
            else:
                experts = int(of_experts["experts"])
                note = f"a mixture of {experts} experts, counted as if they shared nothing: an upper bound"
                sizes.append(ModelSize(count * experts, found[0], note))
        if known := [size for size in sizes if size.parameter_count > 0]:
            return max(known, key=lambda size: size.parameter_count)
    return None


Json: TypeAlias = "bool | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value."""
MOST_GPUS = 4096
"""Most GPUs that one ask may name (the contract's bound of `Ask.gpu_count`)."""

_KINDS: Mapping[str, str] = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "dcp": "decode-context",
}
_ALIASES: Mapping[str, str] = {
    alias: kind for kind, long in _KINDS.items() for alias in (f"{long}-parallel-size", f"{kind}-size", kind)
}
_DIGITS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The largest value of each kind of parallelism, default 1, and the names that were not recognized."""

    tp: int
    pp: int
    dp: int
    cp: int
    dcp: int
    ignored: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """The number of GPUs."""
        return self.tp * self.pp * max(self.dp, self.dcp, self.cp)

    @property
    def note(self) -> str:
        """How the world size was computed, in words."""
        return f"{self.world_size} = tp {self.tp} x pp {self.pp} x max(dp {self.dp}, dcp {self.dcp}, cp {self.cp})"


def parallelism(parameters: "Mapping[str, Json]") -> Parallelism:
    """Parse the parameters: numbers, lists of numbers, or `{"values": [...]}`, as JSON.

    Raises:
        InvalidArgumentError: a value is not a whole number from 1 to 4,096, a list is empty, two spellings of one
            parameter differ, or the total exceeds what one ask may name. Each invalid parameter is a violation.
    """
    found: dict[str, tuple[str, frozenset[int]]] = {}
    wrong: list[FieldViolation] = []
    for name in sorted(parameters):
        kind = _kind(name)
        if kind is None:
            continue
        values, problem = _values(parameters[name])
        before = found.setdefault(kind, (name, values))
        if not problem and before[1] != values:
            problem = f"contradicts {before[0]}: both name one parameter, with different values"
        if problem:
            wrong.append(FieldViolation(f'parameters["{name}"]', problem))
    if wrong:
        raise InvalidArgumentError(f"{wrong[0].field} {wrong[0].description}", violations=wrong)
    largest = {kind: max(values) for kind, (_, values) in found.items()}
    ignored = tuple(sorted(name for name in parameters if _kind(name) is None))
    asked = Parallelism(**{kind: largest.get(kind, 1) for kind in _KINDS}, ignored=ignored)
    if asked.world_size > MOST_GPUS:
        raise InvalidArgumentError(
            f"the parameters ask for {asked.note} GPUs; {MOST_GPUS} is the most that one request may name",
            field="parameters",
        )
    return asked


def _kind(name: str) -> str | None:
    """The kind of parallelism that a name means; None if it means something else."""
    return _ALIASES.get(name.lower().replace("_", "-"))


def _values(given: "Json") -> tuple[frozenset[int], str]:
    """The values given, and what is wrong with them; empty if nothing is."""
    if isinstance(given, Mapping):
        if set(given) != {"values"}:
            return frozenset(), 'must be a number, a list of numbers, or {"values": [...]}'
        given = given["values"]
    items: Sequence[Json] = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    values = [_whole(item) for item in items]
    if not values:
        return frozenset(), "must not be an empty list"
    known = frozenset(value for value in values if value is not None)
    if None in values:
        return known, f"must hold whole numbers from 1 to {MOST_GPUS}, and nothing else"
    return known, ""


def _whole(item: "Json") -> int | None:
    """A whole number from 1 to `MOST_GPUS`, given as a number or digits; None for anything else."""
    if isinstance(item, str):
        item = int(item) if _DIGITS.fullmatch(item) else None
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        return None
    return int(item) if 1 <= item <= MOST_GPUS and item % 1 == 0 else None


MIB = 1024 * 1024
BASE_MIB = 8_000
"""Memory per GPU for small or unknown models."""
MEDIUM_MIB, MEDIUM_FROM = 12_000, 5e9
"""Memory per GPU for models like 7B and 13B, and their least number of parameters."""
LARGE_MIB, LARGE_FROM = 20_000, 29e9
"""Memory per GPU for models like 65B and 70B, and their least number of parameters."""
BYTES_OF_TYPE: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
"""Bytes per parameter by data type."""

MOST_PARAMETERS = 1e18
"""Most parameters accepted, a million times those of the largest models."""
_SIXTEEN_BIT = 2
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ModelWish:
    """The model to estimate.

    `parameters` is JSON; `parameter_count` overrides the model's name; memory is computed if `dtype` is set, with a KV cache of
    `kv_cache_tokens` tokens of `kv_cache_bytes_per_token` each, over all GPUs.
    """

    model: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict[str, Json])
    parameter_count: float | None = None
    dtype: str = ""
    kv_cache_tokens: int | None = None
    kv_cache_bytes_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The number of GPUs, the memory of each, how both were found, and which parameters were ignored."""

    gpu_count: int
    memory_bytes: int
    notes: tuple[str, ...]
    ignored_parameters: tuple[str, ...]
    parameter_count: float | None


@dataclass(frozen=True, slots=True)
class GpuFit:
    """How many GPUs of a kind hold a model; without a split, all of them are too few."""

    kind: GpuKind
    split: Split | None

    @property
    def text(self) -> str:
        """The same in words."""
        of = f"your {self.kind.count} {self.kind.model} ({_gib(self.kind.memory_bytes)} each)"
        if self.split is None:
            return f"all of {of} are too few"
        deep = f", pipeline parallel {self.split.pipeline}" if self.split.pipeline > 1 else ""
        return f"{self.split.gpu_count} of {of}, tensor parallel {self.split.tensor}{deep}"


def estimate(wish: ModelWish) -> Estimate:
    """Estimate what a model needs; InvalidArgumentError like `parallelism`, or if a value is missing."""
    gpus, size = parallelism(wish.parameters), size_in(wish.model)
    if wish.parameter_count is not None:
        if not 0 < wish.parameter_count <= MOST_PARAMETERS:
            raise InvalidArgumentError(
                f"parameter_count must be above 0, and {MOST_PARAMETERS:g} at most", field="parameter_count"
            )
        size = ModelSize(wish.parameter_count, "")
    memory, notes = _computed(wish, size, gpus) if wish.dtype else _by_table(wish, size, gpus)
    if memory > _LARGEST:
        raise InvalidArgumentError("this is more memory than any GPU can have", field="parameter_count")
    if size is None:
        counted = "parameters: the model's name has no number" if wish.model else "no model named"
    elif not size.text:
        counted = f"parameters: {_count(size)}, as given"
    else:
        note = f" ({size.note})" if size.note else ""
        counted = f"parameters: {_count(size)}, from {size.text!r} in the name{note}"
    return Estimate(
        gpu_count=gpus.world_size,
        memory_bytes=memory,
        notes=(f"GPUs: {gpus.note}", counted, *notes),
        ignored_parameters=gpus.ignored,
        parameter_count=size.parameter_count if size else None,
    )


def sized(
    wish: ModelWish, of: Architecture, context: int, batch: int, kinds: Sequence[GpuKind]
) -> tuple[Estimate, Footprint, Sequence[GpuFit]]:
    """Estimate from a known architecture: what the model needs, and the GPUs of the fleet that fit, fewest first.

    Raises InvalidArgumentError: like `parallelism`, or the data type is unknown.
    """
    gpus, of_type = parallelism(wish.parameters), _bytes_of(wish.dtype or "bf16")
    given = Split(gpus.tp, gpus.pp) if {"tp", "pp"} & {_kind(name) for name in wish.parameters} else None
    needs = footprint(of, of_type, context, batch)
    fits: list[GpuFit] = []
    for kind in kinds:
        if given is None:
            fitting = needs.split_over(kind)
        else:
            over = given.tensor > kind.on_one_node or given.gpu_count > kind.count
            fitting = None if over or needs.of_each(given) > kind.memory_bytes else given
        fits.append(GpuFit(kind, fitting))
    fits.sort(key=lambda fit: fit.split.gpu_count if fit.split else MOST_GPUS)
    usual = GpuKind("", 80 * 1024 * MIB, MOST_GPUS, 8)
    best = next((fit.split for fit in fits if fit.split), None)
    split = best or given or needs.split_over(usual) or Split(8, MOST_GPUS // 8)
    notes = [
        f"weights {_gib(needs.weights)}: {of.parameter_count / 1e9:.3g} billion parameters of {of_type:g} bytes",
        f"KV cache {_gib(needs.kv_cache)}: {batch} x {context} tokens, {of.kv_values_per_token * 2 / 1024:g} KiB each",
        f"activations {_gib(needs.activations)}: up to {STEP_TOKENS} tokens in one step",
        f"together {_gib(needs.least)} to {_gib(needs.most)}",
        *(fit.text for fit in fits),
    ]
    if best is None:
        there = "no GPUs of this fleet hold it" if fits else "no GPUs are known in this fleet"
        notes.append(f"{there}: with 80 GiB each, {split.gpu_count} would, tensor parallel {split.tensor}")
    memory = math.ceil(needs.of_each(split))
    found = Estimate(split.gpu_count, memory, tuple(notes), gpus.ignored, float(of.parameter_count))
    return found, needs, fits


def _by_table(wish: ModelWish, size: ModelSize | None, gpus: Parallelism) -> tuple[int, list[str]]:
    if wish.kv_cache_tokens or wish.kv_cache_bytes_per_token:
        raise InvalidArgumentError("a KV cache is counted only with a dtype: give one", field="dtype")
    mib = BASE_MIB
    if size is not None and size.parameter_count >= MEDIUM_FROM:
        mib = MEDIUM_MIB if size.parameter_count < LARGE_FROM else LARGE_MIB
    notes = [
        f"memory: {mib} MiB each, by the table ({MEDIUM_MIB} from 5B, {LARGE_MIB} from 29B, else {BASE_MIB})"
    ]
    if size is not None:
        weights = math.ceil(_weights(size, _SIXTEEN_BIT, gpus) / MIB)
        if weights > mib:
            notes.append(
                f"the weights alone take {weights} MiB of each GPU in 16 bits: give a dtype to have it computed"
            )
    return mib * MIB, notes


def _computed(wish: ModelWish, size: ModelSize | None, gpus: Parallelism) -> tuple[int, list[str]]:
    of_type = _bytes_of(wish.dtype)
    if size is None:
        raise InvalidArgumentError(
            "the name of the model does not contain its number of parameters: give parameter_count",
            field="parameter_count",
        )
    tokens, each = wish.kv_cache_tokens, wish.kv_cache_bytes_per_token
    if (tokens is None) != (each is None):
        missing = "kv_cache_tokens" if tokens is None else "kv_cache_bytes_per_token"
        raise InvalidArgumentError(
            f"kv_cache_tokens and kv_cache_bytes_per_token go together: give {missing}", field=missing
        )
    weights, cache = _weights(size, of_type, gpus), (tokens or 0) * (each or 0) / gpus.world_size
    notes = [
        f"memory: {_count(size)} x {of_type:g} bytes / (tp x pp = {gpus.tp * gpus.pp}) = {_mib(weights)} of weights each",
        f"KV cache: {_mib(cache)} each" if cache else "KV cache: not counted, no kv_cache_tokens given",
        "activations and the driver's own memory come on top",
    ]
    return math.ceil(weights + cache), notes


def _bytes_of(dtype: str) -> float:
    if dtype.lower() not in BYTES_OF_TYPE:
        raise InvalidArgumentError(f"dtype must be one of {', '.join(BYTES_OF_TYPE)}", field="dtype")
    return BYTES_OF_TYPE[dtype.lower()]


def _weights(size: ModelSize, of_type: float, gpus: Parallelism) -> float:
    """Bytes of weights per GPU: tensor and pipeline parallelism divide them, other kinds replicate them."""
    return size.parameter_count * of_type / (gpus.tp * gpus.pp)


def _count(size: ModelSize) -> str:
    return f"{size.parameter_count / 1e9:g} billion"


def _gib(size: float) -> str:
    return f"{size / MIB / 1024:.3g} GiB"


def _mib(size: float) -> str:
    return f"{math.ceil(size / MIB)} MiB"
