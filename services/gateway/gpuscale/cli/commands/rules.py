"""`gpuscalectl create`, `get`, `update` and `delete` for single rules of endpoints.

Parts of a rule are written as paths of the contract: `--set step.threshold=10`. Values are read as in manifests.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuscale.cli.commands.change import Yes, confirm
from gpuscale.cli.console.session import session_of
from gpuscale.cli.console.several import Done, named, say_each
from gpuscale.cli.grammar.options import Name, Names, SomeNames
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.api.autoscaler.v1 import EndpointRule, Rule
    from gpuscale.cli.manifests.yaml_tree import Tree
    from gpuscale.client import Client

create_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
update_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Parts = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="A part, such as step.threshold=10; may be repeated."),
]
Etag = Annotated[str, typer.Option(metavar="ETAG", help="Only if the endpoint still has this one.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check only, change nothing.")]
_COMPARATORS = {
    "<": "COMPARATOR_LESS_THAN",
    "<=": "COMPARATOR_LESS_THAN_OR_EQUAL",
    ">": "COMPARATOR_GREATER_THAN",
    ">=": "COMPARATOR_GREATER_THAN_OR_EQUAL",
}


@create_app.command("rule")
def create_rule(
    context: typer.Context, name: Name, parts: Parts = None, etag: Etag = "", dry_run: DryRun = False
) -> None:
    """Add a rule to an endpoint. NAME is ENDPOINT/RULE."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.views.rules import RULES
    from gpuscale.common import names

    endpoint, rule_id = _ids(name)
    rule = api.Rule(id=rule_id)
    _set_parts(rule, parts or [])
    request = api.CreateRuleRequest(
        parent=names.endpoint_name(endpoint), rule=rule, etag=etag, validate_only=dry_run
    )
    session = session_of(context)
    with session.connect() as client:
        made = client.rules.CreateRule(request).rule
    session.output.write_one(made, RULES)


@update_app.command("rule")
def update_rule(
    context: typer.Context,
    name: Name,
    parts: Parts = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="A part that is to be stated no more; may be repeated."),
    ] = None,
    enable: Annotated[bool | None, typer.Option("--enable/--disable", help="Whether it is read.")] = None,
    etag: Etag = "",
    dry_run: DryRun = False,
) -> None:
    """Change parts of a rule; all others stay. NAME is ENDPOINT/RULE."""
    from google.protobuf.field_mask_pb2 import FieldMask

    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.views.rules import RULES

    typed = [*(parts or ()), *([] if enable is None else [f"disabled={str(not enable).lower()}"])]
    if not typed and not clear:
        raise InvalidArgumentError("there is nothing to change: pass --set, --clear, --enable or --disable")
    full = _full(name)
    session = session_of(context)
    with session.connect() as client:
        known = client.rules.GetRule(api.GetRuleRequest(name=full)).rule
        rule = known.rule
        cleared = [_path(rule, one) for one in clear or ()]
        for path in cleared:
            _clear(rule, path)
        changed = [*cleared, *_set_parts(rule, typed)]
        request = api.UpdateRuleRequest(
            name=full, rule=rule, update_mask=FieldMask(paths=changed), etag=etag, validate_only=dry_run
        )
        after = client.rules.UpdateRule(request).rule
    session.output.write_one(after, RULES)


def get_rules(
    context: typer.Context,
    name: Names = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", "-e", metavar="NAME", help="Only those of this endpoint.")
    ] = "",
    kind: Annotated[str, typer.Option(help="Only those of this kind, such as step.")] = "",
    signal: Annotated[str, typer.Option(metavar="ID", help="Only those that read this signal.")] = "",
    disabled: Annotated[bool | None, typer.Option("--disabled/--enabled", help="Only those.")] = None,
) -> None:
    """Rules of endpoints, in the order in which they are read. A name is ENDPOINT/RULE."""
    from gpuscale.cli.views.rules import RULES

    session = session_of(context)
    with session.connect() as client:
        found = (
            _named(client, name) if name else list_rules(client, endpoint, kind, signal, disabled=disabled)
        )
    if name and len(name) == 1:
        session.output.write_one(found[0], RULES)
        return
    session.output.write_list(found, RULES)
    session.output.note_none(found)


def delete_rule(context: typer.Context, name: SomeNames, yes: Yes = False, etag: Etag = "") -> None:
    """Take rules from their endpoints. NAME is ENDPOINT/RULE."""
    from gpuscale.api.autoscaler import v1 as api

    def delete(client: "Client", full: str) -> Done:
        client.rules.DeleteRule(api.DeleteRuleRequest(name=full, etag=etag))
        return named(full, "deleted")

    if etag and len(name) > 1:
        raise InvalidArgumentError("--etag is for one rule: after it the endpoint has another")
    wanted = [_full(one) for one in name]
    confirm(", ".join(wanted), yes=yes)
    say_each(session_of(context), "rules", wanted, delete, lambda client, full: _named(client, [full]))


def _named(client: "Client", typed: list[str]) -> "list[EndpointRule]":
    from gpuscale.api.autoscaler import v1 as api

    return [client.rules.GetRule(api.GetRuleRequest(name=_full(one))).rule for one in typed]


def list_rules(
    client: "Client", endpoint: str = "", kind: str = "", signal: str = "", *, disabled: bool | None = None
) -> "list[EndpointRule]":
    """All rules, or those of an endpoint, a kind, or that read a signal."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.client import pages
    from gpuscale.common import names

    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = api.ListRulesRequest(parent=parent, kind=kind, signal=signal, disabled=disabled)
    return [one for page in pages(client.rules.ListRules, request) for one in page.rules]


def _full(name: str) -> str:
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common import names

    return full_name(names.RULE, name)


def _ids(name: str) -> tuple[str, str]:
    """Endpoint and rule of a name."""
    _, endpoint, _, rule = _full(name).split("/")
    return endpoint, rule


def _set_parts(rule: "Rule", parts: list[str]) -> list[str]:
    """Set parts of a rule as they were typed; returns their paths."""
    from gpuscale.cli.manifests.documents import fill
    from gpuscale.cli.manifests.yaml_tree import Entries, Place, Scalar

    found: list[str] = []
    for typed in parts:
        path, equals, value = typed.partition("=")
        if not path or not equals:
            raise typer.BadParameter(f"{typed!r} is no part; write it like step.threshold=10")
        place = Place(f"--set {path}", 1, 1)
        found.append(_path(rule, path))
        _clear(rule, found[-1])
        text = _COMPARATORS.get(value, value) if path.endswith("comparator") else value
        tree: Tree = Scalar(place, text, null=False)
        for name in reversed(path.split(".")[1:]):
            tree = Entries(place, [(Scalar(place, name, null=False), tree)])
        part = type(rule)()
        fill(part, Entries(place, [(Scalar(place, path.partition(".")[0], null=False), tree)]))
        rule.MergeFrom(part)
    return found


def _path(rule: "Rule", typed: str) -> str:
    """A path by the names of the contract's fields; JSON's names are known too."""
    parts: list[str] = []
    descriptor: Any = rule.DESCRIPTOR  # to the stubs one of two classes, by implementation
    for name in typed.split("."):
        fields = descriptor.fields if descriptor is not None else ()
        field = next((one for one in fields if name in {one.name, one.json_name}), None)
        if field is None:
            raise InvalidArgumentError(f"{typed!r} is no part of a rule: there is no {name}")
        parts.append(field.name)
        descriptor = field.message_type
    return ".".join(parts)


def _clear(message: "Message", path: str) -> None:
    """Clear a field by its path, where what it stands in is there."""
    name, _, rest = path.partition(".")
    if not rest:
        message.ClearField(name)
    elif message.HasField(name):
        _clear(getattr(message, name), rest)
