"""UsageService on the wire: messages to values, one use case, values to messages."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import reduce

from google.protobuf.duration_pb2 import Duration

from gpuscale.allocator.domain.accounting import DAY, Tally
from gpuscale.allocator.domain.model import EndCause
from gpuscale.allocator.state.usage_ledger import Used
from gpuscale.allocator.usecases.accounting import Accounting
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import compile_filter, listed
from gpuscale.common.security.auth import Context, Role, current_principal

SPAN = 30 * DAY
"""Default period, in milliseconds."""
_CAUSES = {str(one): api.Reservation.EndCause.Value(f"END_CAUSE_{one.name}") for one in EndCause}
_Request = api.QueryUsageRequest
NOTHING = Used("", "", {}, "", "", Tally(), 0)
_OF = {
    _Request.GROUP_BY_UNSPECIFIED: "",
    _Request.GROUP_BY_USER: "owner",
    _Request.GROUP_BY_TENANT: "tenant",
    _Request.GROUP_BY_LABEL: "labels",
    _Request.GROUP_BY_NODE: "node",
    _Request.GROUP_BY_MODEL: "model",
}
"""The dimension that a row keeps."""


@dataclass(frozen=True, slots=True)
class UsageServicer(api.UsageServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    accounting: Accounting

    async def QueryUsage(self, request: api.QueryUsageRequest, context: Context) -> api.QueryUsageResponse:
        if bool(request.label_key) != (request.group_by == _Request.GROUP_BY_LABEL):
            raise InvalidArgumentError(
                "label_key goes with GROUP_BY_LABEL, and only there", field="label_key"
            )
        of = _OF.get(request.group_by)
        if of is None:
            raise InvalidArgumentError(f"group_by {request.group_by} is not known", field="group_by")
        asked = wire.asked_period(request)
        wall = self.accounting.clock.wall()
        until = asked.until or max(wall, asked.since or wall)
        to = int(until.timestamp() * 1000)
        since = int(asked.since.timestamp() * 1000) if asked.since else to - SPAN
        first = since // DAY  # in days of UTC since 1970
        last = to // DAY + 1
        caller, meets = current_principal(), compile_filter(request.filter, api.UsageRow)
        mine = caller.role < Role.ADMIN
        # Sets of labels may be many: they are read only when needed.
        dimensions = {of, "owner"} if mine else {of}
        if request.filter:
            dimensions |= {"owner", "tenant", "node", "model"}
        if "labels" in request.filter:
            dimensions.add("labels")
        used = await self.accounting.query(first, last, dimensions)
        if mine:
            used = [one for one in used if one.owner == caller.name]
        groups: dict[str, Used] = {}
        for one in used:
            if request.filter and not meets(_row(one)):
                continue
            row, label = NOTHING, request.label_key
            if of == "labels":
                row = replace(NOTHING, labels={label: one.labels[label]} if label in one.labels else {})
            elif of:
                row = replace(NOTHING, **{of: getattr(one, of)})
            key = "\0".join((row.owner, row.tenant, row.node, row.model, *row.labels.values()))
            groups[key] = groups.get(key, row).plus(one)
        rest = _Request(page_size=request.page_size, page_token=request.page_token, order_by=request.order_by)
        rows, token = listed(
            sorted(groups.items()),
            rest,
            api.UsageRow,
            key=lambda pair: pair[0],
            encode=lambda pair: _row(pair[1]),
        )
        return api.QueryUsageResponse(
            rows=rows,
            next_page_token=token,
            total=_row(reduce(Used.plus, groups.values(), NOTHING)),
            start_time=wire.to_timestamp(_midnight(first)),
            end_time=wire.to_timestamp(_midnight(last)),
        )

    async def GetReservationUsage(
        self, request: api.GetReservationUsageRequest, context: Context
    ) -> api.GetReservationUsageResponse:
        reservation_id = names.id_of(names.RESERVATION, request.name, "name")
        outcome, gpus = await self.accounting.statistics(reservation_id)
        return api.GetReservationUsageResponse(
            name=names.reservation_name(reservation_id),
            end_cause=_CAUSES.get(outcome, api.Reservation.EndCause.END_CAUSE_UNSPECIFIED),
            gpus=[
                api.GpuStatistics(
                    name=names.gpu_name(one.node, one.uuid),
                    model=one.model,
                    milli=one.milli,
                    granted=_duration(one.tally.granted),
                    busy=_duration(one.tally.busy),
                    idle=_duration(one.tally.idle),
                    unknown=_duration(one.tally.unknown),
                    mean_utilization_percent=one.tally.mean_utilization,
                    peak_utilization_percent=one.tally.peak_utilization,
                    peak_memory_bytes=one.tally.peak_memory,
                    energy_joules=one.tally.energy,
                    mean_sm_clock_mhz=one.tally.hardware.mean_clock,
                    min_sm_clock_mhz=one.tally.hardware.lowest_clock,
                    throttled={
                        reason: _duration(time) for reason, time in one.tally.hardware.throttled.items()
                    },
                    ecc_corrected_count=one.tally.hardware.corrected,
                    ecc_uncorrected_count=one.tally.hardware.uncorrected,
                )
                for one in gpus
            ],
        )


def _midnight(day: int) -> datetime:
    """The begin of a day since 1970; of the first or the last that a message can hold, for others."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=min(max(day, -719_162), 2_932_896))


def _row(one: Used) -> api.UsageRow:
    tally = one.tally
    return api.UsageRow(
        user=one.owner,
        tenant=one.tenant,
        labels=one.labels,
        node=names.node_name(one.node) if one.node else "",
        model=one.model,
        granted_gpu_microseconds=tally.granted,
        busy_gpu_microseconds=tally.busy,
        idle_gpu_microseconds=tally.idle,
        unknown_gpu_microseconds=tally.unknown,
        mean_utilization_percent=tally.mean_utilization,
        peak_memory_bytes=tally.peak_memory,
        energy_joules=tally.energy,
        ended_count=one.ends,
    )


def _duration(millis: int) -> Duration:
    found = Duration()
    found.FromMilliseconds(millis)
    return found
