"""Sizes as people write them: `8GiB`, `500MB`, `1.5TiB`. Pure."""

import re
from collections.abc import Mapping

_BYTES: Mapping[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
}
_BYTE_UNITS = {unit.lower(): factor for unit, factor in _BYTES.items()}
_LARGEST_SIZE = 2**63 - 1  # what an int64 of the contract holds
_SIZE = r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)"


def parse_size(text: str) -> int:
    """Bytes of `8GiB`, `500MB`, `1.5TiB` or a plain number of bytes; units in any case, KB = 1000, KiB = 1024.

    Raises:
        ValueError: not a size, or more than an int64 holds.
    """
    found = re.fullmatch(_SIZE, text.strip())
    factor = _BYTE_UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 500MB or 1024")
    whole, _, fraction = found[1].partition(".")
    # In whole numbers, so that nothing is lost beyond the 53 bits of a float.
    size: int = int(whole + fraction) * factor // 10 ** len(fraction)
    if size > _LARGEST_SIZE:
        raise ValueError(f"{text!r} is more than {_LARGEST_SIZE} bytes")
    return size
