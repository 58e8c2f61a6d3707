"""The replicas that the adapter started, on disk: no crash makes it start one twice or lose a running one.

One small file per replica, replaced atomically: written to a temporary file, flushed, renamed. The intent is written before the
engine is told of the replica. Blocking; call it in a thread.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import JsonValue, TypeAdapter
from pydantic_core import from_json

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.secrets import write_private


class Phase(StrEnum):
    """The phase of a replica."""

    INTENT = "intent"
    """About to be started, or being started."""
    RUNNING = "running"
    """It was started."""
    ENDED = "ended"
    """Ended, or will never be started."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One replica in the journal."""

    replica: str  # endpoints/{endpoint}/replicas/{replica}
    phase: Phase  # its phase
    boot_id: str  # the boot in which it was started
    # seconds since boot when it was asked to finish; None if it was not
    asked_to_stop_at: float | None = None
    failed: bool = False  # for an ended one, whether it ended on its own or could not be started
    exit_code: int | None = None  # negative for the signal that ended it; None if unknown
    reason: str = ""  # why it ended; may be empty
    kept: Mapping[str, JsonValue] | None = None  # what its engine needs to find it again


_SUFFIX = ".json"
_OLD_SUFFIX = f"{_SUFFIX}.new"  # of files that were being written, up to version 0.1
_OF_PROCESSES = ("process", "probe", "ready")
"""Fields that stood beside `kept` up to version 0.1."""
_RECORD: TypeAdapter[JournalRecord] = TypeAdapter(JournalRecord)


class Journal:
    """The records in a directory, which is created if missing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> list[JournalRecord]:
        """Every record, by replica; FailedPreconditionError if one cannot be read: nothing must be started then."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in (*self._directory.glob(f".*{_SUFFIX}.*"), *self._directory.glob(f"*{_OLD_SUFFIX}")):
                left.unlink()
            contents = {path: path.read_bytes() for path in self._directory.glob(f"*{_SUFFIX}")}
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot read what was started, in {self._directory}: {error.strerror}",
                reason="STATE_UNREADABLE",
            ) from error
        records: list[JournalRecord] = []
        for path, content in contents.items():
            try:
                fields: dict[str, JsonValue] | None = from_json(content)
                if isinstance(fields, dict) and fields.get("process"):
                    fields["kept"] = {name: fields.pop(name, None) for name in _OF_PROCESSES}
                records.append(_RECORD.validate_python(fields))
            except ValueError as error:
                raise FailedPreconditionError(
                    f"{path} cannot be read, so an unknown replica may be running; the file was not changed",
                    reason="STATE_UNREADABLE",
                ) from error
        return sorted(records, key=lambda record: record.replica)

    def write(self, records: Sequence[JournalRecord]) -> dict[str, OSError]:
        """Write records, on disk when this returns; returns the errors, by replica."""
        failed: dict[str, OSError] = {}
        for record in records:
            try:
                write_private(self._path(record.replica), _RECORD.dump_json(record), keep_owner=False)
            except OSError as error:
                failed[record.replica] = error
        try:
            self._flush_directory()
        except OSError as error:
            return dict.fromkeys((record.replica for record in records), error)
        return failed

    def remove(self, replicas: Iterable[str]) -> None:
        """Remove replicas' records; missing ones are no error."""
        for replica in replicas:
            self._path(replica).unlink(missing_ok=True)
        self._flush_directory()

    def _path(self, replica: str) -> Path:
        _, endpoint, _, own = replica.split("/")
        return self._directory / f"{endpoint}~{own}{_SUFFIX}"  # no id contains '~'

    def _flush_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
