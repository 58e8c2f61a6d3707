"""Deadlines: what is due first, in O(log n), with one entry a key however often its deadline moves. Pure."""

import heapq


class Deadlines:
    """Keys by the time at which they are to be looked at.

    A deadline that moves later leaves its entry where it is: the key is then looked at too early, and whoever looks
    adds it again. So a lease that is renewed each second for a week still has one entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: str, deadline: float) -> None:
        """Look at the key at `deadline`, or earlier where it is queued earlier."""
        if deadline < self._queued.get(key, float("inf")):
            self._queued[key] = deadline
            heapq.heappush(self._heap, (deadline, key))

    def earliest(self) -> float | None:
        """When the next key is to be looked at; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> str | None:
        """Take out a key whose time has come; None when there is none."""
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if self._queued.get(key) == deadline:
                del self._queued[key]
                return key
        return None
