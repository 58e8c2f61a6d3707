"""Which endpoints read which queue watcher, so that none is deleted from under them."""

from collections.abc import Set as AbstractSet

from gpuscale.common.names import endpoint_name


class WatcherUses:
    """Kept beside the stored specs: a watcher is entered before a spec that names it is stored."""

    def __init__(self) -> None:
        self._watchers: dict[str, AbstractSet[str]] = {}

    def of(self, watcher: str) -> list[str]:
        """Names of the endpoints that read a watcher."""
        return [endpoint_name(one) for one, watchers in sorted(self._watchers.items()) if watcher in watchers]

    def reads(self, endpoint: str) -> AbstractSet[str]:
        """Ids of the watchers that an endpoint reads."""
        return self._watchers.get(endpoint, frozenset())

    def set(self, endpoint: str, watchers: AbstractSet[str]) -> None:
        """What an endpoint reads from now on; nothing for one that is gone."""
        if watchers:
            self._watchers[endpoint] = watchers
        else:
            self._watchers.pop(endpoint, None)
