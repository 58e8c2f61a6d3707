"""EndpointService and RuleService on the wire: every change of a rule changes its endpoint's spec."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final

from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.rules.rule import Rule, in_order
from gpuscale.autoscaler.domain.spec import Endpoint, EndpointSpec
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.autoscaler.loop.reconciler import Dependencies
from gpuscale.autoscaler.servicers.endpoints import AskedOnce, Endpoints, find_endpoint, find_replica
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.decisions import endpoint_to_wire
from gpuscale.autoscaler.wire.specs import from_wire, spec_from_wire, spec_to_wire, to_wire
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from gpuscale.common.filters import AT_ONCE, listed
from gpuscale.common.names import ENDPOINT, REPLICA, RULE, parse, rule_name
from gpuscale.common.rpc import validation
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import (
    RESERVED_NAMES,
    Context,
    Principal,
    current_principal,
    is_admin,
    require_priority,
)
from gpuscale.common.store.store import Store
from gpuscale.common.wire import absence_allowed, fingerprint, merge, optional_timestamp, to_duration

DEFAULT_BYTES: Final = 65_536
"""Default number of bytes of a part."""


class EndpointServicer(api.EndpointServiceServicer):
    """Translates between the wire and `Endpoints`; requests are already validated against the contract."""

    def __init__(self, endpoints: Endpoints, deps: Dependencies, feeds: Feeds) -> None:
        self._endpoints = endpoints
        self._deps = deps
        self._feeds = feeds

    async def CreateEndpoint(
        self, request: api.CreateEndpointRequest, context: Context
    ) -> api.CreateEndpointResponse:
        wire, caller = request.endpoint, current_principal()
        require_priority(caller, wire.spec.priority, "endpoint.spec.priority")
        view = await self._endpoints.create(
            _id(wire.name, "endpoint.name"),
            spec_from_wire(wire.spec),
            tenant=_tenant(wire.tenant, caller),
            creator="" if caller.name in RESERVED_NAMES else caller.name,
            request_id=request.request_id,
            fingerprint=fingerprint(api.Endpoint(name=wire.name, spec=wire.spec, tenant=wire.tenant)),
            validate_only=request.validate_only,
        )
        return api.CreateEndpointResponse(endpoint=endpoint_to_wire(view))

    async def GetEndpoint(self, request: api.GetEndpointRequest, context: Context) -> api.GetEndpointResponse:
        view = await self._endpoints.get(_id(request.name))
        return api.GetEndpointResponse(endpoint=endpoint_to_wire(view))

    async def ListEndpoints(
        self, request: api.ListEndpointsRequest, context: Context
    ) -> api.ListEndpointsResponse:
        if text := Store.trouble("autoscaler", why=is_admin()):
            context.set_trailing_metadata((*context.trailing_metadata(), (PROBLEM_KEY, text)))
        found, token = await self._endpoints.list(request)
        return api.ListEndpointsResponse(endpoints=found, next_page_token=token)

    async def UpdateEndpoint(
        self, request: api.UpdateEndpointRequest, context: Context
    ) -> api.UpdateEndpointResponse:
        mask = request.update_mask if request.HasField("update_mask") else None

        def changed(current: EndpointSpec) -> EndpointSpec:
            now = api.Endpoint(name=request.endpoint.name, spec=spec_to_wire(current))
            spec = spec_from_wire(validation.merged(now, request.endpoint, mask).spec)
            if spec.priority != current.priority:
                require_priority(current_principal(), spec.priority or 0, "endpoint.spec.priority")
            return spec

        view = await self._endpoints.update(
            _id(request.endpoint.name, "endpoint.name"),
            changed,
            etag=request.endpoint.etag,
            validate_only=request.validate_only,
        )
        return api.UpdateEndpointResponse(endpoint=endpoint_to_wire(view))

    async def DeleteEndpoint(
        self, request: api.DeleteEndpointRequest, context: Context
    ) -> api.DeleteEndpointResponse:
        answer = api.DeleteEndpointResponse()
        with absence_allowed(request):
            view = await self._endpoints.delete(_id(request.name), etag=request.etag)
            answer.endpoint.CopyFrom(endpoint_to_wire(view))
        return answer

    async def SetReplicas(self, request: api.SetReplicasRequest, context: Context) -> api.SetReplicasResponse:
        view = await self._endpoints.set_replicas(
            _id(request.name),
            request.replicas,
            current=request.current_replicas if request.HasField("current_replicas") else None,
            who=current_principal().name,
            capability_set=request.capability_set,
        )
        return api.SetReplicasResponse(endpoint=endpoint_to_wire(view))

    async def ListReplicas(
        self, request: api.ListReplicasRequest, context: Context
    ) -> api.ListReplicasResponse:
        endpoint = _id(request.parent, "parent") if request.parent else ""
        found, token = await self._endpoints.replicas(endpoint, request)
        forgotten = partial(store.replicas_kept_since, endpoint=endpoint)
        since = await self._deps.store.read(forgotten) if request.show_ended else None
        return api.ListReplicasResponse(
            replicas=found, next_page_token=token, kept_since=optional_timestamp(since)
        )

    async def GetReplica(self, request: api.GetReplicaRequest, context: Context) -> api.GetReplicaResponse:
        ids = parse(REPLICA, request.name)
        return api.GetReplicaResponse(replica=await self._endpoints.replica(ids["endpoint"], ids["replica"]))

    async def WatchEndpoints(
        self, request: api.WatchEndpointsRequest, context: Context
    ) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.endpoints, request, api.Endpoint):
            yield message

    async def WatchReplicas(self, request: api.WatchReplicasRequest, context: Context) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.replicas, request, api.Replica):
            yield message

    async def ReadReplicaLog(
        self, request: api.ReadReplicaLogRequest, context: Context
    ) -> api.ReadReplicaLogResponse:
        ids, most = parse(REPLICA, request.name), request.max_bytes or DEFAULT_BYTES
        work = partial(find_replica, endpoint_id=ids["endpoint"], replica_id=ids["replica"])
        one = await self._deps.store.read(work)
        if not one.adapter:
            raise FailedPreconditionError(f"{request.name} has not run yet", reason="NO_LOG")
        offset = request.offset if request.HasField("offset") else None
        part = await self._deps.hub.read_log(one, offset, most)
        if part.problem:
            text = f"the log of {request.name} cannot be read: {part.problem}"
            raise FailedPreconditionError(text, reason="NO_LOG")
        content = part.content[:most]
        return api.ReadReplicaLogResponse(
            content=content, offset=part.offset, next_offset=part.offset + len(content), ended=one.ended
        )


def _tenant(stated: str, caller: Principal) -> str:
    """Whose quota an endpoint counts against: as given, or its creator's; the autoscaler's own for a nameless caller."""
    if caller.name in RESERVED_NAMES:
        return stated
    if stated and not caller.may_use(stated):
        may = ", ".join(caller.tenants)
        raise PermissionDeniedError(
            f"endpoint.tenant: {caller.name} cannot use the quota of {stated}, only of: {may}",
            reason="OTHER_TENANT",
            metadata={"field": "endpoint.tenant", "tenant": stated},
        )
    return stated or caller.tenants[0]


def _id(name: str, field: str = "name") -> str:
    return parse(ENDPOINT, name, field)["endpoint"]


_PRIORITIES = 1 << 31


@dataclass(frozen=True, slots=True)
class RuleView:
    """A rule with its endpoint, that endpoint's etag, and seconds since it changed the count (None: never)."""

    endpoint: str
    rule: Rule
    etag: str
    since_change: float | None = None

    @property
    def place(self) -> str:
        """Its place among the rules of all endpoints."""
        return f"{self.endpoint} {self.rule.priority + _PRIORITIES:010d} {self.rule.id}"


def _rule(endpoint: str, spec: EndpointSpec, rule_id: str) -> Rule:
    """The rule with an id; NotFoundError if there is none."""
    for one in spec.rules:
        if one.id == rule_id:
            return one
    raise NotFoundError.of(rule_name(endpoint, rule_id))


class RuleServicer(api.RuleServiceServicer):
    """Rules by endpoint; every change of one is an `Endpoints.update`."""

    def __init__(self, endpoints: Endpoints, store: Store, clock: Clock) -> None:
        self._endpoints = endpoints
        self._store = store
        self._clock = clock

    async def CreateRule(self, request: api.CreateRuleRequest, context: Context) -> api.CreateRuleResponse:
        endpoint, rule = parse(ENDPOINT, request.parent, "parent")["endpoint"], _rule_of(request.rule)
        of = api.CreateRuleRequest(parent=request.parent, rule=request.rule)

        def added(spec: EndpointSpec) -> EndpointSpec:
            known = next((one for one in spec.rules if one.id == rule.id), None)
            if known is not None and known != rule:
                name = rule_name(endpoint, rule.id)
                raise AlreadyExistsError(f"{name} exists", metadata={"name": name})
            return spec if known else replace(spec, rules=(*spec.rules, rule))

        asked = AskedOnce(request.request_id, fingerprint(of)) if request.request_id else None
        return api.CreateRuleResponse(rule=await self._change(request, endpoint, rule.id, added, asked))

    async def GetRule(self, request: api.GetRuleRequest, context: Context) -> api.GetRuleResponse:
        ids = parse(RULE, request.name)
        found = await self._store.read(partial(find_endpoint, endpoint_id=ids["endpoint"]))
        _rule(ids["endpoint"], found.spec, ids["rule"])
        return api.GetRuleResponse(rule=await self._view(found, ids["rule"]))

    async def ListRules(self, request: api.ListRulesRequest, context: Context) -> api.ListRulesResponse:
        parent = parse(ENDPOINT, request.parent, "parent")["endpoint"] if request.parent else ""
        now = self._clock.now()

        def is_wanted(rule: Rule) -> bool:
            if request.HasField("disabled") and request.disabled != rule.disabled:
                return False
            if request.signal and request.signal != rule.signal:
                return False
            return not request.kind or request.kind == to_wire(api.Rule(), rule).WhichOneof("kind")

        def read(connection: Connection) -> tuple[Sequence[api.EndpointRule], str]:
            def endpoints(last: str) -> Iterator[Endpoint]:
                if found := store.endpoint(connection, last):
                    yield found
                while not parent and (some := store.endpoints(connection, last, AT_ONCE)):
                    yield from some
                    last = some[-1].id

            def beyond(last: str) -> Iterator[RuleView]:
                every = endpoints(parent or last.partition(" ")[0])
                views = (view for one in every for view in _views(connection, one, now))
                return (view for view in views if view.place > last and is_wanted(view.rule))

            return listed(beyond, request, api.EndpointRule, key=attrgetter("place"), encode=_view_to_wire)

        found, token = await self._store.read(read)
        return api.ListRulesResponse(rules=found, next_page_token=token)

    async def UpdateRule(self, request: api.UpdateRuleRequest, context: Context) -> api.UpdateRuleResponse:
        ids = parse(RULE, request.name)

        def changed(spec: EndpointSpec) -> EndpointSpec:
            """Masked fields come from the request, cleared if not set there."""
            before = _rule(ids["endpoint"], spec, ids["rule"])
            if request.rule.id != before.id:
                raise InvalidArgumentError("rule.id must be the one in name", field="rule.id")
            wire, mask = request.rule, request.update_mask
            if mask.paths:
                for path in mask.paths:
                    if not FieldMask(paths=[path]).IsValidForDescriptor(wire.DESCRIPTOR):
                        raise InvalidArgumentError(f"update_mask: {path} is no field", field="update_mask")
                wire = to_wire(api.Rule(), before)
                merge(request.rule, wire, mask)
                validation.validate(api.UpdateRuleRequest(name=request.name, rule=wire))
            new = _rule_of(wire)
            return replace(spec, rules=tuple(new if one is before else one for one in spec.rules))

        return api.UpdateRuleResponse(rule=await self._change(request, ids["endpoint"], ids["rule"], changed))

    async def DeleteRule(self, request: api.DeleteRuleRequest, context: Context) -> api.DeleteRuleResponse:
        ids = parse(RULE, request.name)

        def without(spec: EndpointSpec) -> EndpointSpec:
            gone = _rule(ids["endpoint"], spec, ids["rule"])
            return replace(spec, rules=tuple(one for one in spec.rules if one is not gone))

        with absence_allowed(request):
            await self._endpoints.update(ids["endpoint"], without, etag=request.etag, frees=True)
        return api.DeleteRuleResponse()

    async def _change(
        self,
        request: api.CreateRuleRequest | api.UpdateRuleRequest,
        endpoint: str,
        rule_id: str,
        change: Callable[[EndpointSpec], EndpointSpec],
        asked: AskedOnce | None = None,
    ) -> api.EndpointRule:
        position: list[int] = []

        def noted(spec: EndpointSpec) -> EndpointSpec:
            changed = change(spec)
            position.extend(index for index, one in enumerate(changed.rules) if one.id == rule_id)
            return changed

        try:
            view = await self._endpoints.update(
                endpoint, noted, etag=request.etag, validate_only=request.validate_only, asked=asked
            )
        except InvalidArgumentError as error:  # by fields of the request; faults elsewhere in the spec stay
            at = f"{SPEC}.rules[{position[0]}]" if position else SPEC
            faults = [one._replace(field=one.field.replace(at, "rule", 1)) for one in error.violations]
            if not faults:
                raise
            raise InvalidArgumentError.of(faults) from error
        return await self._view(view.endpoint, rule_id)

    async def _view(self, endpoint: Endpoint, rule_id: str) -> api.EndpointRule:
        views = await self._store.read(partial(_views, endpoint=endpoint, now=self._clock.now()))
        return next(_view_to_wire(one) for one in views if one.rule.id == rule_id)


def _views(connection: Connection, endpoint: Endpoint, now: float) -> Sequence[RuleView]:
    changes = store.rule_changes(connection, endpoint.id)
    return [
        RuleView(endpoint.id, one, endpoint.etag, now - changes[one.id] if one.id in changes else None)
        for one in in_order(endpoint.spec.rules)
    ]


def _view_to_wire(view: RuleView) -> api.EndpointRule:
    since = view.since_change
    return api.EndpointRule(
        name=rule_name(view.endpoint, view.rule.id),
        rule=to_wire(api.Rule(), view.rule),
        etag=view.etag,
        since_change=None if since is None else to_duration(max(0.0, since)),
    )


def _rule_of(wire: api.Rule) -> Rule:
    if wire.WhichOneof("kind") is None:
        raise InvalidArgumentError("rule.step must be set, or another kind", field="rule.step")
    return from_wire(Rule, wire, "rule")
