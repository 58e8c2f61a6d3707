"""Whatever happens in whatever order: quotas hold, turns are kept, nothing is kept for nobody, and nobody starves."""

from random import Random
from unittest.mock import create_autospec
from weakref import WeakValueDictionary

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuscale.allocator.domain.model import Pick
from gpuscale.allocator.queueing.model import Grant, Quota, Reason, Revoke, Rules
from gpuscale.allocator.queueing.queue import in_turn, over_quota
from tests.support.allocator_values import NOW
from tests.support.queue_world import Line, QueueWorld, wish

NODES = {"n0": 4, "n1": 2, "n2": 1}
TENANTS = st.sampled_from(["a", "b", "c"])


class QueueMachine(RuleBasedStateMachine):
    """Requests, leases, quotas, nodes and time around one queue."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(QueueWorld(NODES), Rules(max_waiting=50, min_runtime=20.0, grace=5.0))
        self.requests = 0

    @rule(
        count=st.integers(0, 5),
        tenant=TENANTS,
        priority=st.integers(-1, 1),
        wait=st.sampled_from([10.0, 1000.0]),
        preemptible=st.booleans(),
        may_preempt=st.booleans(),
    )
    def arrive(
        self, count: int, tenant: str, priority: int, wait: float, preemptible: bool, may_preempt: bool
    ) -> None:
        if len(self.line.queue) == 50:
            return
        self.requests += 1
        order = wish(
            f"r{self.requests}",
            count,
            tenant=tenant,
            priority=priority,
            preemptible=preemptible,
            may_preempt=may_preempt,
        )
        self.line.ask(order, wait=wait)

    @precondition(lambda self: not self.line.queue.due)
    @rule(count=st.integers(0, 4), tenant=TENANTS, priority=st.integers(-1, 1))
    def look_once(self, count: int, tenant: str, priority: int) -> None:
        self.requests += 1
        order = wish(f"r{self.requests}", count, tenant=tenant, priority=priority)
        found = self.line.queue.look(order, self.line.world.now)
        if isinstance(found, Pick):
            assert over_quota(self.line.world, order) is None
            kept = [
                one.gpus
                for one in self.line.queue._promises.values()
                if one.waiter.order.priority >= priority
            ]
            uuids = {gpu.uuid for gpu in found.gpus}
            assert all(uuids.isdisjoint(gpus) for gpus in kept)
            self.line.world.hold(order, uuids)

    @precondition(lambda self: self.line.world.held)
    @rule(data=st.data())
    def end_a_lease(self, data: st.DataObject) -> None:
        self.line.end(data.draw(st.sampled_from(sorted(self.line.world.held))))

    @precondition(lambda self: len(self.line.queue))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.line.leave(data.draw(st.sampled_from(sorted(self.line.queue._waiters))))

    @rule(tenant=TENANTS, limit=st.none() | st.integers(0, 6), weight=st.sampled_from([0.5, 1.0, 3.0]))
    def set_a_quota(self, tenant: str, limit: int | None, weight: float) -> None:
        milli = None if limit is None else limit * 1000
        self.line.world.quotas[tenant] = Quota(tenant, milli, weight)
        self.line.queue.changed(())

    @rule(node=st.sampled_from(sorted(NODES)))
    def a_node_goes_or_comes(self, node: str) -> None:
        self.line.world.down ^= {node}
        self.line.queue.changed({node})

    @rule(seconds=st.floats(0.1, 30.0))
    def time_passes(self, seconds: float) -> None:
        world, queue = self.line.world, self.line.queue
        world.now += seconds
        for name, one in list(world.held.items()):
            if one.lease.revoked and one.lease.ends <= world.now:
                self.line.end(name)
        for waiter in list(queue._waiters.values()):
            if waiter.until <= world.now:
                queue.remove(waiter)
        if queue.look_again is not None and queue.look_again <= world.now:
            queue.changed(())

    @rule(leaves_after=st.none() | st.integers(1, 6))
    def play(self, leaves_after: int | None) -> None:
        """Rounds until nothing is due; after so many steps the caller of the one that was looked at goes away."""
        world, queue, rounds = self.line.world, self.line.queue, 0
        while queue.due:
            rounds += 1
            assert rounds < 20, "the queue never comes to rest"
            for number, step in enumerate(queue.round(world.now), start=1):
                if number == leaves_after and queue.get(step.waiter.order.request_id):
                    queue.remove(step.waiter)
                if isinstance(step, Grant):
                    order = step.waiter.order
                    assert over_quota(world, order) is None
                    world.hold(order, [gpu.uuid for gpu in step.pick.gpus])
                    assert queue.get(order.request_id) is None
                if isinstance(step, Revoke):
                    assert step.waiter.order.may_preempt
                    for name in step.leases:
                        victim = world.held[name].lease
                        assert victim.preemptible
                        assert victim.priority < step.waiter.order.priority
                        assert world.now - victim.since >= self.line.rules.min_runtime
                        world.revoke(name, world.now + self.line.rules.grace)
        self._at_rest()

    def _at_rest(self) -> None:
        """Nobody is passed over: who is first in turn does not fit; who else fits is behind a promise."""
        world, queue = self.line.world, self.line.queue
        first = True
        for waiter in in_turn(list(queue._waiters.values()), queue._promises, world):
            place = waiter.place
            assert place is not None
            if over_quota(world, waiter.order):
                assert place.obstacle.reason is Reason.QUOTA_EXCEEDED
                continue
            if isinstance(world.place(waiter.order.ask, world.now, again=True), Pick):
                assert place.obstacle.reason is Reason.BEHIND_OTHERS
                assert not first
            first = False

    @invariant()
    def promises_have_owners_that_wait(self) -> None:
        queue = self.line.queue
        assert all(queue.get(owner.order.request_id) is owner for owner in queue._promises)
        kept = [gpu for promise in queue._promises.values() for gpu in promise.gpus]
        if not queue.due:
            assert len(kept) == len(set(kept))


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(stateful_step_count=30)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=settings().max_examples // 6)
def test_a_stream_of_small_requests_cannot_starve_a_large_one(seed: int) -> None:
    """All GPUs are taken by one-GPU leases that live up to 20 s each, and more of them arrive than there is room for.

    The large request is the first of its tenant, so it is next in turn at once: within 20 s a node has been drained.
    """
    random = Random(seed)
    line = Line(QueueWorld({"n0": 8, "n1": 8}))
    ends: dict[str, float] = {}
    for second in range(60):
        line.world.now += 1
        if second == 30:
            line.ask(wish("large", 8, tenant="b"))
        line.ask(*(wish(f"small-{second}-{one}", tenant=random.choice("ac")) for one in range(3)))
        for name in [name for name in line.world.held if ends[name] <= line.world.now]:
            line.end(name)
        for name in line.granted():
            ends[name] = line.world.now + random.randint(1, 20)
    assert "large" in ends, "the large request starved"
    assert ends["large"] <= NOW + 31 + 20 + 20


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=settings().max_examples // 6)
def test_who_gets_the_answer_of_one_alike_gets_what_a_look_of_its_own_would_find(seed: int) -> None:
    random = Random(seed)
    quotas = {"a": Quota("a", 2000), "b": Quota("b", 4000)}
    lines = [Line(QueueWorld(NODES, quotas=quotas), Rules(min_runtime=20.0, grace=5.0)) for _ in range(2)]
    lines[1].queue._alike = create_autospec(WeakValueDictionary)
    lines[1].queue._alike.setdefault.side_effect = lambda _, alike: alike
    for step in range(40):
        asked = {"priority": random.randint(0, 1), "may_preempt": random.random() < 0.5}
        order = wish(f"r{step}", random.randint(1, 3), tenant=random.choice("abc"), preemptible=True, **asked)
        over = [name for name in sorted(lines[0].world.held) if random.random() < 0.1]
        for line in lines:
            line.world.now += 3
            line.ask(order)
            line.end(*over)
        told = [
            (line.play(), {name: one.place for name, one in line.queue._waiters.items()}) for line in lines
        ]
        assert told[0][1] == told[1][1]
