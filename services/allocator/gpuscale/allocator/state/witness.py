"""Witness: a small file beside the database that tells which write was acknowledged last.

The database cannot tell by itself: SQLite ends the replay of its write-ahead log at the first frame that is damaged or
missing, and what came after it is gone without a word, acknowledged grants too. Every write has a number, which is in
the database with what it wrote; the witness holds the number of the last one that was committed. A database that knows
of less has lost something. The witness is written after each commit and never synced: after a power failure it may be
older than the database, which proves nothing and is accepted.

It also holds the first salt of the log, which SQLite draws for a new log and counts up whenever it begins one anew: the
log of another database, or an earlier one put back, is told by that before it is replayed.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from zlib import crc32

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger

NO_SALT = 0
"""The log is not known yet, or there is none."""
MOST_RESETS = 1 << 16
"""Beginnings of the log that a power failure may have hidden from the witness."""
_RECORD = Struct("<QLL")
_SALT = Struct(">L")
_SALT_AT = 16

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a witness holds."""

    number: int
    salt: int


class Witness:
    """The witness of a database. `put` is called by the thread that writes, the rest before and after its life."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(f"{database.name}-witness")
        self._database = database
        self._wal = database.with_name(f"{database.name}-wal")
        self._file = -1
        self._wal_file = -1
        self._failing = False
        self._seen: Seen | None = None

    def check_before(self) -> None:
        """Read what was acknowledged; to be called before the database is opened.

        Raises:
            FailedPreconditionError: STATE_INCONSISTENT, the witness is damaged, the database is gone, or its log is not
                the one that was written last.
        """
        self._seen = seen = self._read()
        if seen is None:
            return
        if seen.number and not _size(self._database):
            raise self._inconsistent("the database is empty")
        salt = _salt(self._wal)
        if salt and seen.salt and (salt - seen.salt) % (1 << 32) > MOST_RESETS:
            raise self._inconsistent("its write-ahead log is not the one that was written last")

    def check_after(self, number: int) -> None:
        """Compare with the number of the last write that the database knows of.

        Raises:
            FailedPreconditionError: STATE_INCONSISTENT, acknowledged writes are missing.
        """
        if self._seen is not None and number < self._seen.number:
            raise self._inconsistent(
                f"it ends with write {number}, and write {self._seen.number} was acknowledged"
            )

    def open(self, number: int) -> None:
        """Begin to write down what is committed from now on."""
        self._write(Seen(number, _salt(self._wal)))

    def put(self, number: int) -> None:
        """A write is on disk. Cannot fail it: without the witness it is only less well guarded."""
        if self._wal_file < 0:
            with suppress(FileNotFoundError):
                self._wal_file = os.open(self._wal, os.O_RDONLY)
        salt = _salt_of(self._wal_file) if self._wal_file >= 0 else NO_SALT
        self._write(Seen(number, salt))

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._wal_file):
            if file >= 0:
                os.close(file)

    def _write(self, seen: Seen) -> None:
        body = _RECORD.pack(seen.number, seen.salt, 0)
        try:
            if self._file < 0:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._file, _RECORD.pack(seen.number, seen.salt, crc32(body)), 0)
        except OSError as error:
            if not self._failing:
                _log.warning("cannot write down what is on disk", file=str(self.path), problem=str(error))
            self._failing = True

    def _read(self) -> Seen | None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if not content:  # made, and then the power failed
            return None
        if len(content) == _RECORD.size:
            number, salt, found = _RECORD.unpack(content)
            if found == crc32(_RECORD.pack(number, salt, 0)):
                return Seen(number, salt)
        raise self._inconsistent("what tells of the last write is damaged")

    def _inconsistent(self, what: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"the state in {self._database} is not what was acknowledged: {what}. Nothing is granted on such a state, and"
            f" it was left as it is. Restore a copy; to go on with what there is, remove {self.path}",
            reason="STATE_INCONSISTENT",
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _salt(wal: Path) -> int:
    """The first salt of a log; NO_SALT where there is none."""
    try:
        file = os.open(wal, os.O_RDONLY)
    except FileNotFoundError:
        return NO_SALT
    try:
        return _salt_of(file)
    finally:
        os.close(file)


def _salt_of(file: int) -> int:
    found = os.pread(file, _SALT.size, _SALT_AT)
    return _SALT.unpack(found)[0] if len(found) == _SALT.size else NO_SALT
