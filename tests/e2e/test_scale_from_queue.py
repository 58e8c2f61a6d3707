"""The whole path on real parts: `gpuscalectl up`, a private RabbitMQ, the example worker and the example endpoint.

100 messages go in; replicas rise to max, each on a GPU of its own. The broker goes: replicas hold, and the decision says why. It
comes back, the queue drains, and replicas fall to min. That every message is acknowledged once: test_message_conservation.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common.wire import enum_word
from tests.support.cli import run_cli
from tests.support.rabbitmq import RabbitBroker
from tests.support.rabbitmq_queues import declare_queue, publish_each, queue_counts
from tests.support.up import Up, ctl_environment
from tests.support.waiting import eventually_sync

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = "endpoints/jobs"
QUEUE = "jobs"
MIN, MAX = 1, 4  # as examples/endpoint.yaml says
FEW = 50
"""Messages: with fewer than these the queue may be empty before a replica more is there."""
LIVE = {
    autoscaler_api.Replica.STATE_STARTING,
    autoscaler_api.Replica.STATE_READY,
    autoscaler_api.Replica.STATE_DRAINING,
}
ON_GPUS = LIVE | {autoscaler_api.Replica.STATE_UNKNOWN}

pytestmark = pytest.mark.timeout(300)


@dataclass
class Stack:
    """A running `up` with the example applied, and what was seen of it."""

    up: Up
    channel: grpc.Channel
    seen: set[str] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)

    def replicas(self) -> list[Any]:
        stub = autoscaler_api.EndpointServiceStub(self.channel)
        request = autoscaler_api.ListReplicasRequest(parent=ENDPOINT, page_size=1000)
        return list(stub.ListReplicas(request, timeout=60).replicas)

    def reservations(self) -> list[Any]:
        stub = allocator_api.AllocatorServiceStub(self.channel)
        return list(
            stub.ListReservations(
                allocator_api.ListReservationsRequest(page_size=1000), timeout=60
            ).reservations
        )

    def endpoint(self) -> Any:
        stub = autoscaler_api.EndpointServiceStub(self.channel)
        return stub.GetEndpoint(autoscaler_api.GetEndpointRequest(name=ENDPOINT), timeout=60).endpoint

    def decisions(self) -> list[Any]:
        stub = autoscaler_api.DecisionServiceStub(self.channel)
        request = autoscaler_api.ListDecisionsRequest(parent=ENDPOINT, page_size=1000)
        return list(stub.ListDecisions(request, timeout=60).decisions)

    def look(self) -> list[Any]:
        """The live replicas, checked: within max, each with a live reservation of its own, no GPU twice."""
        before = {item.name for item in self.reservations()}
        live = [replica for replica in self.replicas() if replica.state in LIVE]
        held = before | {item.name for item in self.reservations()}
        assert len(live) <= MAX, [replica.name for replica in live]
        gpus = [uuid for replica in live for uuid in replica.gpu_uuids]
        assert len(gpus) == len(set(gpus)) == len(live), "each replica has one GPU of its own"
        assert {replica.reservation for replica in live} <= held
        assert len({replica.reservation for replica in live}) == len(live)
        ready = [replica for replica in live if replica.state == autoscaler_api.Replica.STATE_READY]
        self.seen |= {replica.name for replica in live}
        self.gpus |= {uuid for one in ready for uuid in one.gpu_uuids}
        return live

    def ready(self) -> int:
        return sum(replica.state == autoscaler_api.Replica.STATE_READY for replica in self.look())


@pytest.fixture
def stack(rabbitmq_private: RabbitBroker, tmp_path: Path) -> Iterator[Stack]:
    """`up` with the example configuration, its queue, and the example applied by the CLI."""
    broker = rabbitmq_private
    asyncio.run(declare_queue(broker, QUEUE))
    environment = ctl_environment(
        GPUSCALE_BROKER_DEFAULT_AMQP_URL=broker.amqp_url,
        GPUSCALE_BROKER_DEFAULT_MANAGEMENT_URL=broker.management_url.replace(
            "://", f"://{broker.user}:{broker.password}@"
        ),
        GPUSCALE_EXAMPLE_AMQP_URL=broker.amqp_url,
    )
    arguments = ["--config", str(ROOT / "examples" / "gpuscale.toml")]
    with (
        Up(tmp_path, simulate=6, arguments=arguments, environment=environment) as up,
        grpc.insecure_channel(up.address) as channel,
    ):
        applied = run_cli("--address", up.address, "apply", "-f", str(ROOT / "examples" / "endpoint.yaml"))
        assert applied.code == 0, applied.err
        assert "endpoints/jobs created" in applied.out
        yield Stack(up, channel)


def work(count: int) -> list[bytes]:
    """Messages that say how many seconds their work takes; the same ones each time."""
    source = random.Random(7)
    return [f"{source.uniform(0.3, 0.5):.3f}".encode() for _ in range(count)]


def test_replicas_follow_the_queue_and_hold_without_the_broker(
    stack: Stack, rabbitmq_private: RabbitBroker
) -> None:
    """Unknown is not zero."""
    broker = rabbitmq_private
    eventually_sync(lambda: stack.ready() == MIN, timeout=90)
    asyncio.run(publish_each(broker, QUEUE, work(2 * FEW)))

    def at_max() -> bool:
        if stack.ready() == MAX:
            return True
        counts = asyncio.run(queue_counts(broker, QUEUE))
        assert counts is not None
        if counts.ready < FEW:  # replicas start slower than others work, on a busy machine
            asyncio.run(publish_each(broker, QUEUE, work(FEW)))
        return False

    eventually_sync(at_max, timeout=180, interval=0.3)
    broker.kill()
    held_without(stack, broker)
    broker.start()

    def at_min() -> bool:
        live = stack.look()
        return len(live) == MIN and live[0].state == autoscaler_api.Replica.STATE_READY

    eventually_sync(at_min, timeout=120, interval=0.2)
    eventually_sync(lambda: len(stack.reservations()) == MIN)
    counts = asyncio.run(queue_counts(broker, QUEUE))
    assert counts is not None
    assert (counts.ready, counts.unacknowledged) == (0, 0)
    assert len(stack.seen) >= MAX
    admitted = json.loads((stack.up.folder / "data" / "agent" / "admissions.json").read_text())
    assert stack.gpus <= set(admitted["fences"]), "the agent admits work before it starts"
    codes = {enum_word(step, "code") for decision in stack.decisions() for step in decision.steps}
    assert {"FIRED", "UP", "DOWN"} <= codes, codes


def held_without(stack: Stack, broker: RabbitBroker) -> None:
    """The broker is gone: five decisions later all replicas are there, and the decision says why."""

    def says_why() -> Any:
        newest = stack.decisions()[0]
        return (
            newest
            if any(enum_word(step, "code") in {"SIGNAL_MISSING", "SIGNAL_STALE"} for step in newest.steps)
            else None
        )

    first = eventually_sync(says_why, timeout=90)
    held = stack.endpoint().status.desired_replicas
    assert held == MAX
    later = eventually_sync(
        lambda: (found := says_why()) and found.count >= first.count + 5 and found, timeout=90
    )
    assert later.wanted == later.before == held
    assert stack.endpoint().status.desired_replicas == held
    assert stack.ready() == held, "no replica was stopped"
    why = " ".join(step.text for step in later.steps) + " ".join(item.detail for item in later.observations)
    assert "unreachable" in why.lower() or "refused" in why.lower(), why
    assert broker.password not in str(later)
