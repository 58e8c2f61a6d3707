"""Questions for parts of replicas' logs: who was asked what, and what came back."""

import asyncio
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuscale.common.errors import GpuscaleError, ResourceExhaustedError, UnavailableError

TIMEOUT: Final = 5.0
"""Seconds for which an adapter may think about its answer."""
MOST_AT_ONCE: Final = 8
"""Questions to one adapter that wait for their answers."""


class LogQuestion(NamedTuple):
    """Asks for at most `most` bytes of what a replica wrote, from `offset` on; None: up to its end."""

    number: int
    replica: str
    offset: int | None
    most: int


@dataclass(frozen=True, slots=True)
class LogPart:
    """A part of what a replica wrote, and where it begins; `problem`: why there is none."""

    content: bytes = b""
    offset: int = 0
    problem: str = ""


class AskedLogs:
    """The questions to one adapter over one connection."""

    def __init__(self) -> None:
        self._number = 0
        self._unsent: list[LogQuestion] = []
        self._answers: dict[int, asyncio.Future[LogPart]] = {}

    def put(self, replica: str, offset: int | None, most: int) -> LogQuestion:
        """Take a question; it is to be waited for.

        Raises:
            ResourceExhaustedError: too many wait.
        """
        if len(self._answers) >= MOST_AT_ONCE:
            text = f"{MOST_AT_ONCE} parts of logs are being read from this adapter: try again"
            raise ResourceExhaustedError(text, reason="LOGS_BUSY", retry_after=1.0)
        self._number += 1
        question = LogQuestion(self._number, replica, offset, most)
        self._answers[question.number] = asyncio.get_running_loop().create_future()
        self._unsent.append(question)
        return question

    async def answer(self, question: LogQuestion) -> LogPart:
        """Wait for the answer to a question.

        Raises:
            UnavailableError: none came.
        """
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._answers[question.number]
        except TimeoutError:
            text = f"the adapter of {question.replica} did not answer within {TIMEOUT:g} s"
            raise UnavailableError(text, reason="ADAPTER_SILENT") from None
        finally:
            del self._answers[question.number]
            if question in self._unsent:  # over a stream that takes nothing they would come to any number
                self._unsent.remove(question)

    def unsent(self) -> list[LogQuestion]:
        """The questions that were not sent yet, and are now; but for those that nobody waits for any more."""
        taken, self._unsent = self._unsent, []
        return [question for question in taken if question.number in self._answers]

    def heard(self, number: int, part: LogPart) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(part)

    def fail(self, error: GpuscaleError) -> None:
        """Nobody will answer any more."""
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
