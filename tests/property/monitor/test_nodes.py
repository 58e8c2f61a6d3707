"""Whatever order agents connect, send and vanish in, no node moves back and no GPU is in two places."""

from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpuscale.common.errors import AbortedError
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import AgentStream
from gpuscale.monitor.model.nodes import NodeState
from tests.support.clock import ManualClock
from tests.support.monitor_values import epoch_id, gpu, hello, snapshot, telemetry

NODES = ("alpha", "beta")
UUIDS = ("GPU-1", "GPU-2", "GPU-3")
PERIOD = 1.0


class Agents(RuleBasedStateMachine):
    """Several runs of several agents against one index, and a plain account of what was taken in."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.nodes = Nodes(self.clock, max_nodes=10)
        self.open: list[tuple[AgentStream, ExitStack, int]] = []
        self.superseded: list[AgentStream] = []
        self.reporting: dict[str, int] = {}  # epoch of the last stream that was let in
        self.taken: dict[str, tuple[int, int, float]] = {}  # epoch, seq and time of the last one taken in

    def gone(self, node: str) -> bool:
        """Whether the node has neither a stream nor a fresh snapshot."""
        if any(stream.node == node and stream not in self.superseded for stream, _, _ in self.open):
            return False
        return node not in self.taken or self.clock.now() - self.taken[node][2] > 3 * PERIOD

    @rule(node=st.sampled_from(NODES), epoch=st.integers(1, 4))
    def connect(self, node: str, epoch: int) -> None:
        refused = epoch < self.reporting.get(node, 0) and not self.gone(node)
        before = [stream for stream, _, _ in self.open if stream.node == node]
        stream: AgentStream
        connect = partial(
            self.nodes.connected, hello(node, epoch=epoch), lambda: self.superseded.append(stream)
        )
        stack = ExitStack()
        if refused:
            with pytest.raises(AbortedError):
                connect()
            return
        stream = stack.enter_context(connect())
        assert all(one in self.superseded for one in before)
        self.reporting[node] = epoch
        self.open.append((stream, stack, epoch))

    @rule(data=st.data(), seq=st.integers(0, 6), uuids=st.sets(st.sampled_from(UUIDS)), age=st.floats(0, 5))
    def send(self, data: st.DataObject, seq: int, uuids: set[str], age: float) -> None:
        if not self.open:
            return
        stream, _, epoch = data.draw(st.sampled_from(self.open))
        node = stream.node
        message = snapshot(
            node, epoch=epoch, seq=seq, age=age, period=PERIOD, gpus=tuple(gpu(one) for one in sorted(uuids))
        )
        assert message.epoch == epoch_id(epoch)
        if not self.nodes.take(stream, telemetry(message)):
            return
        assert stream not in self.superseded
        last = self.taken.get(node)
        assert last is None or last[0] != epoch or seq > last[1]
        self.taken[node] = (epoch, seq, self.clock.now() - age)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.open:
            chosen = data.draw(st.sampled_from(self.open))
            self.open.remove(chosen)
            chosen[1].close()

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def each_node_shows_what_was_taken_in_last(self) -> None:
        for record in self.nodes.all():
            shown = (record.snapshot.epoch, record.snapshot.seq) if record.snapshot else None
            epoch, seq, _ = self.taken.get(record.node, (0, 0, 0.0))
            assert shown == ((epoch_id(epoch), seq) if epoch else None)

    @invariant()
    def only_a_node_with_a_stream_and_a_fresh_snapshot_is_online(self) -> None:
        for record in self.nodes.all():
            current = [s for s, _, _ in self.open if s.node == record.node and s not in self.superseded]
            sampled_at = self.taken.get(record.node, (0, 0, float("-inf")))[2]
            fresh = self.clock.now() - sampled_at <= 3 * PERIOD
            online = record.state(self.clock.now()) is NodeState.ONLINE
            assert online == (bool(current) and fresh)

    @invariant()
    def no_gpu_is_listed_twice(self) -> None:
        listed = [one.uuid for record in self.nodes.all() if record.snapshot for one in record.snapshot.gpus]
        assert len(listed) == len(set(listed))


Agents.TestCase.settings = settings(stateful_step_count=40)
TestAgents = Agents.TestCase
