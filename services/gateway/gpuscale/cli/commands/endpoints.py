"""`gpuscalectl scale`, `delete`, and `create` and `update rule`: changes to endpoints, their rules, and other declared resources.

Parts of a rule are field paths: `--set step.threshold=10`. Values are parsed as in manifests.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli import manifests
from gpuscale.cli.console.bulk import delete_each
from gpuscale.cli.console.command import Session, command, names, one_name
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import COUNT, YES, option, repeated
from gpuscale.cli.views import autoscaler as views
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import BUDGET, ENDPOINT, POLICY, RULE, TARGET, WATCHER, endpoint_name

if TYPE_CHECKING:
    from google.protobuf.message import Message


PARTS = repeated("--set", "parts", metavar="PATH=VALUE", help="Set a part, such as step.threshold=10.")
ETAG = option("--etag", default="", metavar="ETAG", help="Only if the endpoint still has this one.")
DRY_RUN = option("--dry-run", is_flag=True, help="Check only, change nothing.")
_COMPARATORS = {
    "<": "COMPARATOR_LESS_THAN",
    "<=": "COMPARATOR_LESS_THAN_OR_EQUAL",
    ">": "COMPARATOR_GREATER_THAN",
    ">=": "COMPARATOR_GREATER_THAN_OR_EQUAL",
}


@command("scale endpoint jobs --replicas 4 --current-replicas 3")
@one_name("endpoints")
@option(
    "--replicas", type=COUNT, required=True, metavar="N", help="Desired replicas; rules continue from there."
)
@option("--current-replicas", type=COUNT, metavar="N", help="Only if this many are desired now.")
@option(
    "--capability-set", default="", metavar="ID", help="The capability set to scale, if the endpoint has any."
)
def scale_endpoint(
    session: Session, name: str, replicas: int, current_replicas: int | None, capability_set: str
) -> None:
    """Set the desired replicas of an endpoint, within its bounds, or of one of its capability sets."""
    request = api.SetReplicasRequest(
        name=full_name(ENDPOINT, name),
        replicas=replicas,
        current_replicas=current_replicas,
        capability_set=capability_set,
    )
    with session.connect() as client:
        endpoint = client.endpoints.SetReplicas(request).endpoint
    session.output.write_one(endpoint, views.ENDPOINTS)


@command("delete endpoint jobs --yes")
@names("endpoints")
@YES
def delete_endpoint(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete endpoints; their replicas finish their work first."""
    line = "is deleted once its replicas have finished"
    delete_each(session, "endpoints", ENDPOINT, name, api.DeleteEndpointRequest, yes=yes, line=line)


@command("delete watcher jobs more")
@names("watchers")
@YES
def delete_watcher(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete queue watchers that no endpoint reads."""
    delete_each(session, "queueWatchers", WATCHER, name, api.DeleteQueueWatcherRequest, yes=yes)


@command("delete policy idle")
@names("policies")
@YES
def delete_policy(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete use policies; reservations they were about to revoke stay."""
    delete_each(session, "policies", POLICY, name, allocator_api.DeleteUsePolicyRequest, yes=yes)


@command("delete notification-target lab")
@names("targets")
@YES
def delete_target(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete notification targets and their undelivered notifications."""
    delete_each(session, "targets", TARGET, name, allocator_api.DeleteNotificationTargetRequest, yes=yes)


@command("delete budget rack")
@names("budgets")
@YES
def delete_budget(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete power budgets and restore the limits of their GPUs, unless something else caps them."""
    delete_each(session, "budgets", BUDGET, name, allocator_api.DeletePowerBudgetRequest, yes=yes)


@command("create rule jobs/night --set signal=depth --set 'step.comparator=<' --set step.step=-1")
@one_name()
@PARTS
@ETAG
@DRY_RUN
def create_rule(session: Session, name: str, parts: tuple[str, ...], etag: str, dry_run: bool) -> None:
    """Add a rule to an endpoint. NAME is ENDPOINT/RULE."""
    _, endpoint, _, rule_id = full_name(RULE, name).split("/")
    rule = api.Rule(id=rule_id)
    _set_parts(rule, parts)
    asked = api.CreateRuleRequest(parent=endpoint_name(endpoint), rule=rule, etag=etag, validate_only=dry_run)
    with session.connect() as client:
        made = client.rules.CreateRule(asked).rule
    session.output.write_one(made, views.RULES)


@command("update rule jobs/night --set step.threshold=3 --clear cooldown")
@one_name("rules")
@PARTS
@repeated("--clear", metavar="PATH", help="Clear a part.")
@option("--enable/--disable", default=None, help="Whether the rule applies.")
@ETAG
@DRY_RUN
def update_rule(
    session: Session,
    name: str,
    parts: tuple[str, ...],
    clear: tuple[str, ...],
    enable: bool | None,
    etag: str,
    dry_run: bool,
) -> None:
    """Change parts of a rule; the others are unchanged. NAME is ENDPOINT/RULE."""
    from google.protobuf.field_mask_pb2 import FieldMask

    typed = [*parts, *([] if enable is None else [f"disabled={str(not enable).lower()}"])]
    if not typed and not clear:
        raise InvalidArgumentError("nothing to change: pass --set, --clear, --enable or --disable")
    full = full_name(RULE, name)
    with session.connect() as client:
        rule = client.rules.GetRule(api.GetRuleRequest(name=full)).rule.rule
        cleared = [_path(rule, one) for one in clear]
        for path in cleared:
            _clear(rule, path)
        changed = [*cleared, *_set_parts(rule, typed)]
        request = api.UpdateRuleRequest(
            name=full, rule=rule, update_mask=FieldMask(paths=changed), etag=etag, validate_only=dry_run
        )
        after = client.rules.UpdateRule(request).rule
    session.output.write_one(after, views.RULES)


@command("delete rule jobs/night")
@names("rules")
@YES
@ETAG
def delete_rule(session: Session, name: tuple[str, ...], yes: bool, etag: str) -> None:
    """Delete rules of endpoints. NAME is ENDPOINT/RULE."""
    if etag and len(name) > 1:
        raise InvalidArgumentError("--etag takes one rule: each change gives the endpoint another etag")
    delete_each(session, "rules", RULE, name, api.DeleteRuleRequest, yes=yes, etag=etag)


def _set_parts(rule: "api.Rule", parts: Sequence[str]) -> list[str]:
    """Set parts of a rule; returns their paths."""
    found: list[str] = []
    for typed in parts:
        path, equals, value = typed.partition("=")
        if not path or not equals:
            raise InvalidArgumentError(f"{typed!r} is not a part; write it like step.threshold=10")
        place = manifests.Place(f"--set {path}", 1, 1)
        found.append(_path(rule, path))
        _clear(rule, found[-1])
        text = _COMPARATORS.get(value, value) if path.endswith("comparator") else value
        tree: manifests.Tree = manifests.Scalar(place, text, null=False)
        for name in reversed(path.split(".")[1:]):
            tree = manifests.Entries(place, [(manifests.Scalar(place, name, null=False), tree)])
        part = type(rule)()
        manifests.fill(
            part,
            manifests.Entries(place, [(manifests.Scalar(place, path.partition(".")[0], null=False), tree)]),
        )
        rule.MergeFrom(part)
    return found


def _path(rule: "api.Rule", typed: str) -> str:
    """A field path; accepts JSON names too."""
    parts: list[str] = []
    descriptor: Any = rule.DESCRIPTOR  # to the stubs one of two classes, by implementation
    for name in typed.split("."):
        fields = descriptor.fields if descriptor is not None else ()
        field = next((one for one in fields if name in {one.name, one.json_name}), None)
        if field is None:
            raise InvalidArgumentError(f"{typed!r} is not a part of a rule: unknown field {name!r}")
        parts.append(field.name)
        descriptor = field.message_type
    return ".".join(parts)


def _clear(message: "Message", path: str) -> None:
    name, _, rest = path.partition(".")
    if not rest:
        message.ClearField(name)
    elif message.HasField(name):
        _clear(getattr(message, name), rest)
