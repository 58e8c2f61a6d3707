"""MetricService on the wire."""

from functools import partial

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.inputs import TaskReport
from gpuscale.autoscaler.signals.sources import ReportedMetrics, Subject, Value
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.wire.specs import from_wire
from gpuscale.common.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from gpuscale.common.filters import listed
from gpuscale.common.names import ENDPOINT, REPLICA, endpoint_name, match, replica_name
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, Principal, Role, current_principal
from gpuscale.common.store.store import Store
from gpuscale.common.wire import optional_seconds, seconds, to_duration


class MetricServicer(api.MetricServiceServicer):
    """Takes and lists reported metrics; `state` has the endpoints and replicas."""

    def __init__(self, metrics: ReportedMetrics, state: Store, clock: Clock) -> None:
        self._metrics = metrics
        self._state = state
        self._clock = clock

    async def ReportMetrics(
        self, request: api.ReportMetricsRequest, context: Context
    ) -> api.ReportMetricsResponse:
        subject = _subject(request.name, "name")
        now = self._clock.now()
        if not request.values and not request.HasField("tasks"):
            raise InvalidArgumentError("values must be set, or tasks", field="values")
        values: dict[str, Value] = {}
        for index, one in enumerate(request.values):
            if one.metric in values:
                field = f"values[{index}].metric"
                raise InvalidArgumentError(f"{field} is reported twice", field=field)
            values[one.metric] = Value(one.value, now - (optional_seconds(one, "age") or 0.0))
        if request.HasField("tasks") and subject[1]:
            raise InvalidArgumentError("tasks are those of an endpoint, not of a replica", field="tasks")
        tasks = from_wire(TaskReport, request.tasks, "tasks")
        await self._check(subject, request.name, current_principal())
        self._metrics.report(subject, values, now)
        if request.HasField("tasks"):
            self._metrics.report_tasks(subject[0], tasks, now - seconds(request.tasks.age))
        return api.ReportMetricsResponse()

    async def ListMetrics(self, request: api.ListMetricsRequest, context: Context) -> api.ListMetricsResponse:
        subject = _subject(request.parent, "parent") if request.parent else ("", "")
        now = self._clock.now()
        metrics, token = listed(
            list(self._metrics.list(*subject)),
            request,
            api.ReportedMetric,
            key=lambda one: " ".join((*one[0], one[1])),
            encode=lambda one: _metric(*one, now),
        )
        return api.ListMetricsResponse(metrics=metrics, next_page_token=token)

    async def GetMetric(self, request: api.GetMetricRequest, context: Context) -> api.GetMetricResponse:
        subject = _subject(request.name, "name")
        for one in self._metrics.list(*subject):
            if one[:2] == (subject, request.metric):
                return api.GetMetricResponse(metric=_metric(*one, self._clock.now()))
        raise NotFoundError(
            f"{request.name} has no metric {request.metric}",
            metadata={"name": request.name, "metric": request.metric},
        )

    async def _check(self, subject: Subject, name: str, caller: Principal) -> None:
        """Reject unknown subjects, and those that are not the caller's."""
        endpoint_id, replica_id = subject
        if not replica_id:
            if caller.role < Role.OPERATOR:
                raise _not_yours(caller, name)
            if await self._state.read(partial(store.endpoint, endpoint_id=endpoint_id)) is None:
                raise NotFoundError(f"there is no {name}", metadata={"name": name})
            return
        replica = await self._state.read(partial(store.replica, replica_id=replica_id))
        if replica is None or replica.ended or replica.endpoint != endpoint_id:
            raise NotFoundError(f"there is no {name}, or it has ended", metadata={"name": name})
        # An agent has the name of the replica's adapter or node.
        if caller.role < Role.OPERATOR and caller.name not in {replica.adapter, replica.node} - {""}:
            raise _not_yours(caller, name)


def _metric(subject: Subject, metric: str, value: Value, now: float) -> api.ReportedMetric:
    endpoint, replica = subject
    return api.ReportedMetric(
        name=replica_name(endpoint, replica) if replica else endpoint_name(endpoint),
        value=api.MetricValue(metric=metric, value=value.value, age=to_duration(max(0.0, now - value.at))),
    )


def _not_yours(caller: Principal, name: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{caller.name} may only report for replicas that it runs, not for {name}", reason="NOT_YOUR_REPLICA"
    )


def _subject(name: str, field: str) -> Subject:
    if (ids := match(REPLICA, name)) is not None:
        return ids["endpoint"], ids["replica"]
    if (ids := match(ENDPOINT, name)) is not None:
        return ids["endpoint"], ""
    raise InvalidArgumentError(f"{field} must look like {ENDPOINT} or {REPLICA}", field=field)
