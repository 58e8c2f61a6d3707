"""XID errors since the agent started: how many of each code, and the last of each GPU."""

from collections import Counter
from collections.abc import Iterable

from gpuscale.common.runtime.metrics_text import Family, Page, labels
from gpuscale.monitor.agent.events import GpuEvents
from gpuscale.monitor.model.readings import GpuEvent

COUNT = Family(
    "gpuscale_gpu_xid_errors_total", "counter", "XID errors of a GPU since the agent started, by code."
)
TIME = Family("gpuscale_gpu_xid_last_timestamp_seconds", "gauge", "When a GPU last had that XID error.")
DCGM_LAST = Family("DCGM_FI_DEV_XID_ERRORS", "gauge", "Code of the last XID error.")


class Xids:
    """Counts what `follow` hears. The first error is as visible as any: its time stands beside the count."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._last: dict[tuple[str, int], float] = {}

    async def follow(self, events: GpuEvents) -> None:
        """Count for ever."""
        with events.subscribe() as queue:
            while True:
                self.note(await queue.get())

    def add_to(self, page: Page, gpus: Iterable[tuple[str, dict[str, str], str]]) -> None:
        """Add the errors of these GPUs: UUID, our own labels, and the text of DCGM's, empty for none."""
        whose = {uuid: (own, dcgm) for uuid, own, dcgm in gpus}
        newest: dict[str, int] = {}
        for (uuid, xid), seen in sorted(self._last.items(), key=lambda item: item[1]):
            if uuid not in whose:
                continue
            text = labels({**whose[uuid][0], "xid": str(xid)})
            page.add(COUNT, text, self._counts[uuid, xid])
            page.add(TIME, text, round(seen, 3))
            newest[uuid] = xid
        for uuid, xid in newest.items():
            if whose[uuid][1]:
                page.add(DCGM_LAST, whose[uuid][1], xid)

    def note(self, event: GpuEvent) -> None:
        """Count an event, if it is an XID error."""
        if event.xid is not None:
            self._counts[event.uuid, event.xid] += 1
            self._last[event.uuid, event.xid] = event.seen_time.timestamp()
