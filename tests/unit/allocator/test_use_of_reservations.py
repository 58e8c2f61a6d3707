"""Reserved versus used: what is told of a reservation's GPUs, and what is not known and therefore not told."""

from dataclasses import replace

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Gpu, GpuProcess, Reservation, ReservedGpu
from gpuscale.allocator.domain.usage import (
    IDLE_PERCENT,
    UNREAD,
    ReservationUsage,
    UsageJudge,
    UseState,
    usage_of,
)
from tests.support.allocator_values import MIB, NOW, WALL, gpu, node, order, reserved


def process(pid: int, reservation: str | None, memory: int | None = 100) -> GpuProcess:
    return GpuProcess(pid, None if memory is None else memory * MIB, "python", reservation)


def grant(ledger: Ledger, *gpus: ReservedGpu) -> Reservation:
    return ledger.confirm(ledger.grant(order(), gpus, now=NOW, wall=WALL))


def look(ledger: Ledger, one: Reservation, *gpus: Gpu, now: float = NOW) -> ReservationUsage:
    there = node("n0", *gpus)
    return usage_of(one, {"n0": there}.get, ledger.use, now)


def test_of_a_whole_gpu_everything_in_use_counts() -> None:
    ledger = Ledger()
    one = grant(ledger, reserved("GPU-a", memory=500))
    seen = replace(gpu(utilization=70.0), memory_used_bytes=400 * MIB, processes=(process(7, None, 300),))
    usage = look(ledger, one, seen)
    assert usage.gpus["GPU-a"].memory_bytes == 400 * MIB
    assert usage.gpus["GPU-a"].outsiders == (7,)
    assert (usage.idle, usage.over_used) == (False, False)


def test_of_a_share_only_what_was_admitted_for_it_counts() -> None:
    ledger = Ledger()
    one, other = (grant(ledger, reserved("GPU-a", milli=500, memory=200)) for _ in range(2))
    there = (process(1, one.id, 150), process(2, one.id, 150), process(3, other.id), process(4, "r99-aa"))
    seen = replace(gpu(utilization=90.0), memory_used_bytes=5000 * MIB, processes=there)
    usage, others = look(ledger, one, seen), look(ledger, other, seen)
    assert usage.gpus["GPU-a"].memory_bytes == 300 * MIB
    assert usage.gpus["GPU-a"].outsiders == others.gpus["GPU-a"].outsiders == (4,)
    assert (usage.over_used, others.over_used) == (True, False)


def test_a_process_of_unknown_memory_makes_the_sum_unknown() -> None:
    ledger = Ledger()
    one = grant(ledger, reserved("GPU-a", milli=500, memory=200))
    usage = look(ledger, one, replace(gpu(), processes=(process(1, one.id, None),)))
    assert usage.gpus["GPU-a"].memory_bytes is None
    assert usage.over_used is None


def test_idle_is_said_only_when_every_gpu_is_known_to_be() -> None:
    ledger = Ledger()
    one = grant(ledger, reserved("GPU-a"), reserved("GPU-b", index=1))
    quiet, other = gpu(utilization=IDLE_PERCENT - 0.1), gpu("GPU-b", index=1, utilization=0.0)
    assert look(ledger, one, quiet, other).idle is True
    assert look(ledger, one, quiet, replace(other, utilization_percent=IDLE_PERCENT)).idle is False
    assert look(ledger, one, quiet, replace(other, utilization_percent=None)).idle is None
    assert look(ledger, one, quiet, replace(other, processes=(process(1, one.id),))).idle is True
    assert look(ledger, one, quiet).idle is None


def test_stale_readings_tell_nothing() -> None:
    ledger = Ledger()
    one = grant(ledger, reserved("GPU-a", memory=100))
    assert look(ledger, one, gpu(), now=NOW + 3.1) == ReservationUsage(
        {"GPU-a": UNREAD}, UseState.UNKNOWN, None
    )


def test_what_may_be_its_own_makes_the_memory_of_a_share_unknown_and_not_zero() -> None:
    """Processes that nobody admitted may be those of a holder without any; so may memory of processes not listed yet."""
    ledger = Ledger()
    one, other = (grant(ledger, reserved("GPU-a", milli=500, memory=200)) for _ in range(2))
    quiet = gpu(utilization=0.0)
    others = (process(3, other.id),)
    assert look(ledger, one, replace(quiet, processes=others)).gpus["GPU-a"].memory_bytes == 0
    stranger, unknown = process(1, None), replace(process(2, None), unknown=True)
    unclear = (
        replace(quiet, processes=(stranger, *others)),
        replace(quiet, processes=(unknown, *others)),
        replace(quiet, processes=others, memory_used_bytes=5000 * MIB),
        replace(quiet, processes=(), processes_known=False),
    )
    for seen in unclear:
        usage = look(ledger, one, seen)
        assert (usage.gpus["GPU-a"].memory_bytes, usage.over_used) == (None, None)
    assert look(ledger, one, unclear[1]).gpus["GPU-a"].outsiders == ()


def test_work_on_a_gpu_is_the_holders_unless_it_is_known_to_be_anothers() -> None:
    ledger = Ledger()
    held = ("GPU-w", 1000), ("GPU-s", 500), ("GPU-s", 500)
    whole, share, other = (grant(ledger, reserved(uuid, milli=milli)) for uuid, milli in held)
    stranger, unclear = process(1, None), replace(process(2, None), unknown=True)
    others = process(3, other.id)
    cases = [
        ((), True, "busy", "unknown"),
        ((stranger,), True, "busy", "unknown"),
        ((unclear, others), True, "busy", "unknown"),
        ((others,), False, "busy", "unknown"),
        ((others,), True, "idle", "idle"),
    ]
    for processes, known, of_whole, of_share in cases:
        for one, uuid, state in ((whole, "GPU-w", of_whole), (share, "GPU-s", of_share)):
            seen = replace(gpu(uuid, utilization=50.0), processes=processes, processes_known=known)
            assert look(ledger, one, seen).gpus[uuid].state == state, (processes, known)
            own = replace(seen, processes=(*processes, process(9, one.id)))
            assert look(ledger, one, own).gpus[uuid].state == "busy"
    strangers = replace(gpu("GPU-s"), processes=(stranger, process(5, "r99-aa", 50), others))
    usage = look(ledger, share, strangers).gpus["GPU-s"]
    assert (usage.outsiders, usage.outsider_memory_bytes) == ((1, 5), 150 * MIB)
    unread = replace(strangers, processes_known=False)
    assert look(ledger, share, unread).gpus["GPU-s"].outsider_memory_bytes is None


def test_use_is_judged_again_only_where_what_it_goes_by_may_have_changed() -> None:
    ledger = Ledger()
    one = grant(ledger, reserved("GPU-a", milli=500, memory=200))
    nodes = {"n0": node("n0", gpu(utilization=70.0))}
    judge = UsageJudge(nodes.get, ledger.use)

    def agrees(now: float = NOW) -> ReservationUsage:
        found = judge.of(one, now)
        assert found == usage_of(one, nodes.get, ledger.use, now)
        return found

    first = agrees()
    assert agrees(NOW + 1) is first
    until = nodes["n0"].gpus[0].fresh_until
    assert agrees(until + 1).gpus["GPU-a"] is UNREAD
    nodes["n0"].gpus[0].fresh_until = until + 10  # as a report does that says nothing new
    again = agrees(until + 1)
    assert again.state is first.state is UseState.UNKNOWN
    assert agrees(until + 2) is again

    stranger = replace(nodes["n0"].gpus[0], processes=(process(3, "r-other"),))
    nodes["n0"] = node("n0", stranger)
    assert agrees().gpus["GPU-a"].outsiders == (3,)
    other = ledger.grant(order(), [reserved("GPU-a", milli=500, memory=200)], now=NOW, wall=WALL)
    nodes["n0"] = node("n0", replace(stranger, processes=(process(3, other.id),)))
    assert agrees().gpus["GPU-a"].outsiders == ()
    ledger.withdraw(other)
    assert agrees().gpus["GPU-a"].outsiders == (3,)
    del nodes["n0"]
    assert agrees().gpus["GPU-a"] is UNREAD
