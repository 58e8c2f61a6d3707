"""Requests that wait for GPUs at the allocator, counted by tenant."""

from collections.abc import Mapping

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.model import WaitingSignal
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.autoscaler.signals.polling import Answer, NoAnswerError
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors

PAGE = 1_000
MAX_PAGES = 100
"""Pages of tenants that are read at most."""

Counts = Mapping[str, int]


class WaitingRequests:
    """The allocator, as a client: how many requests of each tenant wait."""

    def __init__(self, allocator: grpc.aio.Channel) -> None:
        self._stub = allocator_api.QuotaServiceStub(allocator)

    async def fetch(self, _question: None) -> Counts:
        """Waiting requests of every tenant that has some.

        Raises:
            NoAnswerError: the allocator does not tell.
        """
        counts: dict[str, int] = {}
        request = allocator_api.ListQuotasRequest(page_size=PAGE)
        try:
            for _ in range(MAX_PAGES):
                with rpc_errors():
                    found = await self._stub.ListQuotas(request, timeout=RPC_TIMEOUT)
                counts |= {one.tenant: one.waiting_count for one in found.quotas if one.waiting_count}
                request.page_token = found.next_page_token
                if not request.page_token:
                    return counts
        except GpuscaleError as error:
            raise NoAnswerError(f"the allocator does not answer: {error.message}") from error
        raise NoAnswerError(f"the allocator has more than {MAX_PAGES * PAGE} tenants")


def waiting_sample(source: WaitingSignal, answer: Answer[Counts]) -> Sample:
    """How many wait: of one tenant, or of all."""
    if answer.value is None:
        return Sample(at=answer.at, problem=answer.problem)
    count = answer.value.get(source.tenant, 0) if source.tenant else sum(answer.value.values())
    return Sample((float(count),), answer.at, proven_empty=count == 0)
