"""The states of nodes, GPUs and reservations in words, such as `DEGRADED,CORDONED`, for all tables and pages.

Combines health, known to the fleet, with cordons, known to the allocator. Pure.
"""

from collections.abc import Iterable, Mapping

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import optional_seconds, seconds, to_datetime

Marks = Mapping[str, str]
"""CORDONED or DRAINING, by the name of a node or GPU."""

NO_MARKS: Marks = {}
_GPU_STATES = {number: name.removeprefix("GPU_STATE_") for name, number in types_api.GpuState.items()}
_NODE_STATES = {number: name.removeprefix("NODE_STATE_") for name, number in monitor_api.NodeState.items()}
_ANSWERING = {"OK", "DEGRADED", "SLOW", "DIVIDED"}
_WORKING = {"OK", "SLOW", "DIVIDED", "RELEASED"}
_NAMES = "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM"
_SIGNALS = {code: f"often SIG{name}" for code, name in enumerate(_NAMES.split(), 129)}
"""What often ends a program with an exit code, in Linux's numbers, as a client may run elsewhere; it may also choose the code itself."""
_ONLINE, _QUARANTINED = "ONLINE", "QUARANTINED"


def marks(cordons: Iterable[allocator_api.Cordon]) -> Marks:
    """The marks of cordoned nodes and GPUs."""
    return {  # allocators of version 0.x send no target
        one.target or one.name: "DRAINING" if one.HasField("drain_deadline") else "CORDONED"
        for one in cordons
    }


def node_state(node: monitor_api.Node, marked: Marks = NO_MARKS) -> str:
    """The state of a node: DEGRADED if ONLINE with unusable GPUs; then its cordon."""
    state = _NODE_STATES.get(node.state, str(node.state))
    if state == _ONLINE and problem(node):
        state = "DEGRADED"
    return _joined(state, marked.get(node.name))


def problem(node: monitor_api.Node) -> str:
    """The problem of a node's GPUs; empty if there is none."""
    if node.snapshot.gpu_problem:
        return node.snapshot.gpu_problem
    wrong = [f"GPU {gpu.index}: {_own(gpu)}" for gpu in node.snapshot.gpus if _own(gpu) not in _WORKING]
    return "; ".join(wrong) if _NODE_STATES.get(node.state) == _ONLINE else ""


def clock_ahead(node: monitor_api.Node, now: float) -> float | None:
    """Seconds by which a node's clock is ahead of one that shows `now`; None if that is unknown."""
    snapshot = node.snapshot
    if _NODE_STATES.get(node.state) != _ONLINE or not snapshot.HasField("sample_time"):
        return None
    return to_datetime(snapshot.sample_time).timestamp() + seconds(snapshot.age) - now


def gpu_state(gpu: types_api.Gpu, marked: Marks = NO_MARKS) -> str:
    """The state of a GPU, QUARANTINED in place of OK; then the cordon of it, its GPU or its node."""
    node = gpu.name.partition("/gpus/")[0]
    whole = f"{node}/gpus/{gpu.parent_uuid.lower()}"
    return _joined(_own(gpu), marked.get(gpu.name) or marked.get(whole) or marked.get(node))


def replica_model(one: autoscaler_api.Replica) -> str:
    """A replica's GPU model among the preferred ones, with its weight, such as `A100 (0.5)`; empty without a preference."""
    return f"{one.model.model} ({one.model.weight:g})" if one.HasField("model") else ""


def capabilities(amounts: Mapping[str, int]) -> str:
    """Capabilities as typed, such as `gpu=2,high_memory`."""
    listed = sorted(amounts.items())
    return ",".join(name if amount < 0 else f"{name}={amount}" for name, amount in listed) or "anything plain"


def demand(one: autoscaler_api.TaskDemand) -> str:
    """Waiting tasks and what they need, such as `3 that need gpu=2`."""
    return f"{one.tasks} that need {capabilities(one.capabilities)}"


def revoked_early(reservation: allocator_api.Reservation) -> float | None:
    """Seconds before the end of its lease at which it will be revoked, negative after it; None if it will not be.

    Both times are of the server's clock, so this host's clock does not matter.
    """
    if not (reservation.HasField("revoke_time") and reservation.HasField("expire_time")):
        return None
    early = to_datetime(reservation.expire_time) - to_datetime(reservation.revoke_time)
    return early.total_seconds()


def advice(reservation: allocator_api.Reservation) -> str:
    """What the user of a preempted job can do; empty for others."""
    if reservation.HasField("job") and "preempted for" in reservation.end_reason:
        return "to let a job save its work and start again by itself: run --on-move signal:TERM"
    return ""


def ended_by(one: allocator_api.JobMember) -> str:
    """Why a member of a job ended; the usual meaning of its exit code if no reason is known."""
    return one.end_reason or often(one.exit_code) + ", for want of memory" * (one.exit_code == 137)


def often(exit_code: int) -> str:
    """The usual meaning of an exit code, such as `often SIGKILL`; empty if it has none."""
    return _SIGNALS.get(exit_code, "")


def scored(gpu: allocator_api.ReservedGpu) -> str:
    """The weighted parts of a granted GPU's score: `0.6 x memory 0.991 + utilization unknown`."""
    known = "{0.weight:g} x {0.name} {0.value:.3f}".format
    parts = (known(one) if one.HasField("value") else f"{one.name} unknown" for one in gpu.score.parts)
    return " + ".join(parts)


def _own(gpu: types_api.Gpu) -> str:
    state = _GPU_STATES.get(gpu.state, str(gpu.state))
    if not gpu.quarantine or state not in _ANSWERING:
        return state
    return _QUARANTINED if state == "OK" else _joined(state, _QUARANTINED)


def _joined(state: str, mark: str | None) -> str:
    return f"{state},{mark}" if mark else state


def estimate(waits: allocator_api.QueuePlace | allocator_api.Job, gone: float = 0.0) -> str:
    """The estimated wait, in words, `gone` seconds after it was told; empty if unknown or over."""
    left, low, high = (optional_seconds(waits, f"estimated_wait{which}") for which in ("", "_low", "_high"))
    if left is None or left - gone < 0.5:
        return ""
    if low is None or high is None:
        return f"{_about(left - gone)} unless leases are renewed"
    about, least, most = (_about(one - gone) for one in (left, low, high))
    return f"about {about}" if least == most else f"about {about}, {least} to {most}"


def _about(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    for unit, worth, most in (("s", 1, 99), ("min", 60, 99), ("h", 3600, 48)):
        if seconds <= most * worth:
            return f"{seconds / worth:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def standing(position: int) -> str:
    """A position in the queue, in words."""
    return f"{position} before it" if position else "next in the queue"


def queued(job: allocator_api.Job) -> str:
    """The queue position of a waiting job, and why it waits."""
    about = estimate(job)
    return f"{standing(job.queue_position)}: {job.queue_reason}" + (f" ({about})" if about else "")
