"""The index of nodes: who reports, what is believed, what watchers are told."""

from contextlib import ExitStack
from itertools import islice

import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import ResourceExhaustedError
from gpuscale.common.wire import seconds, to_datetime
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import AgentStream, NodeRecord, to_node
from gpuscale.monitor.model.nodes import Epoch, NodeSample, NodeState, refuse_epoch, refuse_sample
from tests.support.clock import WALL_START, ManualClock
from tests.support.monitor import told_of
from tests.support.monitor_values import gpu, hello, snapshot, telemetry


class Fleet:
    """An index, its clock, and streams that stay open until the test ends them."""

    def __init__(self, max_nodes: int = 100) -> None:
        self.clock = ManualClock()
        self.nodes = Nodes(self.clock, max_nodes)
        self.ended: list[str] = []
        self._stacks: dict[AgentStream, ExitStack] = {}

    def connect(self, node: str = "alpha", epoch: int = 1) -> AgentStream:
        stack = ExitStack()
        message = hello(node, epoch=epoch)
        stream = stack.enter_context(
            self.nodes.connected(message, lambda: self.ended.append(f"{node} {epoch}"))
        )
        self._stacks[stream] = stack
        return stream

    def close(self, stream: AgentStream) -> None:
        self._stacks[stream].close()

    def send(self, stream: AgentStream, message: types_api.Snapshot) -> bool:
        return self.nodes.take(stream, telemetry(message))

    def state(self, node: str = "alpha") -> NodeState:
        return self.nodes.get(node).state(self.clock.now())

    def node(self, node: str = "alpha") -> monitor_api.Node:
        return to_node(self.nodes.get(node), self.clock.now())


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_node_is_stale_until_its_first_snapshot_then_online(fleet: Fleet) -> None:
    stream = fleet.connect()
    assert fleet.state() is NodeState.STALE
    assert not fleet.node().HasField("snapshot")
    assert fleet.send(stream, snapshot(seq=3))
    assert fleet.state() is NodeState.ONLINE
    assert stream.acked_seq == 3


def test_ages_are_counted_on_and_a_stale_node_shows_stale_gpus(fleet: Fleet) -> None:
    stream = fleet.connect()
    fleet.send(stream, snapshot(age=0.5, period=1.0))
    fleet.clock.advance(2.0)
    node = fleet.node()
    assert node.state == monitor_api.NodeState.NODE_STATE_ONLINE
    assert seconds(node.snapshot.age) == 2.5
    assert seconds(node.snapshot.gpus[0].reading.age) == 2.25
    assert seconds(node.snapshot.host_reading.age) == 2.5
    assert node.snapshot.gpus[0].state == types_api.GpuState.GPU_STATE_OK
    fleet.clock.advance(1.0)
    node = fleet.node()
    assert node.state == monitor_api.NodeState.NODE_STATE_STALE
    assert node.snapshot.gpus[0].state == types_api.GpuState.GPU_STATE_STALE
    assert node.snapshot.gpus[0].reading.utilization_percent == 10


def test_an_answer_does_not_change_what_is_kept(fleet: Fleet) -> None:
    fleet.send(fleet.connect(), snapshot())
    fleet.clock.advance(60.0)
    assert fleet.node() == fleet.node()


def test_a_node_whose_stream_closed_is_offline_with_its_last_snapshot(fleet: Fleet) -> None:
    stream = fleet.connect()
    fleet.send(stream, snapshot(seq=9))
    fleet.close(stream)
    node = fleet.node()
    assert node.state == monitor_api.NodeState.NODE_STATE_OFFLINE
    assert node.snapshot.seq == 9
    assert node.snapshot.gpus[0].state == types_api.GpuState.GPU_STATE_STALE


def test_the_same_run_may_come_again_and_goes_on_with_its_numbers(fleet: Fleet) -> None:
    first = fleet.connect()
    fleet.send(first, snapshot(seq=5))
    second = fleet.connect()
    assert fleet.ended == ["alpha 1"]
    assert not fleet.send(second, snapshot(seq=5))
    assert second.rejected_reason == "its seq 5 is not above 5"
    assert fleet.send(second, snapshot(seq=6))


def test_refused_snapshots_are_counted_by_stream_and_node_and_change_nothing(fleet: Fleet) -> None:
    stream = fleet.connect()
    fleet.send(stream, snapshot(seq=1))
    before = fleet.node().snapshot
    assert not fleet.send(stream, snapshot(seq=2, gpus=(gpu(free=81 * 1024**3),)))
    assert not fleet.send(stream, snapshot("beta", seq=3))
    assert not fleet.nodes.take(stream, telemetry(hello()))
    assert not fleet.nodes.take(stream, monitor_internal.StreamTelemetryRequest())
    assert stream.rejected_count == 4
    assert stream.rejected_reason == "it is not a snapshot"
    assert fleet.node().rejected_count == 4
    assert fleet.node().snapshot == before
    assert stream.acked_seq == 1


def test_a_gpu_belongs_to_the_node_that_reported_it_first(fleet: Fleet) -> None:
    first, second = fleet.connect("alpha"), fleet.connect("beta")
    assert fleet.send(first, snapshot("alpha", gpus=(gpu("GPU-X"),)))
    assert not fleet.send(second, snapshot("beta", gpus=(gpu("gpu-x"),)))
    assert second.rejected_reason == "GPU gpu-x is reported by nodes/alpha"
    fleet.close(first)
    assert not fleet.send(second, snapshot("beta", seq=2, gpus=(gpu("GPU-X"),)))


def test_a_gpu_that_its_node_no_longer_lists_may_be_reported_by_another(fleet: Fleet) -> None:
    first, second = fleet.connect("alpha"), fleet.connect("beta")
    fleet.send(first, snapshot("alpha", seq=1, gpus=(gpu("GPU-X"), gpu("GPU-Y"))))
    fleet.send(first, snapshot("alpha", seq=2, gpus=(gpu("GPU-Y"),)))
    assert fleet.send(second, snapshot("beta", gpus=(gpu("GPU-X"),)))
    assert not fleet.send(second, snapshot("beta", seq=2, gpus=(gpu("GPU-Y"),)))


def test_a_gpu_of_a_node_that_is_gone_moves_and_is_listed_once(fleet: Fleet) -> None:
    """A host that was renamed."""
    first, second = fleet.connect("alpha"), fleet.connect("beta")
    fleet.send(first, snapshot("alpha", gpus=(gpu("GPU-X"), gpu("GPU-Y"))))
    fleet.close(first)
    fleet.clock.advance(3.1)
    assert fleet.send(second, snapshot("beta", gpus=(gpu("GPU-X"),)))
    assert [one.uuid for one in fleet.node("alpha").snapshot.gpus] == ["GPU-Y"]
    assert [one.name for one in fleet.node("beta").snapshot.gpus] == ["nodes/beta/gpus/gpu-x"]
    again = fleet.connect("alpha")
    assert not fleet.send(again, snapshot("alpha", seq=2, gpus=(gpu("GPU-X"), gpu("GPU-Y"))))


def test_gpus_are_named_by_the_fleet_and_not_by_the_agent(fleet: Fleet) -> None:
    one = gpu("GPU-X")
    one.name = "nodes/other/gpus/stolen"
    fleet.send(fleet.connect(), snapshot(gpus=(one,)))
    assert fleet.node().snapshot.gpus[0].name == "nodes/alpha/gpus/gpu-x"


def test_a_node_tells_its_version_and_when_it_was_first_seen(fleet: Fleet) -> None:
    fleet.close(fleet.connect(epoch=1))
    fleet.clock.advance(10.0)
    fleet.connect(epoch=2)
    node = fleet.node()
    assert node.name == "nodes/alpha"
    assert node.agent_version == "1.2.3"
    assert to_datetime(node.first_seen_time) == WALL_START


def test_the_number_of_nodes_is_limited() -> None:
    fleet = Fleet(max_nodes=2)
    fleet.close(fleet.connect("alpha"))
    fleet.connect("beta")
    with pytest.raises(ResourceExhaustedError):
        fleet.connect("gamma")
    fleet.connect("alpha")
    assert [record.node for record in fleet.nodes.all()] == ["alpha", "beta"]


@pytest.mark.parametrize("count", [20, 300])
def test_the_next_nodes_by_id_are_found_without_a_look_at_others(count: int) -> None:
    fleet, looked_at = Fleet(max_nodes=count), list[str]()
    for number in sorted(range(count), key=lambda number: number % 7):
        fleet.close(fleet.connect(f"n{number:03}"))

    class Counted(dict[str, NodeRecord]):
        def get(self, node: str, *_: object) -> NodeRecord | None:
            looked_at.append(node)
            return super().get(node)

    fleet.nodes._records = Counted(fleet.nodes._records)
    fleet.nodes.forget("n011")
    looked_at.clear()
    assert [record.node for record in islice(fleet.nodes.all("n009"), 3)] == ["n010", "n012", "n013"]
    assert looked_at == ["n010", "n012", "n013"]


async def test_watchers_learn_of_every_change_and_of_time_alone(fleet: Fleet) -> None:
    async with told_of(fleet.nodes) as told:
        stream = fleet.connect()
        fleet.send(stream, snapshot(seq=1))
        fleet.connect("beta")
        assert await told() == ["alpha", "beta"]
        fleet.nodes.sweep()
        fleet.send(stream, snapshot(seq=1))
        assert await told() == ["alpha"], "a refusal shows in rejected_count"
        fleet.clock.advance(3.1)
        fleet.nodes.sweep()
        assert await told() == ["alpha"]
        fleet.nodes.sweep()
        fleet.close(stream)
        assert await told() == ["alpha"]
    assert fleet.nodes.feed.reader_count == 0


def test_of_two_runs_that_started_at_once_exactly_one_wins() -> None:
    first, second = Epoch(100.0, "a"), Epoch(100.0, "b")
    assert (refuse_epoch(first, second, gone=False) == "") != (refuse_epoch(second, first, gone=False) == "")


def test_a_period_that_would_never_or_always_be_stale_is_refused() -> None:
    assert refuse_sample(None, NodeSample(Epoch(100.0, "a"), 5, 10.0, period=0.0)) != ""
