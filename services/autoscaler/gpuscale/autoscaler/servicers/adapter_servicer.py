"""AdapterService and AdapterStreamService on the wire."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.inputs import WorkerGroup
from gpuscale.autoscaler.domain.planning import DEFAULT_CAPABILITIES, AdapterFacts, Capabilities
from gpuscale.autoscaler.domain.replicas import DesiredReplica, Goal, LogPart, ReplicaReport, ReplicaState
from gpuscale.autoscaler.domain.serving import ServerReading
from gpuscale.autoscaler.loop.hub import AdapterHub, AdapterSession, AdapterView, LogQuestion
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.signals.sources import ReplicaServers
from gpuscale.autoscaler.wire.specs import from_wire, to_wire
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from gpuscale.common.filters import listed
from gpuscale.common.names import ADAPTER, REPLICA, adapter_name, endpoint_name, match, node_name, parse
from gpuscale.common.rpc.validation import validate
from gpuscale.common.runtime.tasks import TaskScope, hit_async
from gpuscale.common.security.auth import Context, Role, current_principal
from gpuscale.common.wire import absence_allowed, seconds, to_timestamp
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

_Messages: TypeAlias = AsyncIterator[autoscaler_internal.ConnectRequest]

_STATES = frozenset(api.Replica.State.values())
_REPORTED = {
    api.Replica.State.Value(f"STATE_{state.value}"): state
    for state in ReplicaState
    if state not in {ReplicaState.PENDING, ReplicaState.UNKNOWN}
}


class AdapterServicer(api.AdapterServiceServicer, autoscaler_internal.AdapterStreamServiceServicer):
    """Translates between the wire and the hub; `scope` holds the tasks that read adapters' messages."""

    def __init__(self, hub: AdapterHub, scope: TaskScope, feeds: Feeds, servers: ReplicaServers) -> None:
        self._hub = hub
        self._servers = servers
        self._feeds = feeds
        self._scope = scope

    async def Connect(
        self, request_iterator: _Messages, context: Context
    ) -> AsyncGenerator[autoscaler_internal.ConnectResponse]:
        message = await anext(request_iterator, autoscaler_internal.ConnectRequest())
        if message.WhichOneof("message") != "register":
            raise FailedPreconditionError("the first message must be register", reason="NOT_REGISTERED")
        validate(message)
        wire, caller = message.register, current_principal()
        if caller.role <= Role.AGENT and not wire.adapter == wire.node == caller.name:
            raise PermissionDeniedError(
                f"{caller.name} may only be the adapter of the node of that name", reason="OTHER_ADAPTER"
            )
        can = wire.capabilities
        own = Capabilities(can.gives_gpus, can.picks_victims, can.drains, can.probes, can.logs)
        facts = AdapterFacts(
            wire.adapter,
            wire.kind,
            wire.node,
            frozenset(wire.templates),
            wire.max_replicas,
            live=False,
            # An earlier version does not say; it is a process adapter.
            capabilities=own if wire.HasField("capabilities") else DEFAULT_CAPABILITIES,
            workers={
                name: from_wire(WorkerGroup, one, f"register.workers[{name}]")
                for name, one in wire.workers.items()
            },
            version=wire.version,
        )
        session = self._hub.connect(facts)
        reader = self._scope.start(f"reports of adapter {facts.id}", self._read(session, request_iterator))
        try:
            async for update in session.updates():
                await hit_async("autoscaler.adapter.before_send")
                yield _update(update)
        finally:
            reader.cancel()
            self._hub.disconnect(session)

    async def _read(self, session: AdapterSession, messages: _Messages) -> None:
        """Pass every report to the hub; an invalid report, or their end, ends the connection."""
        failure: GpuscaleError | None = None
        try:
            async for message in messages:
                for replica in message.report.replicas:
                    if replica.state not in _STATES:
                        # A later version's state: it runs, and nothing says that it works.
                        replica.state = api.Replica.STATE_STARTING
                validate(message)
                match message.WhichOneof("message"):
                    case "report":
                        await self._hub.report(session, message.report.revision, _reports(message.report))
                        for one in message.report.served:
                            if (ids := match(REPLICA, one.replica)) is None:
                                continue
                            read = one.HasField("reading")
                            reading = from_wire(ServerReading, one.reading, "served") if read else None
                            age, problem = seconds(one.age), one.problem
                            self._servers.heard(ids["endpoint"], ids["replica"], age, reading, problem)
                    case "log_part":
                        part = message.log_part
                        session.answer(part.question, LogPart(part.content, part.offset, part.problem))
                    case None if message.ByteSize():
                        pass  # a kind that only later adapters know
                    case _:
                        raise InvalidArgumentError("only the first message may be register", field="register")
        except GpuscaleError as error:
            failure = error
        finally:
            session.close(failure)

    async def GetAdapter(self, request: api.GetAdapterRequest, context: Context) -> api.GetAdapterResponse:
        adapter = parse(ADAPTER, request.name)["adapter"]
        for view in self._hub.views():
            if view.facts.id == adapter:
                return api.GetAdapterResponse(adapter=adapter_to_wire(view))
        raise NotFoundError.of(request.name)

    async def WatchAdapters(self, request: api.WatchAdaptersRequest, context: Context) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.adapters, request, api.Adapter):
            yield message

    async def ListAdapters(
        self, request: api.ListAdaptersRequest, context: Context
    ) -> api.ListAdaptersResponse:
        some, token = listed(
            self._hub.views(), request, api.Adapter, key=lambda view: view.facts.id, encode=adapter_to_wire
        )
        return api.ListAdaptersResponse(adapters=some, next_page_token=token)

    async def ForgetAdapter(
        self, request: api.ForgetAdapterRequest, context: Context
    ) -> api.ForgetAdapterResponse:
        adapter = parse(ADAPTER, request.name)["adapter"]
        replicas: list[str] = []
        with absence_allowed(request):
            replicas = await self._hub.forget(adapter)
        return api.ForgetAdapterResponse(replicas=replicas)


def _reports(wire: autoscaler_internal.Report) -> Mapping[str, ReplicaReport]:
    reports: dict[str, ReplicaReport] = {}
    for index, one in enumerate(wire.replicas):
        field = f"report.replicas[{index}]"
        if one.state not in _REPORTED:
            raise InvalidArgumentError("must be a state that an adapter can see", field=f"{field}.state")
        if one.replica in reports:
            raise InvalidArgumentError("must be reported once", field=f"{field}.replica")
        exit_code = one.exit_code if one.HasField("exit_code") else None
        workers = from_wire(WorkerGroup, one.workers, f"{field}.workers") if one.HasField("workers") else None
        reports[one.replica] = ReplicaReport(_REPORTED[one.state], one.pid, exit_code, one.reason, workers)
    return reports


def _update(
    update: LogQuestion | tuple[int, Sequence[DesiredReplica]],
) -> autoscaler_internal.ConnectResponse:
    if isinstance(update, LogQuestion):
        number, replica, offset, most = update
        asked = autoscaler_internal.LogQuestion(number=number, replica=replica, offset=offset, max_bytes=most)
        return autoscaler_internal.ConnectResponse(log_question=asked)
    revision, lines = update
    replicas = [to_wire(autoscaler_internal.DesiredReplica(), line) for line in lines]
    # How many groups of each capability set should run; those with other capabilities are counted separately.
    sets: dict[tuple[str, ...], autoscaler_internal.DesiredCapabilitySet] = {}
    for line in lines:
        if line.capability_set:
            endpoint = endpoint_name(parse(REPLICA, line.replica)["endpoint"])
            key = (endpoint, line.capability_set, repr(sorted(line.capabilities.items())))
            one = sets.setdefault(
                key,
                autoscaler_internal.DesiredCapabilitySet(
                    endpoint=endpoint, capability_set=line.capability_set, capabilities=line.capabilities
                ),
            )
            one.replicas += line.goal is Goal.RUN
    return autoscaler_internal.ConnectResponse(
        revision=revision, replicas=replicas, capability_sets=sets.values()
    )


def adapter_to_wire(view: AdapterView) -> api.Adapter:
    """The message of an adapter."""
    facts = view.facts
    return api.Adapter(
        name=adapter_name(facts.id),
        kind=facts.kind,
        node=node_name(facts.node) if facts.node else "",
        state=api.Adapter.STATE_CONNECTED if facts.live else api.Adapter.STATE_DISCONNECTED,
        templates=sorted(facts.templates),
        max_replicas=facts.max_replicas,
        replica_count=view.replica_count,
        last_seen_time=to_timestamp(view.last_seen),
        capabilities=api.AdapterCapabilities(**asdict(facts.capabilities)),
        version=facts.version,
    )
