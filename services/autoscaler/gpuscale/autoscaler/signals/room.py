"""How many more replicas there are GPUs for, as the allocator sees it now. It reserves nothing: somebody may be quicker."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.model import DEFAULT_MAX_AGE, ReplicaTemplate
from gpuscale.autoscaler.signals.polling import Answer, NoAnswerError
from gpuscale.autoscaler.wire.translate import ask_to_wire
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors


@dataclass(frozen=True, slots=True)
class Shape:
    """The ask of a replica, as the contract encodes it, and how many GPUs it is for."""

    gpu_count: int
    ask: bytes


def shape_of(template: ReplicaTemplate, nodes: set[str]) -> Shape:
    """What a replica of a template needs, on some nodes."""
    ask = ask_to_wire(template, sorted(nodes))
    return Shape(template.gpu_count, ask.SerializeToString(deterministic=True))


class Room:
    """The allocator, as a client: how many times a shape fits."""

    def __init__(self, allocator: grpc.aio.Channel) -> None:
        self._stub = allocator_api.CapacityServiceStub(allocator)

    async def fetch(self, shape: Shape) -> int:
        """How many replicas of a shape fit at once; of more than 100 nodes those that fit best are counted.

        Raises:
            NoAnswerError: the allocator does not tell.
        """
        ask = allocator_api.Ask.FromString(shape.ask)
        try:
            with rpc_errors():
                found = await self._stub.ExplainPlacement(
                    allocator_api.ExplainPlacementRequest(ask=ask), timeout=RPC_TIMEOUT
                )
        except GpuscaleError as error:
            raise NoAnswerError(f"the allocator does not answer: {error.message}") from error
        return sum(one.fitting_count // shape.gpu_count for one in found.nodes if not one.obstacle)


def room_of(answer: Answer[int], now: float, since: float) -> int | None:
    """How many more replicas fit; None where nobody knows, or it was asked before `since`, or too long ago."""
    oldest = max(since, now - DEFAULT_MAX_AGE)
    return answer.value if answer.at is not None and answer.at >= oldest else None
