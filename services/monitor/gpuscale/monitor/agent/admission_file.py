"""Fences on disk, written before anybody is told that work is admitted.

The file is replaced as a whole: a crash leaves the old one or the new one. A file that cannot be read is kept and
refused: an agent that began with no fences would admit work whose lease is over.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.failpoints import hit
from gpuscale.monitor.agent.admission import Admissions, Worker
from gpuscale.monitor.model.readings import ProcessKey

FILE_NAME = "admissions.json"


class _Worker(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    pid: int
    started: int
    reservation: str = ""
    container: str = ""
    user: int | None = None
    fence: int
    gpus: list[str]


class _File(BaseModel):
    """What the file holds; processes count for the boot in which they were admitted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    version: int
    boot_id: str
    fences: dict[str, int]
    workers: list[_Worker]


_VERSION = 2
_WITHOUT_RESERVATIONS = 1
"""The version that knew workers by their fence alone: its fences count, its processes are unknown."""


class AdmissionFile:
    """The admissions of one agent in a directory that is its own. Its methods block."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._path = directory / FILE_NAME
        self._boot_id = boot_id

    def load(self) -> Admissions:
        """What was admitted before; processes of an earlier boot are gone.

        Raises:
            FailedPreconditionError: STATE_UNREADABLE, the file cannot be read or is not one of this version.
        """
        try:
            found = _File.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Admissions()
        except (OSError, ValidationError) as error:
            raise self._unreadable(type(error).__name__) from error
        if found.version not in {_VERSION, _WITHOUT_RESERVATIONS}:
            raise self._unreadable(f"version {found.version}")
        known = found.version == _VERSION and found.boot_id == self._boot_id
        workers = found.workers if known else ()
        return Admissions(found.fences, tuple(_workers(workers)))

    def save(self, admissions: Admissions) -> None:
        """Put them on disk; when this returns they are there.

        Raises:
            UnavailableError: STATE_UNAVAILABLE, they cannot be written.
        """
        text = _File(
            version=_VERSION,
            boot_id=self._boot_id,
            fences=dict(admissions.fences),
            workers=[
                _Worker(
                    pid=worker.process.pid,
                    started=worker.process.started,
                    reservation=worker.reservation,
                    container=worker.container,
                    user=worker.user,
                    fence=worker.fence,
                    gpus=sorted(worker.uuids),
                )
                for worker in admissions.workers
            ],
        ).model_dump_json()
        hit("agent.admit.before_write")
        try:
            self._replace(text.encode("utf-8"))
        except OSError as error:
            raise UnavailableError(
                f"the fence cannot be written: {error.strerror}", reason="STATE_UNAVAILABLE"
            ) from error
        hit("agent.admit.after_write")

    def _replace(self, content: bytes) -> None:
        draft = self._path.with_suffix(".new")
        draft.touch(mode=0o600)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _unreadable(self, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"the fences in {self._path} cannot be read ({why}); the file is kept as it is",
            reason="STATE_UNREADABLE",
        )


def _workers(found: Iterable[_Worker]) -> Iterable[Worker]:
    for one in found:
        process, uuids = ProcessKey(one.pid, one.started), frozenset(one.gpus)
        yield Worker(process, one.reservation, one.fence, uuids, one.container, one.user)
