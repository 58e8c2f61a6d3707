"""RuleService on the wire: every change of a rule is one of its endpoint's spec."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.rules.rule import Rule, in_order
from gpuscale.autoscaler.domain.spec import Endpoint, EndpointSpec
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.autoscaler.servicers.endpoints import AskedOnce, Endpoints, absence, find_endpoint
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.specs import from_wire, to_wire
from gpuscale.common.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gpuscale.common.listing import listed
from gpuscale.common.names import ENDPOINT, RULE, parse, rule_name
from gpuscale.common.rpc import validation
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.store.store import Store
from gpuscale.common.wire import fingerprint, to_duration

_PRIORITIES = 1 << 31


@dataclass(frozen=True, slots=True)
class RuleView:
    """A rule with its endpoint, that endpoint's etag, and seconds since it changed the count (None: never)."""

    endpoint: str
    rule: Rule
    etag: str
    since_change: float | None = None


def _rule(endpoint: str, spec: EndpointSpec, rule_id: str) -> Rule:
    """The rule of an id; NotFoundError where there is none."""
    for one in spec.rules:
        if one.id == rule_id:
            return one
    name = rule_name(endpoint, rule_id)
    raise NotFoundError(f"there is no {name}", metadata={"name": name})


@contextmanager
def _as_fields_of_the_rule(position: Sequence[int]) -> Generator[None]:
    """Faults of the rule, told by fields of the request; those of other parts of the spec as they are."""
    try:
        yield
    except InvalidArgumentError as error:
        at = f"{SPEC}.rules[{position[0]}]" if position else SPEC
        found = [one._replace(field=one.field.replace(at, "rule", 1)) for one in error.violations]
        if not found:
            raise
        raise InvalidArgumentError(f"{found[0].field} {found[0].description}", violations=found) from error


def _take(parts: list[str], source: Message, target: Message, where: str) -> None:
    """Take the field of this path, which leads through no list, from `source` into `target`, or clear it there."""
    name, *rest = parts
    known = source.DESCRIPTOR.fields_by_name.get(name)
    if known is None or (rest and (known.message_type is None or known.is_repeated)):
        raise InvalidArgumentError(f"{where} is no field", field=where.partition(":")[0])
    if rest:
        _take(rest, getattr(source, name), getattr(target, name), where)
        return
    target.ClearField(name)
    if known.is_repeated:
        getattr(target, name).extend(getattr(source, name))
    elif known.message_type is not None:
        if source.HasField(name):
            getattr(target, name).CopyFrom(getattr(source, name))
    elif not known.has_presence or source.HasField(name):
        setattr(target, name, getattr(source, name))


class RuleServicer(api.RuleServiceServicer):
    """Rules by their endpoints; every change of one is an `Endpoints.update`."""

    def __init__(self, endpoints: Endpoints, store: Store, clock: Clock) -> None:
        self._endpoints = endpoints
        self._store = store
        self._clock = clock

    async def CreateRule(self, request: api.CreateRuleRequest, context: Context) -> api.CreateRuleResponse:
        """Add a rule; the same again changes nothing."""
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
        wanted = _rule(ids["endpoint"], found.spec, ids["rule"])
        [view] = await self._views([found], lambda rule: rule is wanted)
        return api.GetRuleResponse(rule=_view_to_wire(view))

    async def ListRules(self, request: api.ListRulesRequest, context: Context) -> api.ListRulesResponse:
        endpoint = parse(ENDPOINT, request.parent, "parent")["endpoint"] if request.parent else ""

        def is_wanted(rule: Rule) -> bool:
            if request.HasField("disabled") and request.disabled != rule.disabled:
                return False
            if request.signal and request.signal != rule.signal:
                return False
            return not request.kind or request.kind == to_wire(api.Rule(), rule).WhichOneof("kind")

        every = await self._store.read(store.endpoints)
        found, token = listed(
            await self._views([one for one in every if endpoint in {"", one.id}], is_wanted),
            request,
            api.EndpointRule,
            key=lambda view: f"{view.endpoint} {view.rule.priority + _PRIORITIES:010d} {view.rule.id}",
            encode=_view_to_wire,
        )
        return api.ListRulesResponse(rules=found, next_page_token=token)

    async def UpdateRule(self, request: api.UpdateRuleRequest, context: Context) -> api.UpdateRuleResponse:
        ids = parse(RULE, request.name)

        def changed(spec: EndpointSpec) -> EndpointSpec:
            before = _rule(ids["endpoint"], spec, ids["rule"])
            new = _changed(request, before)
            return replace(spec, rules=tuple(new if one is before else one for one in spec.rules))

        return api.UpdateRuleResponse(rule=await self._change(request, ids["endpoint"], ids["rule"], changed))

    async def DeleteRule(self, request: api.DeleteRuleRequest, context: Context) -> api.DeleteRuleResponse:
        ids = parse(RULE, request.name)

        def without(spec: EndpointSpec) -> EndpointSpec:
            gone = _rule(ids["endpoint"], spec, ids["rule"])
            return replace(spec, rules=tuple(one for one in spec.rules if one is not gone))

        with absence(request):
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
        """Change the spec of an endpoint, and return one of its rules."""
        position: list[int] = []

        def noted(spec: EndpointSpec) -> EndpointSpec:
            changed = change(spec)
            position.extend(index for index, one in enumerate(changed.rules) if one.id == rule_id)
            return changed

        with _as_fields_of_the_rule(position):
            view = await self._endpoints.update(
                endpoint, noted, etag=request.etag, validate_only=request.validate_only, asked=asked
            )
        [found] = await self._views([view.endpoint], lambda rule: rule.id == rule_id)
        return _view_to_wire(found)

    async def _views(
        self, endpoints: Iterable[Endpoint], wanted: Callable[[Rule], bool]
    ) -> Sequence[RuleView]:
        chosen = list(endpoints)

        def read(connection: Connection) -> list[dict[str, float]]:
            return [store.rule_changes(connection, one.id) for one in chosen]

        now = self._clock.now()
        return [
            RuleView(one.id, rule, one.etag, now - changes[rule.id] if rule.id in changes else None)
            for one, changes in zip(chosen, await self._store.read(read), strict=True)
            for rule in in_order(one.spec.rules)
            if wanted(rule)
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


def _changed(request: api.UpdateRuleRequest, current: Rule) -> Rule:
    """The rule after an update: what the mask names is taken from the request, cleared where that does not set it."""
    if request.rule.id != current.id:
        raise InvalidArgumentError("rule.id must be the one in name", field="rule.id")
    mask = request.update_mask if request.HasField("update_mask") else FieldMask()
    if not mask.paths:
        return _rule_of(request.rule)
    result = to_wire(api.Rule(), current)
    for path in mask.paths:
        _take(path.split("."), request.rule, result, f"update_mask: {path}")
    validation.validate(api.UpdateRuleRequest(name=request.name, rule=result))
    return _rule_of(result)
