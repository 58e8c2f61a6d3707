"""RuleService on the wire."""

from functools import partial

from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.rules import Rule
from gpuscale.autoscaler.servicers.endpoint_rules import EndpointRules, RuleView
from gpuscale.autoscaler.wire.masks import taken
from gpuscale.autoscaler.wire.translate_rules import rule_from_wire, rule_to_wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import ENDPOINT, RULE, parse, rule_name
from gpuscale.common.rpc import validation
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import to_duration


class RuleServicer(api.RuleServiceServicer):
    """Translates between the wire and `EndpointRules`."""

    def __init__(self, rules: EndpointRules) -> None:
        self._rules = rules

    async def CreateRule(self, request: api.CreateRuleRequest, context: Context) -> api.CreateRuleResponse:
        """Add a rule."""
        endpoint = parse(ENDPOINT, request.parent, "parent")["endpoint"]
        view = await self._rules.create(
            endpoint, _rule(request.rule), etag=request.etag, validate_only=request.validate_only
        )
        return api.CreateRuleResponse(rule=_to_wire(view))

    async def GetRule(self, request: api.GetRuleRequest, context: Context) -> api.GetRuleResponse:
        """Return one rule."""
        ids = parse(RULE, request.name)
        return api.GetRuleResponse(rule=_to_wire(await self._rules.get(ids["endpoint"], ids["rule"])))

    async def ListRules(self, request: api.ListRulesRequest, context: Context) -> api.ListRulesResponse:
        """List rules in the order in which they are read."""
        endpoint = parse(ENDPOINT, request.parent, "parent")["endpoint"] if request.parent else ""
        found, token = await self._rules.list(
            endpoint, partial(_wanted, request), request.page_size, request.page_token
        )
        return api.ListRulesResponse(rules=[_to_wire(view) for view in found], next_page_token=token)

    async def UpdateRule(self, request: api.UpdateRuleRequest, context: Context) -> api.UpdateRuleResponse:
        """Change the parts of a rule that the mask names."""
        ids = parse(RULE, request.name)
        view = await self._rules.update(
            ids["endpoint"],
            ids["rule"],
            partial(_changed, request),
            etag=request.etag,
            validate_only=request.validate_only,
        )
        return api.UpdateRuleResponse(rule=_to_wire(view))

    async def DeleteRule(self, request: api.DeleteRuleRequest, context: Context) -> api.DeleteRuleResponse:
        """Take a rule away."""
        ids = parse(RULE, request.name)
        await self._rules.delete(ids["endpoint"], ids["rule"], etag=request.etag)
        return api.DeleteRuleResponse()


def _to_wire(view: RuleView) -> api.EndpointRule:
    since = view.since_change
    return api.EndpointRule(
        name=rule_name(view.endpoint, view.rule.id),
        rule=rule_to_wire(view.rule),
        etag=view.etag,
        since_change=None if since is None else to_duration(max(0.0, since)),
    )


def _rule(wire: api.Rule) -> Rule:
    if wire.WhichOneof("kind") is None:
        raise InvalidArgumentError("rule.step must be set, or another kind", field="rule.step")
    return rule_from_wire(wire, "rule")


def _changed(request: api.UpdateRuleRequest, current: Rule) -> Rule:
    """The rule after an update: what the mask names is taken from the request, cleared where that does not set it."""
    if request.rule.id != current.id:
        raise InvalidArgumentError("rule.id must be the one in name", field="rule.id")
    mask = request.update_mask if request.HasField("update_mask") else FieldMask()
    if not mask.paths:
        return _rule(request.rule)
    result = rule_to_wire(current)
    taken(mask, request.rule, result, "update_mask")
    validation.validate(api.UpdateRuleRequest(name=request.name, rule=result))
    return _rule(result)


def _wanted(request: api.ListRulesRequest, rule: Rule) -> bool:
    if request.HasField("disabled") and request.disabled != rule.disabled:
        return False
    if request.signal and request.signal != rule.signal:
        return False
    return not request.kind or request.kind == rule_to_wire(rule).WhichOneof("kind")
