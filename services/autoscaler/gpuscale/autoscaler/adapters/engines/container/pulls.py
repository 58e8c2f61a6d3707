"""Images that are being fetched, and the replicas that wait for them. One fetch for each image, however many wait."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gpuscale.autoscaler.adapters.engines.container.docker_api import EngineRefusedError
from gpuscale.autoscaler.adapters.engines.model import EngineUnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope

_log = get_logger(__name__)


@dataclass(slots=True)
class _Wait:
    """A replica that waits for an image; `outcome` is None while it is fetched, empty once it is there, else why not."""

    image: str
    outcome: str | None = None


class Pulls:
    """Fetches in the background.

    Args:
        fetch: brings one image, and ends when it is there.
        changed: called whenever a fetch has ended.
        tasks: where fetches run.
    """

    def __init__(
        self, fetch: Callable[[str], Awaitable[None]], changed: Callable[[], None], tasks: TaskScope
    ) -> None:
        self._fetch = fetch
        self._changed = changed
        self._tasks = tasks
        self._under_way: set[str] = set()
        self._waits: dict[str, _Wait] = {}

    def waiting(self) -> Mapping[str, str]:
        """What each replica waits for, for a person, by name."""
        return {replica: f"its image {wait.image} is being pulled" for replica, wait in self._waits.items()}

    def missing(self, replica: str, image: str, why: str) -> str:
        """The engine says that it has no such image: fetch it, once. Returns why the replica never starts, or nothing."""
        wait = self._waits.get(replica)
        if wait is None:
            self._waits[replica] = _Wait(image)
            self._begin(image)
            return ""
        if wait.outcome is None:
            return ""
        del self._waits[replica]
        return wait.outcome or f"its image {image} was pulled, and still the engine says: {why}"

    def drop(self, replica: str) -> None:
        """This replica waits no more; a fetch that is under way goes on, for the next one."""
        self._waits.pop(replica, None)

    def _begin(self, image: str) -> None:
        if image not in self._under_way:
            self._under_way.add(image)
            self._tasks.start(f"pull of {image}", self._pull(image))

    async def _pull(self, image: str) -> None:
        _log.info("pulling an image", image=image)
        outcome = ""
        try:
            await self._fetch(image)
            _log.info("image pulled", image=image)
        except (EngineRefusedError, EngineUnavailableError) as error:
            outcome = f"its image {image} cannot be pulled: {error}"
            _log.warning("image not pulled", image=image, why=str(error))
        self._under_way.discard(image)
        for wait in self._waits.values():
            if wait.image == image:
                wait.outcome = outcome
        self._changed()
