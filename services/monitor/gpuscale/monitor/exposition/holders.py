"""Who holds GPUs, as the allocator says when a page is made; for labels of their series."""

from collections import defaultdict
from collections.abc import Mapping

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.tasks import Clock

TIMEOUT_SECONDS = 1.0
KEPT_SECONDS = 60.0
"""How long the last answer serves while the allocator gives none: series that come and go are no use."""


class HolderLabels:
    """Asks the allocator at the end of a channel, of one node, or of all where it has no name.

    Raises:
        FailedPreconditionError: there is no channel.
    """

    def __init__(self, allocator: grpc.aio.Channel | None, clock: Clock, node: str = "") -> None:
        if allocator is None:
            raise FailedPreconditionError("metrics_holders needs allocator_address", reason="NO_ALLOCATOR")
        self._stub = allocator_api.AllocatorServiceStub(allocator)
        self._filter = f'gpus.node:"{node}"' if node else ""
        self._clock = clock
        self._last: Mapping[str, Mapping[str, str]] = {}
        self._until = 0.0

    async def ask(self) -> Mapping[str, Mapping[str, str]]:
        """The labels of each GPU that is held, by UUID; those who share one stand with commas between."""
        found: defaultdict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        request = allocator_api.ListReservationsRequest(page_size=1000, filter=self._filter)
        while True:
            try:
                answer = await self._stub.ListReservations(request, timeout=TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                return self._last if self._clock.now() < self._until else {}
            for one in answer.reservations:
                job = one.name.removeprefix("reservations/") if one.HasField("job") else ""
                for gpu in one.gpus:
                    for label, value in (("holder", one.holder), ("tenant", one.tenant), ("hpc_job", job)):
                        found[gpu.uuid][label].add(value)
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
        self._last = {
            uuid: {label: ",".join(sorted(filter(None, values))) for label, values in labels.items()}
            for uuid, labels in found.items()
        }
        self._until = self._clock.now() + KEPT_SECONDS
        return self._last
