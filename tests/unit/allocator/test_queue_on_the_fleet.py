"""The queue on a fleet of GPUs that are called as NVML calls them: what the small world of `queue_world` cannot show."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpuscale.allocator.domain.bookings import Bookings
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask, Gpu, Node, NodeState, Order, Pick, Reservation, State
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.queueing.model import (
    Grant,
    QueueObstacle,
    QueuePlace,
    QueueWorld,
    Quota,
    Reason,
    Revoke,
    Rules,
)
from gpuscale.allocator.queueing.queue import BEHIND_OTHERS, Queue
from tests.support.allocator_values import MIB, WALL, ask, gpu
from tests.support.clock import ManualClock
from tests.support.queue_world import wish

GIB = 1024 * MIB


class Site:
    """Placer, ledger and queue, played by hand."""

    def __init__(self, *nodes: Node, rules: Rules | None = None) -> None:
        self.clock = ManualClock()
        self.ledger = Ledger()
        self.placer = Placer(self.ledger.use)
        for node in nodes:
            self.placer.apply_node(node)
        self.quotas: dict[str, Quota] = {}
        world = QueueWorld(
            self.ledger, self.placer, self.quotas, Bookings(86_400.0), self.clock.now, self.clock.wall
        )
        self.queue = Queue(world, rules or Rules())

    def look(self, order: Order) -> str:
        """Look once and take what is found: its id, or the reason why there is none."""
        found = self.queue.look(order, self.clock.now())
        if not isinstance(found, Pick):
            return str(found.reason if isinstance(found, QueueObstacle) else found.kind)
        return self._granted(order, found).id

    def waits(self, *orders: Order) -> list[str]:
        for order in orders:
            self.queue.add(order, self.clock.now(), self.clock.now() + 1e6)
        return self.play()

    def ends(self, *ids: str) -> list[str]:
        for one in ids:
            found = self.ledger.get(one)
            now, wall = self.clock.now(), self.clock.wall()
            self.ledger.settle(self.ledger.close(found, State.RELEASED, now=now, wall=wall))
            self.queue.changed({gpu.node for gpu in found.gpus})
        return self.play()

    def play(self) -> list[str]:
        """Rounds until there is nothing to do: who was granted, and which leases are to end, as `-ID`."""
        done: list[str] = []
        while self.queue.due:
            for step in self.queue.round(self.clock.now()):
                if isinstance(step, Grant):
                    self._granted(step.waiter.order, step.pick)
                    done.append(step.waiter.order.request_id)
                if isinstance(step, Revoke):
                    for lease in step.leases:
                        self.ledger.revoke(lease, self.clock.now() + 30, "preempted")
                        done.append(f"-{lease}")
        return done

    def place(self, name: str) -> QueuePlace:
        """What a request is told: why it is not served, and when it is at the latest."""
        waiter = self.queue.get(name)
        assert waiter is not None
        assert waiter.place is not None
        return waiter.place

    def hold(self, order: Order, pick: Pick) -> Reservation:
        """A grant that is not on disk yet."""
        return self.ledger.grant(order, pick.gpus, now=self.clock.now(), wall=self.clock.wall())

    def _granted(self, order: Order, pick: Pick) -> Reservation:
        return self.ledger.confirm(self.hold(order, pick))


def host(name: str, count: int) -> Node:
    """A node with so many free GPUs of 80 GiB."""
    gpus = (
        replace(gpu(f"GPU-{name}-{index}", index=index, fresh_until=1e9), memory_total_bytes=80 * GIB)
        for index in range(count)
    )
    return Node(name, 0, NodeState.ONLINE, tuple(_free(one) for one in gpus))


def _free(one: Gpu) -> Gpu:
    return replace(one, memory_free_bytes=one.memory_total_bytes)


def sized(order: Order, wanted: Ask) -> Order:
    return replace(order, ask=wanted)


def bearing(order: Order, labels: Iterable[tuple[str, str]]) -> Order:
    return replace(order, labels=dict(labels))


@pytest.mark.parametrize("at_once", [True, False], ids=["one look", "waiting"])
def test_gpus_called_as_nvml_calls_them_are_kept_for_the_head(at_once: bool) -> None:
    """UUIDs begin with `GPU-`, an ask names them in lower case: a promise has to hold under both."""
    site = Site(host("n0", 4))
    small = [site.look(wish(f"s{one}")) for one in range(4)]
    assert site.waits(wish("large", 4)) == []
    assert site.ends(small[0], small[1]) == []
    if at_once:
        assert site.look(wish("late")) == Reason.BEHIND_OTHERS
    else:
        assert site.waits(wish("late")) == []
        assert site.place("late").obstacle is BEHIND_OTHERS
    assert site.ends(small[2], small[3]) == ["large"]


def test_what_must_stay_apart_from_others_is_promised_whole_nodes() -> None:
    """Another that bears the labels may not pass onto the promised node: the head would have to wait for its end too."""
    site = Site(host("n0", 4))
    old = site.look(bearing(wish("old", 2), {("job", "x")}))
    assert site.waits(sized(wish("head"), replace(ask(2), apart_from=(("job", "x"),)))) == []
    assert site.waits(bearing(wish("late", 1), {("job", "x")})) == []
    assert site.ends(old) == ["head", "late"]


def test_who_passes_on_the_same_node_does_not_move_the_time_that_is_told() -> None:
    """What runs on the other GPUs of a promised node, and for how long, is nothing to the head."""
    site = Site(host("n0", 4))
    small = [site.look(wish(f"s{one}", ttl=100.0 * (one + 1))) for one in range(4)]
    assert site.waits(wish("head", 2)) == []
    assert site.place("head").start == site.clock.now() + 200
    assert site.ends(small[3]) == []
    assert site.waits(wish("late", ttl=5000)) == ["late"]
    assert site.place("head").start == site.clock.now() + 200
    assert site.ends(small[0]) == []
    assert site.ends(small[1]) == ["head"]


def test_a_share_by_memory_counts_for_the_quota_as_what_it_takes() -> None:
    """A quarter of a GPU's memory is a quarter of a GPU, before the grant as after it."""
    site = Site(host("n0", 2))
    site.quotas["t"] = Quota("t", gpu_milli_limit=600)
    quarter = replace(ask(), gpu_memory_bytes=20 * GIB)
    first = site.look(sized(wish("a"), quarter))
    site.look(sized(wish("b"), quarter))
    assert site.ledger.use.tenants["t"] == 500
    assert site.look(sized(wish("c"), quarter)) == Reason.QUOTA_EXCEEDED
    assert site.waits(sized(wish("c"), quarter)) == []
    assert site.place("c").obstacle.reason is Reason.QUOTA_EXCEEDED
    assert not site.place("c").obstacle.lasting
    assert site.ends(first) == ["c"]


def test_nobody_is_ended_for_a_request_that_the_free_gpu_would_not_serve() -> None:
    """A MIG instance does not tell its utilization, whoever is on it."""
    split = host("n0", 1)
    instance = replace(split.gpus[0], mig_profile="1g.10gb", utilization_percent=None)
    site = Site(replace(split, gpus=(instance,)), rules=Rules(min_runtime=0))
    unknown_too = replace(ask(), mig_profile="1g.10gb", allow_unknown_utilization=True)
    victim = site.look(sized(wish("victim", preemptible=True), unknown_too))
    wanted = replace(unknown_too, allow_unknown_utilization=False)
    assert site.waits(sized(wish("urgent", priority=1, may_preempt=True), wanted)) == []
    served = site.waits(sized(wish("content", priority=1, may_preempt=True), unknown_too))
    assert served == [f"-{victim}"]


def test_what_is_ending_is_no_victim_and_what_is_not_on_disk_cannot_be_one() -> None:
    """Neither can be revoked; the first makes room by itself."""
    site = Site(host("n0", 2), rules=Rules(min_runtime=0))
    ending = site.ledger.get(site.look(wish("ending", preemptible=True)))
    order = wish("new", preemptible=True)
    found = site.queue.look(order, site.clock.now())
    assert isinstance(found, Pick)
    new = site.hold(order, found)
    closed = site.ledger.close(ending, State.RELEASED, now=site.clock.now(), wall=WALL)
    assert site.waits(wish("urgent", 2, priority=1, may_preempt=True)) == []
    site.ledger.confirm(new)
    site.queue.changed({"n0"})
    assert site.play() == [f"-{new.id}"]
    site.ledger.settle(closed)
    assert site.ends(new.id) == ["urgent"]


def test_a_step_of_the_date_makes_no_lease_old_enough_to_be_preempted() -> None:
    site = Site(host("n0", 1), rules=Rules(min_runtime=300))
    victim = site.look(wish("victim", ttl=5000, preemptible=True))
    site.clock.step_wall(3600)
    assert site.waits(wish("urgent", priority=1, may_preempt=True)) == []
    site.clock.step_wall(-7200)
    site.clock.advance(300)
    site.queue.changed(())
    assert site.play() == [f"-{victim}"]
