"""Model names: how many parameters a name tells of. Pure.

A size is a number with M, B or T (millions, billions, trillions) that stands by itself or follows a word (`falcon180b`):
`17b` is 17 billion and not 7, `1.7b` is 1.7 billion, and the `a3b` of `qwen3-30b-a3b` (parameters in use at once) is no
size of the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_UNITS: Mapping[str, float] = {"m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"\d{1,6}(?:\.\d{1,6})?"
_APART = r"(?<![a-z0-9.])"
_BEGINS = rf"(?:{_APART}|(?<=[a-z]{{3}}))"
_SIZE = re.compile(rf"{_BEGINS}(?:(?P<experts>\d{{1,4}})x)?(?P<number>{_NUMBER})(?P<unit>[mbt])(?![a-z0-9])")
_EXPERTS = re.compile(rf"{_APART}(?P<experts>\d{{1,4}})e(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a name tells: the number of parameters, the text that told it, and what to know about it."""

    parameter_count: float
    text: str
    note: str = ""


def size_in(name: str) -> ModelSize | None:
    """The number of parameters in the name or path of a model; None where it tells none.

    Of a path the last part that tells a size counts, of several sizes in it the largest. A mixture of experts (`8x7b`,
    `17b-16e`) counts as the product, which is more than it has, since experts share layers: an estimate may be too
    large but is never too small for that.
    """
    for part in reversed(re.split(r"[/\\]", name.lower())):
        sizes = [_size(found, part) for found in _SIZE.finditer(part)]
        if found := [size for size in sizes if size.parameter_count > 0]:
            return max(found, key=lambda size: size.parameter_count)
    return None


def _size(found: re.Match[str], part: str) -> ModelSize:
    count = float(found["number"]) * _UNITS[found["unit"]]
    experts = int(found["experts"]) if found["experts"] else _experts_beside(part)
    if experts is None:
        return ModelSize(count, found[0])
    note = f"a mixture of {experts} experts, counted as if they shared nothing: an upper bound"
    return ModelSize(count * experts, found[0], note)


def _experts_beside(part: str) -> int | None:
    found = _EXPERTS.search(part)
    return int(found["experts"]) if found else None
