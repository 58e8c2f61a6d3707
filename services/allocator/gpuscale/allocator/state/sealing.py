"""Sealing: checksums of stored rows, so that a bit that flips on disk is noticed. Pure.

SQLite checks the shape of its pages but not what is in them. Each row carries the CRC-32 of its other columns; a
reservation carries two, since most writes change its lease alone. The sums guard against decay, not against forgery.
"""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

LASTING = (
    "id",
    "fence",
    "request_id",
    "fingerprint",
    "holder",
    "owner",
    "labels",
    "policy",
    "create_time",
    "tenant",
    "priority",
    "preemptible",
    "cpu_milli",
    "host_memory_bytes",
    "member_count",
    "gpus",
)
"""Columns of a reservation that `lasting_sum` covers, in their order."""
LIFE = (
    "id",
    "state",
    "ttl_seconds",
    "deadline_seconds",
    "boot_id",
    "end_time",
    "revoke_seconds",
    "end_reason",
    "write_number",
)
"""Columns of a reservation that `life_sum` covers, in their order."""


def total(values: Iterable[object]) -> int:
    """The checksum of column values, as the database returns them: text, int, float or None."""
    return crc32(repr([*values]).encode())


def sealed(row: Mapping[str, object]) -> dict[str, object]:
    """A row of a table that has one checksum, with it: over all columns by name."""
    return {**row, "checksum": total(_by_name(row))}


def is_whole(row: Mapping[str, object]) -> bool:
    """Whether a row with one checksum is as it was written."""
    return row["checksum"] == total(_by_name(row))


def lasting_sum(row: Mapping[str, object]) -> int:
    """The checksum of what does not change in the life of a reservation."""
    return _of(row, LASTING)


def life_sum(row: Mapping[str, object]) -> int:
    """The checksum of what does."""
    return _of(row, LIFE)


def is_whole_reservation(row: Mapping[str, object]) -> bool:
    """Whether the row of a reservation is as it was written."""
    return row["lasting_sum"] == lasting_sum(row) and row["life_sum"] == life_sum(row)


def _of(row: Mapping[str, object], columns: Sequence[str]) -> int:
    return total([row[column] for column in columns])


def _by_name(row: Mapping[str, object]) -> list[object]:
    return [row[column] for column in sorted(row) if column != "checksum"]
