"""Which nodes turn stale when, so that the passing of time costs nothing for those whose agents keep on sending."""

from heapq import heappop, heappush

from gpuscale.monitor.fleet.record import Record
from gpuscale.monitor.fleet.staleness import stale_at


class Online:
    """Nodes that were ONLINE, each by the time at which the snapshot that it had then turns stale.

    That time passes for every node: only then it is seen whether a newer snapshot has come since.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Record]] = []
        self._count = 0

    def await_stale(self, record: Record) -> None:
        """Begin to watch a node that has a snapshot."""
        if record.sample is not None:
            record.awaited = True
            self._count += 1
            heappush(self._heap, (stale_at(record.sample), self._count, record))

    def due(self, now: float) -> list[Record]:
        """The nodes whose last snapshot has turned stale; they are not watched any more."""
        found: list[Record] = []
        while self._heap and self._heap[0][0] < now:
            record = heappop(self._heap)[2]
            record.awaited = False
            if record.sample is not None and stale_at(record.sample) >= now:
                self.await_stale(record)
            else:
                found.append(record)
        return found
