"""Of things of an engine that stand there twice for one replica the one that counts.

An answer that is lost makes a start come again; where an engine took both, the later one is ended.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from gpuscale.common.runtime.logs import get_logger

_log = get_logger(__name__)


class Kept(Protocol):
    """A job, a task, or whatever an engine calls it."""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        ...


K = TypeVar("K", bound=Kept)


async def one_each(
    found: Iterable[tuple[str, K]],
    first: Callable[[Iterable[K]], K],
    end: Callable[[K], Awaitable[None]],
) -> dict[str, K]:
    """The one that counts of each replica.

    Args:
        found: all of them, with the name of the replica.
        first: says which of several counts.
        end: ends one of those that do not.

    Raises:
        EngineUnavailableError: one that is there twice was perhaps not ended.
    """
    by_replica: dict[str, list[K]] = {}
    for replica, one in found:
        by_replica.setdefault(replica, []).append(one)
    counts = {replica: first(own) for replica, own in by_replica.items()}
    for replica, own in by_replica.items():
        for other in own:
            if other is not counts[replica] and not other.over:
                _log.warning("ending what was started twice", replica=replica, what=str(other))
                await end(other)
    return counts
