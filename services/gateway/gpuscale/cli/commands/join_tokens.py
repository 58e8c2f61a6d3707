"""`gpuscalectl join-token`: the tokens that let hosts join."""

import sys
import uuid
from datetime import UTC, datetime

import click

from gpuscale import client as library
from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.command import command, names, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import TYPED, folded, note
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import DURATION, option, utc_text
from gpuscale.common import wire
from gpuscale.common.names import JOINING

_COLUMNS = (
    ("ID", "id"),
    ("ROLE", "role"),
    ("NODE", "node"),
    ("USES LEFT", "usesLeft"),
    ("EXPIRES", "expires"),
)


@command("join-token create --expires-in 1h")
@option(
    "--node", default="", metavar="NAME", help="The only name that it is good for; by default any new one."
)
@option(
    "--role",
    type=click.Choice(("agent", "operator")),
    default="agent",
    help="What its bearer may do; operator needs --node.",
)
@option(
    "--kind",
    type=click.Choice(("gateway", "standby")),
    help="For a host of services, which --node names: its bearer can be any service.",
)
@option("--uses", type=click.IntRange(1, 1000), default=1, metavar="N", help="How many hosts may use it.")
@option("--expires-in", type=DURATION, default="1h", help="How long it may be used.")
def create(session: Session, node: str, role: str, kind: str | None, uses: int, expires_in: float) -> None:
    """Create a join token, and print what to type on the host. The token is not shown again."""
    request = api.CreateJoinTokenRequest(
        node=node, uses=uses, ttl=wire.to_duration(expires_in), request_id=str(uuid.uuid4())
    )
    if kind:
        request.kind = api.HostKind.Value(f"HOST_KIND_{kind.upper()}")
    else:
        request.role = types_api.Role.Value(f"ROLE_{role.upper()}")
    with session.connect() as client:
        made, address = client.joining.CreateJoinToken(request), client.address
    line = f"gpuscalectl join {address} --token {made.token} --ca-hash {made.authority_digest}"
    if kind:
        line += f" --role {kind} --node {node}"
    if session.output.human:
        note(f"to be typed on the host, {'once' if uses == 1 else f'{uses} times'}; it is not shown again")
        sys.stdout.write(f"{folded(line, sys.stdout, TYPED)}\n")
    else:
        said = _record(made.join_token)
        said["expires"] = utc_text(wire.to_datetime(made.join_token.expire_time))
        session.output.write_data({**said, "token": made.token, "caHash": made.authority_digest})


@command("join-token list")
@names(metavar="ID", required=False)
def list_tokens(session: Session, name: tuple[str, ...]) -> None:
    """List join tokens that may still be used, all or those of these ids."""
    with session.connect() as client:
        wanted = [api.GetJoinTokenRequest(name=full_name(JOINING, one)) for one in name]
        found = [client.joining.GetJoinToken(request).join_token for request in wanted]
        if not name:
            listed = library.pages(client.joining.ListJoinTokens, api.ListJoinTokensRequest(page_size=1000))
            found = [one for page in listed for one in page.join_tokens]
    session.output.write_records("joinTokens", [_record(one) for one in found], _COLUMNS)


@command("join-token delete 3f9a12cd")
@one_name(metavar="ID")
def delete(session: Session, name: str) -> None:
    """Delete a join token, so that nobody can use it any more."""
    with session.connect() as client:
        client.joining.DeleteJoinToken(api.DeleteJoinTokenRequest(name=name.rpartition("/")[2]))
    session.output.write_records("deleted", [{"id": name}], _COLUMNS[:1])


def _record(token: "api.JoinToken") -> dict[str, object]:
    return {
        "id": token.name.rpartition("/")[2],
        "role": types_api.Role.Name(token.role).removeprefix("ROLE_").lower(),
        "node": token.node.rpartition("/")[2],
        "usesLeft": token.uses_left,
        "expires": datetime.fromtimestamp(token.expire_time.seconds, UTC),
    }
