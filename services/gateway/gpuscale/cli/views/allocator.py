"""Reservations and the GPUs they hold, cordons, quotas, nodes ranked by idle GPUs, use policies, notifications and power."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console.cells import (
    Column,
    View,
    counted_models,
    duration,
    gpu_model,
    granted,
    holder,
    moment,
    number,
    percent,
    short,
    since,
    size,
    text,
    word,
)
from gpuscale.cli.console.output import ABSENT
from gpuscale.cli.grammar.jsonpath import parse_path
from gpuscale.cli.grammar.parameters import format_duration
from gpuscale.client.states import ended_by, estimate, revoked_early, scored
from gpuscale.common import wire
from gpuscale.common.names import node_of
from gpuscale.common.sizes import hours_text

WHOLE = 1000
"""A whole GPU, in thousandths."""


def _reservation_state(reservation: api.Reservation) -> str:
    """Such as `ACTIVE,LEAVING` for one that will be taken away."""
    marks = {
        "LEAVING": reservation.HasField("revoke_time"),
        "QUARANTINED": any(gpu.quarantine for gpu in reservation.usage.gpus),
    }
    return ",".join((word(reservation, "state"), *(mark for mark, holds in marks.items() if holds)))


def _nodes(gpus: Iterable[api.ReservedGpu]) -> str:
    """The nodes that GPUs are of, each once."""
    return text(",".join(dict.fromkeys(map(node_of, gpus))))


def _left(reservation: api.Reservation) -> str:
    """How long it is held if nobody renews it, or at all where it will be taken away."""
    early = revoked_early(reservation)
    if early is None:
        return duration(reservation, "remaining")
    return format_duration(max(0.0, wire.seconds(reservation.remaining) - early))


def _asked(one: api.Reservation) -> str:
    """`0 of 2` while it waits; else empty."""
    waits = one.asked_gpu_count and one.state == one.STATE_WAITING
    return f"0 of {one.asked_gpu_count}" if waits else ""


def _held(reservation: api.Reservation) -> str:
    """`2 x H100`, or `1 x 0.5 H100` of shares; `0 of 2` while it waits."""
    if asked := _asked(reservation):
        return asked
    shares, counted = {gpu.milli or WHOLE for gpu in reservation.gpus}, counted_models(reservation.gpus)
    if shares <= {WHOLE}:
        return counted
    return counted.replace(" x ", f" x {'/'.join(map(_gpus, sorted(shares)))} ")


RESERVATIONS = View[api.Reservation](
    "reservations",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("HOLDER", lambda one: holder(one.holder)),
        Column("STATE", _reservation_state, own=("LEAVING", "QUARANTINED")),
        Column("GPUS", _held),
        Column("NODE", lambda one: _nodes(one.gpus)),
        Column("FENCE", lambda one: str(one.fence or "-"), spare=True),
        Column("LEFT", _left, moving=True),
        Column("TTL", lambda one: duration(one, "ttl"), wide=True),
        Column("AGE", lambda one: since(one, "create_time"), moving=True, spare=True),
        Column("OWNER", lambda one: text(one.owner), wide=True),
        Column("SERVED IN", lambda one: text(estimate(one.job)), wide=True, moving=True),
        Column("WHY", lambda one: text(one.end_reason or one.job.queue_reason), wide=True),
        Column("POLICY", lambda one: word(one, "policy"), wide=True),
        Column("UUIDS", lambda one: text(",".join(gpu.uuid for gpu in one.gpus)), wide=True),
    ),
)


def _job_state(reservation: api.Reservation) -> str:
    state, place = word(reservation.job, "state"), reservation.job
    if place.HasField("queue_position"):
        return f"{state} ({place.queue_position + 1})"
    return f"{state},LEAVING" if reservation.HasField("revoke_time") else state


JOBS = View[api.Reservation](
    "jobs",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("TITLE", lambda one: text(one.job.title)),
        Column("STATE", _job_state, own=("LEAVING",)),
        Column("EXIT", lambda one: number(one.job, "exit_code")),
        Column("NODE", lambda one: _nodes(one.gpus)),
        Column("GPUS", lambda one: _asked(one) or str(len(one.gpus)), spare=True),
        Column("AGE", lambda one: since(one, "create_time"), moving=True),
        Column("HOLDER", lambda one: holder(one.holder), wide=True),
        Column("LEFT", _left, wide=True, moving=True),
        Column("SERVED IN", lambda one: text(estimate(one.job)), wide=True, moving=True),
        Column("WHY", lambda one: text(one.end_reason or one.job.queue_reason), wide=True),
        Column("COMMAND", lambda one: text(one.job.command)),
    ),
    paths={"state": parse_path("job.state"), "exit_code": parse_path("job.exit_code")},
)

JOB_MEMBERS = View[api.JobMember](
    "members",
    (
        Column("MEMBER", lambda one: str(one.member)),
        Column("NODE", lambda one: short(one.node)),
        Column("PID", lambda one: str(one.pid or ABSENT)),
        Column("STARTED", lambda one: since(one, "start_time"), moving=True),
        Column("ENDED", lambda one: since(one, "end_time"), moving=True),
        Column("FROM", lambda one: moment(one, "start_time"), wide=True),
        Column("UNTIL", lambda one: moment(one, "end_time"), wide=True),
        Column("EXIT", lambda one: number(one, "exit_code")),
        Column("WHY", lambda one: text(ended_by(one))),
    ),
)


HELD_THEN = View[api.Reservation](
    "reservations",
    (
        *(RESERVATIONS.columns[index] for index in range(2)),
        Column("OWNER", lambda one: text(one.owner)),
        Column("STATE", lambda one: word(one, "state")),
        Column("FROM", lambda one: moment(one, granted(one))),
        Column("UNTIL", lambda one: moment(one, "end_time")),
        Column("LASTED", lambda one: since(one, granted(one), until="end_time"), moving=True),
        Column("GPUS", lambda one: text(",".join(f"{node_of(gpu)}/{gpu.index}" for gpu in one.gpus))),
        Column("UUIDS", lambda one: text(",".join(gpu.uuid for gpu in one.gpus)), wide=True),
        Column("TENANT", lambda one: text(one.tenant), wide=True),
        Column("WHY", lambda one: text(one.end_reason)),
    ),
)
"""Who held what, from when until when."""


RESERVED_GPUS = View[api.ReservedGpu](
    "gpus",
    (
        Column("NODE", node_of),
        Column("GPU", lambda gpu: str(gpu.index)),
        Column("MODEL", gpu_model, spare=True),
        Column("SCORE", lambda gpu: f"{gpu.score.total:.3f}"),
        Column("BECAUSE", lambda gpu: text(scored(gpu))),
        Column("NOTE", lambda gpu: text(gpu.score.note), wide=True),
        Column("UUID", lambda gpu: gpu.uuid, spare=True),
    ),
)


MOVES = View[api.RebalanceMove](
    "moves",
    (
        Column("RESERVATION", lambda move: move.reservation.removeprefix("reservations/")),
        Column("HOLDER", lambda move: text(move.holder), spare=True),
        Column("GPUS", lambda move: str(len(move.gpus))),
        Column("FROM", lambda move: move.from_node.removeprefix("nodes/")),
        Column("TO", lambda move: node_of(move.gpus[0])),
        Column("LOSES", lambda move: f"{move.cost_gpu_seconds / 3600:.2f} GPU-h"),
        Column("HOW", lambda move: move.message, wide=True),
    ),
)


def _until_drained(cordon: api.Cordon) -> str:
    """How long until a drain ends the reservations there; `-` where nothing is drained."""
    if not cordon.HasField("drain_deadline"):
        return ABSENT
    left = (wire.to_datetime(cordon.drain_deadline) - datetime.now(UTC)).total_seconds()
    return format_duration(left) if left > 0 else "over"


def _day_and_time(moment: Timestamp) -> str:
    """A moment on the local clock, with its day of the week."""
    return f"{wire.to_datetime(moment).astimezone():%a %m-%d %H:%M}"


def _gpus(milli: float) -> str:
    return f"{milli / WHOLE:g}"


CORDONS = View[api.Cordon](
    "cordons",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("AGE", lambda one: since(one, "create_time"), moving=True),
        Column("DRAINED IN", _until_drained, moving=True),
        Column("THERE", lambda one: text(", ".join(map(short, one.reservations)))),
        Column("BY", lambda one: text(one.author)),
        Column("REASON", lambda one: text(one.reason)),
    ),
)
QUOTAS = View[api.Quota](
    "quotas",
    (
        Column("TENANT", lambda one: one.tenant),
        Column("GPUS HELD", lambda one: _gpus(one.gpu_milli_held)),
        Column("PAST", lambda one: number(one, "gpu_milli_past", _gpus), wide=True),
        Column("LIMIT", lambda one: number(one, "gpu_milli_limit", _gpus)),
        Column("HOURS USED", lambda one: hours_text(one.gpu_hours_used), moving=True),
        Column("BOOKED", lambda one: hours_text(one.gpu_hours_booked), wide=True, moving=True),
        Column("HOURS LIMIT", lambda one: number(one, "gpu_hours_per_month", "{:g}".format)),
        Column("WEIGHT", lambda one: number(one, "weight") if one.HasField("weight") else "1"),
        Column("WAITING", lambda one: str(one.waiting_count)),
    ),
)
BOOKINGS = View[api.Booking](
    "bookings",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("OWNER", lambda one: text(one.owner)),
        Column("STATE", lambda one: word(one, "state")),
        Column("FROM", lambda one: _day_and_time(one.start_time)),
        Column("TO", lambda one: _day_and_time(one.end_time)),
        Column("GPUS", lambda one: str(len(one.gpus))),
        Column("NODE", lambda one: text(",".join(dict.fromkeys(gpu.split("/")[1] for gpu in one.gpus)))),
        Column("TITLE", lambda one: text(one.title), wide=True),
        Column("NOTE", lambda one: text(one.note), wide=True),
    ),
)
RANKED_NODES = View[api.RankedNode](
    "nodes",
    (
        Column("NAME", lambda node: short(node.name)),
        Column("IDLE", lambda node: f"{node.idle_gpu_count}/{node.gpu_count}"),
        Column("ENOUGH", lambda node: "yes" if node.sufficient else "no"),
        Column("UTIL", lambda node: number(node, "mean_utilization_percent", percent)),
        Column("MEMORY", lambda node: number(node, "mean_memory_percent", percent)),
        Column("BECAUSE", lambda node: text(node.message)),
    ),
)


def _hours(microseconds: float) -> str:
    return f"{microseconds / 3.6e9:.2f}"


def _energy(message: Message) -> str:
    return number(
        message,
        "energy_joules",
        lambda one: f"{one / 3600:.1f}Wh" if one < 3.6e6 else f"{one / 3.6e6:.2f}kWh",
    )


def usage_rows(heading: str, key: str, total: api.UsageRow) -> View[api.UsageRow]:
    """Rows of what was used by users, tenants, nodes, models, or values of the label `key`, and the `total` of them."""

    def whose(row: api.UsageRow) -> str:
        if row is total:
            return "total"
        names = (row.labels.get(key, ""), row.user, row.tenant, row.model, row.node and short(row.node))
        return next(filter(None, names), ABSENT)

    return View[api.UsageRow](
        "rows",
        (
            Column(heading, whose),
            Column("GPU-HOURS", lambda row: _hours(row.granted_gpu_microseconds)),
            Column("BUSY", lambda row: _hours(row.busy_gpu_microseconds)),
            Column("IDLE", lambda row: _hours(row.idle_gpu_microseconds)),
            Column("UNKNOWN", lambda row: _hours(row.unknown_gpu_microseconds)),
            Column("UTIL", lambda row: number(row, "mean_utilization_percent", percent)),
            Column("PEAK-MEM", lambda row: number(row, "peak_memory_bytes", size), spare=True),
            Column("ENERGY", _energy, spare=True),
            Column("ENDED", lambda row: str(row.ended_count), spare=True),
        ),
    )


GPU_STATISTICS = View[api.GpuStatistics](
    "gpus",
    (
        Column("GPU", lambda gpu: short(gpu.name)),
        Column("MODEL", lambda gpu: text(gpu.model), spare=True),
        Column("SHARE", lambda gpu: f"{gpu.milli / WHOLE:g}", wide=True),
        Column("HELD", lambda gpu: duration(gpu, "granted")),
        Column("BUSY", lambda gpu: duration(gpu, "busy")),
        Column("IDLE", lambda gpu: duration(gpu, "idle")),
        Column("UNKNOWN", lambda gpu: duration(gpu, "unknown")),
        Column("UTIL", lambda gpu: number(gpu, "mean_utilization_percent", percent)),
        Column("PEAK", lambda gpu: number(gpu, "peak_utilization_percent", percent)),
        Column("PEAK-MEM", lambda gpu: number(gpu, "peak_memory_bytes", size), spare=True),
        Column("ENERGY", _energy, spare=True),
    ),
)


def _words(values: Sequence[int], of: Any) -> str:
    prefix = of.Name(0).removesuffix("UNSPECIFIED")
    return ",".join(of.Name(one).removeprefix(prefix).lower() for one in values) or ABSENT


def _watts(message: Any, field: str) -> str:
    known = not message.DESCRIPTOR.fields_by_name[field].has_presence or message.HasField(field)
    return f"{getattr(message, field):.0f}W" if known else ABSENT


def _of_sums(one: api.PowerBudget, field: str) -> str:
    """Of each sum, the first few."""
    more = len(one.sums) - _MOST_SUMS
    shown = " ".join(_watts(of, field) for of in one.sums[:_MOST_SUMS])
    return f"{shown} and {more} more" if more > 0 else shown or ABSENT


_MOST_SUMS = 3
_OF_ACT = (
    Column[api.PolicyAct]("TIME", lambda one: moment(one, "time"), spare=True),
    Column[api.PolicyAct]("OUTCOME", lambda one: word(one, "outcome").lower()),
    Column[api.PolicyAct]("ACTIONS", lambda one: _words(one.actions, api.PolicyAction)),
    Column[api.PolicyAct]("SUBJECT", lambda one: short(one.subject)),
    Column[api.PolicyAct]("WHY", lambda one: text(one.reason)),
    Column[api.PolicyAct]("STAGE", lambda one: str(one.stage), wide=True),
)
PAST = View[api.PolicyAct]("policyActs", _OF_ACT)
POLICIES = View[api.UsePolicy](
    "usePolicies",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("CONDITION", lambda one: word(one.spec, "condition").lower()),
        Column("MODE", lambda one: "active" if one.spec.active else "shadow"),
        Column(  # such as `1h note,notify; 2h revoke`
            "STAGES",
            lambda one: "; ".join(
                f"{format_duration(wire.seconds(stage.after))} {_words(stage.actions, api.PolicyAction)}"
                for stage in one.spec.stages
            ),
        ),
        Column("EXEMPT", lambda one: str(len(one.spec.exemptions)), spare=True),
        Column("AGE", lambda one: since(one, "create_time"), moving=True, spare=True),
        Column("DESCRIPTION", lambda one: text(one.spec.description), wide=True),
    ),
)
ACTS = View[api.PolicyAct]("policyActs", (Column("NAME", lambda one: short(one.name)), *_OF_ACT))
TARGETS = View[api.NotificationTarget](
    "notificationTargets",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("HOST", lambda one: text(one.host)),
        Column("SIGNED", lambda one: "yes" if one.signed else "no"),
        Column("EVENTS", lambda one: _words(one.spec.events, api.NotificationEvent).replace(ABSENT, "all")),
        Column("AGE", lambda one: since(one, "create_time"), moving=True, spare=True),
    ),
)
BUDGETS = View[api.PowerBudget](
    "powerBudgets",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("WATTS", lambda one: _watts(one.spec, "watts")),
        Column("PER", lambda one: text(one.spec.per or "all")),
        Column("SHARE", lambda one: word(one.spec, "share").lower(), spare=True),
        Column("DRAWN", lambda one: _of_sums(one, "drawn_watts")),
        Column("ROOM", lambda one: _of_sums(one, "room_watts")),
        Column("CAPPED", lambda one: str(sum(of.capped_count for of in one.sums))),
        Column("LOOSE", lambda one: str(sum(of.loose_count for of in one.sums)), spare=True),
        Column("ALARM", lambda one: "yes" if any(of.emergency for of in one.sums) else "no"),
        Column("DESCRIPTION", lambda one: text(one.spec.description), wide=True),
    ),
)
CHANGES = View[api.PowerChange](
    "powerChanges",
    (
        Column("NAME", lambda one: short(one.name), spare=True),
        Column("TIME", lambda one: moment(one, "time"), spare=True),
        Column("GPU", lambda one: short(one.gpu)),
        Column("BEFORE", lambda one: _watts(one, "before_watts")),
        Column("CAP", lambda one: text(",".join(one.profiles)) if one.profiles else _watts(one, "watts")),
        Column("BUDGET", lambda one: text(short(one.power_budget))),
        Column("WHY", lambda one: text(one.reason)),
    ),
)
NOTIFICATIONS = View[api.Notification](
    "notifications",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("EVENT", lambda one: word(one, "event").lower()),
        Column("STATE", lambda one: "dead" if one.dead else "waiting"),
        Column("TRIED", lambda one: str(one.attempt_count), spare=True),
        Column("PROBLEM", lambda one: text(one.problem)),
        Column("TIME", lambda one: moment(one, "time"), spare=True),
        Column("TEXT", lambda one: text(one.text)),
    ),
)

STANDINGS = View[api.PolicyStanding](
    "standings",
    (
        Column("SUBJECT", lambda one: short(one.subject)),
        Column("HELD", lambda one: duration(one, "held"), spare=True),
        Column("STATE", lambda one: "exempt" if one.exempt else "paused" if one.paused else "counting"),
        Column("DONE", lambda one: str(one.done_count), spare=True),
        Column("NEXT", lambda one: _words(one.next_actions, api.PolicyAction)),
        Column("AT", lambda one: moment(one, "next_time")),
        Column("SEEN", lambda one: text(one.message)),
    ),
)
