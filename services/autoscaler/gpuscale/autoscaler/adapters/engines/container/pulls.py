"""Images that are pulled in the background, and the replicas that wait for them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    LaunchRefusedError,
    Sighting,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.container.containers import EngineRefusedError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope

_log = get_logger(__name__)


@dataclass(slots=True)
class _Wait:
    """A replica that waits for an image; `outcome` is None during the pull, then empty, or why it failed."""

    image: str
    outcome: str | None = None


class Pulls:
    """Pulls images in the background.

    Args:
        pull: pulls one image, and returns when it is there.
        changed: called whenever a pull has ended.
        tasks: where pulls run.
    """

    def __init__(
        self, pull: Callable[[str], Awaitable[None]], changed: Callable[[], None], tasks: TaskScope
    ) -> None:
        self._pull_image = pull
        self._changed = changed
        self._tasks = tasks
        self._under_way: set[str] = set()
        self._waits: dict[str, _Wait] = {}

    def waiting(self) -> dict[str, Sighting]:
        """The replicas that wait for an image."""
        return {
            replica: Sighting(WorkerLife.WAITING, reason=f"its image {wait.image} is being pulled")
            for replica, wait in self._waits.items()
        }

    def missing(self, replica: str, image: str, why: str) -> None:
        """Pull an image once, which the engine says is missing.

        Raises:
            LaunchRefusedError: it cannot be pulled, or was pulled and is still missing.
        """
        wait = self._waits.get(replica)
        if wait is None:
            self._waits[replica] = _Wait(image)
            if image not in self._under_way:
                self._under_way.add(image)
                self._tasks.start(f"pull of {image}", self._pull(image))
        elif wait.outcome is not None:
            del self._waits[replica]
            raise LaunchRefusedError(
                wait.outcome or f"its image {image} was pulled, and still the engine says: {why}"
            )

    def drop(self, replica: str) -> None:
        """This replica does not wait any more; a pull that is under way goes on, for the next one."""
        self._waits.pop(replica, None)

    async def _pull(self, image: str) -> None:
        _log.info("pulling an image", image=image)
        outcome = ""
        try:
            await self._pull_image(image)
            _log.info("image pulled", image=image)
        except (EngineRefusedError, EngineUnavailableError) as error:
            outcome = f"its image {image} cannot be pulled: {error}"
            _log.warning("image not pulled", image=image, why=str(error))
        self._under_way.discard(image)
        for wait in self._waits.values():
            if wait.image == image:
                wait.outcome = outcome
        self._changed()
