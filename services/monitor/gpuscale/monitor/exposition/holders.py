"""Who holds the GPUs of a node, as the allocator says when a page is made; for labels of their series."""

from collections import defaultdict
from collections.abc import Mapping

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.runtime.tasks import Clock

TIMEOUT_SECONDS = 1.0
KEPT_SECONDS = 60.0
"""How long the last answer serves while the allocator gives none: series that come and go are no use."""


class HoldersOfNode:
    """Asks the allocator at the end of a channel."""

    def __init__(self, allocator: grpc.aio.Channel, node: str, clock: Clock) -> None:
        self._stub = allocator_api.AllocatorServiceStub(allocator)
        self._request = allocator_api.ListReservationsRequest(page_size=1000, filter=f'gpus.node:"{node}"')
        self._clock = clock
        self._last: Mapping[str, Mapping[str, str]] = {}
        self._until = 0.0

    async def ask(self) -> Mapping[str, Mapping[str, str]]:
        """The labels of each GPU that is held, by UUID; those who share one stand with commas between."""
        found: defaultdict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        try:
            answer = await self._stub.ListReservations(self._request, timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return self._last if self._clock.now() < self._until else {}
        for one in answer.reservations:
            job = one.name.removeprefix("reservations/") if one.HasField("job") else ""
            for gpu in one.gpus:
                for label, value in (("holder", one.holder), ("tenant", one.tenant), ("hpc_job", job)):
                    found[gpu.uuid][label].add(value)
        self._last = {
            uuid: {label: ",".join(sorted(filter(None, values))) for label, values in labels.items()}
            for uuid, labels in found.items()
        }
        self._until = self._clock.now() + KEPT_SECONDS
        return self._last
