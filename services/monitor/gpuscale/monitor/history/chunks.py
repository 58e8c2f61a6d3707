"""Rows of history as bytes for the disk, a chunk at a time. Pure.

The bytes are those of the arrays one after another, little-endian: numbers (32 bits), minima, means and maxima (32-bit
floats), counts (16 bits).
"""

import sys
from array import array
from collections.abc import Iterator

from gpuscale.monitor.history.ring import Rows

CHUNK = 30
"""Steps in a chunk, which is what is stored at a time: half an hour of the coarsest tier."""
_BYTES_OF_NUMBER, _BYTES_OF_METRIC = 4, 3 * 4 + 2


def chunks(rows: Rows, width: int, shift: int) -> Iterator[tuple[int, bytes]]:
    """Rows of `width` metrics by chunk: its number and its bytes. Numbers are stored with `shift` added."""
    stored = array("i", [number + shift for number in rows.numbers])
    begin = 0
    while begin < len(stored):
        chunk = stored[begin] // CHUNK
        end = begin + sum(number // CHUNK == chunk for number in stored[begin : begin + CHUNK])
        part = rows._replace(numbers=stored).part(begin, end, width)
        yield chunk, b"".join(_ordered(column).tobytes() for column in part)
        begin = end


def unpack(body: bytes, width: int, shift: int) -> Rows:
    """The rows of a chunk; what was added to their numbers is taken off.

    Raises:
        ValueError: these are not the bytes of rows with so many metrics.
    """
    count, rest = divmod(len(body), _BYTES_OF_NUMBER + width * _BYTES_OF_METRIC)
    if rest:
        raise ValueError(f"{len(body)} bytes are no rows of {width} metrics")
    rows = Rows.empty()
    at = 0
    for column in rows:
        size = (count if column is rows.numbers else count * width) * column.itemsize
        column.frombytes(body[at : at + size])
        _ordered(column)
        at += size
    try:
        return rows._replace(numbers=array("i", [number - shift for number in rows.numbers]))
    except OverflowError as error:
        raise ValueError(f"a row has a number that is no number of a step: {error}") from error


def _ordered(numbers: "array[int] | array[float]") -> "array[int] | array[float]":
    """Numbers with their bytes in the stored order, or back from it."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
