"""Decisions as JSON lines in a file that one can tail: bounded, one older file beside it, and never in anybody's way.

Lines are written by a thread, in the order they came. What cannot be written, or comes faster than it can be, is dropped
and said in the log: the store has every decision all the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from google.protobuf.json_format import MessageToJson

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope

MOST_WAITING = 1_000
"""Decisions that wait to be written; more are dropped."""
_log = get_logger(__name__)


class DecisionFile:
    """Writes decisions to a file, or nowhere where there is none."""

    def __init__(self, path: Path | None, most_bytes: int) -> None:
        self._path = path
        self._most = most_bytes
        self._waiting: asyncio.Queue[api.Decision] = asyncio.Queue(MOST_WAITING)
        self._dropping = False

    def put(self, decision: api.Decision) -> None:
        """Have a decision written."""
        if self._path is None:
            return
        try:
            self._waiting.put_nowait(decision)
        except asyncio.QueueFull:
            self._dropped("it is written more slowly than decisions come")

    async def run(self) -> None:
        """Write for ever."""
        while True:
            taken = [await self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get_nowait())
            try:
                await asyncio.to_thread(self._write, taken)
            except OSError as error:
                self._dropped(error.strerror or str(error))
            else:
                self._dropping = False

    def _write(self, decisions: Sequence[api.Decision]) -> None:
        path = self._path
        if path is None:
            return
        text = "".join(_line(decision) for decision in decisions)
        if path.exists() and path.stat().st_size + len(text) > self._most:
            path.replace(path.with_name(f"{path.name}.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(text)

    def _dropped(self, why: str) -> None:
        """Say it once, until lines can be written again."""
        if not self._dropping:
            self._dropping = True
            _log.warning("decisions are missing in their file", file=str(self._path), error=why)


def _line(decision: api.Decision) -> str:
    return MessageToJson(decision, indent=None) + "\n"


@asynccontextmanager
async def open_decision_file(path: Path | None, most_bytes: int) -> AsyncGenerator[DecisionFile]:
    """A file of decisions; what waits when the context is left is not written."""
    file = DecisionFile(path, most_bytes)
    async with TaskScope() as scope:
        if path is not None:
            scope.spawn("write decisions", file.run())
        yield file
