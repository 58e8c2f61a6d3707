"""How the collection itself does, for whoever watches the watcher. Pure."""

from collections.abc import Collection as Several
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Collection:
    """How the collection does.

    Attributes:
        open: whether the source is open.
        released: whether the driver was let go of on request.
        hung_threads: threads that are stuck in the driver, at most one for each GPU.
        openings: how often the source was opened, failures included.
        interruptions: how often a driver that did not answer was interrupted.
        calls: how often the driver was called to read GPUs.
        refusals: how many of these calls gave an error, what a GPU does not support among them.
    """

    open: bool
    released: bool
    hung_threads: int
    openings: int
    interruptions: int
    calls: int
    refusals: int


class Counted(Protocol):
    """What calls of the driver are counted of."""

    calls: int
    refusals: int


@dataclass(slots=True)
class Calls:
    """Calls of the driver for GPUs that are not there any more; counters never go back."""

    calls: int = 0
    refusals: int = 0

    def keep(self, gone: Iterable[Counted]) -> None:
        """Remember what these have counted."""
        for one in gone:
            self.calls += one.calls
            self.refusals += one.refusals

    def with_those_of(self, there: Several[Counted]) -> tuple[int, int]:
        """Calls and refusals in all."""
        calls = self.calls + sum(one.calls for one in there)
        return calls, self.refusals + sum(one.refusals for one in there)
