"""`gpuscalectl token`: the tokens file, on the server's host; and `join-token`: the tokens by which hosts join.

A token is shown once, when created; the file has only its digest (`gpuscale.common.security.auth`). A running server reloads the file
within a second. Edits keep comments, order and all other lines of the file.
"""

import hashlib
import json
import secrets
import sys
import uuid
from collections.abc import MutableMapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeGuard, cast

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Key
from tomlkit.items import Table as TomlTable

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.commands.certs import ROLES
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import FILE, Session, command, names, one_name
from gpuscale.cli.console.errors import writing
from gpuscale.cli.console.terminal import TYPED, folded, note
from gpuscale.cli.grammar.jsonpath import Format, is_list
from gpuscale.cli.grammar.parameters import DURATION, option, repeated, utc_text
from gpuscale.common import errors, wire
from gpuscale.common.names import is_id
from gpuscale.common.secrets import write_private
from gpuscale.common.security.auth import MAX_PREVIOUS, RESERVED_NAMES

Table = MutableMapping[str, object]
"""The table of one name in the file: `role`, `sha256` and so on."""
LONGEST_TENANT = 253
TOKEN_BYTES = 32
"""Number of random bytes in a token."""
_COLUMNS = ("name", "role", "label", "state", "expires", "tenants", "maxPriority")
TOKENS_FILE = option(
    "--tokens-file",
    type=FILE,
    required=True,
    envvar="GPUSCALE_TOKENS_FILE",
    help="The tokens file of the server, TOML; $GPUSCALE_TOKENS_FILE.",
)
TENANTS = repeated(
    "--tenant",
    "tenants",
    metavar="TENANT",
    help="Tenant whose quota its holder may use, the default one first; * for all. By default the tenant of its own name.",
)
MAX_PRIORITY = option(
    "--max-priority",
    type=click.IntRange(-1000, 1000),
    default=0,
    metavar="N",
    help="Highest priority its holder may request.",
)
ROLE = option("--role", type=click.Choice(ROLES), default="viewer", help="What its holder may do.")
EXPIRES_IN = option("--expires-in", type=DURATION, help="How long it is valid, such as 90d.")
LABEL = option(
    "--label", metavar="TEXT", help="Label of this secret in lists and metrics; today's date by default."
)
WRITE = option("--write", type=FILE, help="Write the token to this file, readable by its owner only.")


@command("token create ci --role operator --expires-in 90d --tokens-file tokens.toml --write ci.token")
@one_name()
@TOKENS_FILE
@ROLE
@EXPIRES_IN
@LABEL
@TENANTS
@MAX_PRIORITY
@WRITE
def create(
    session: Session,
    name: str,
    tokens_file: Path,
    role: str,
    expires_in: float | None,
    label: str | None,
    tenants: tuple[str, ...],
    max_priority: int,
    write: Path | None,
) -> None:
    """Create a token and write it once, to standard output or a file; the tokens file keeps its digest."""
    if not is_id(name):
        raise errors.InvalidArgumentError(
            f"{name!r} is not a valid name: use lower-case letters, digits, '.', '_' and '-'", field="name"
        )
    if name in RESERVED_NAMES:
        raise errors.InvalidArgumentError(
            f"{name} stands for callers without a token: choose another name", field="name"
        )
    file = read(tokens_file, new=True)
    tokens = tables(file, "tokens")
    if name in tokens:
        raise errors.AlreadyExistsError(
            f"token {name} already exists: rotate it, or revoke it first", metadata={"name": name}
        )
    secret, described = _new_secret(label, expires_in)
    tokens[name] = {"role": role, **described}
    _set_limits(tokens[name], tenants, max_priority)
    _hand_out(session, secret, write, {"name": name, "role": role}, tokens_file, file)


@command("token rotate ci --overlap 7d --tokens-file tokens.toml --write ci.token")
@one_name()
@TOKENS_FILE
@option("--overlap", type=DURATION, default="1d", help="How long the old secret stays valid.")
@EXPIRES_IN
@LABEL
@WRITE
def rotate(
    session: Session,
    name: str,
    tokens_file: Path,
    overlap: float,
    expires_in: float | None,
    label: str | None,
    write: Path | None,
) -> None:
    """Create a new secret for a name; the old one stays valid for a while. Both authenticate the same caller."""
    file = read(tokens_file)
    token = _existing(tables(file, "tokens"), name)
    now = datetime.now(UTC)
    end = (now + timedelta(seconds=overlap)).replace(microsecond=0)
    kept = [one for one in _secrets(token) if not _over(one, now)]
    if len(kept) > MAX_PREVIOUS:
        raise errors.FailedPreconditionError(
            f"{name} has {MAX_PREVIOUS} earlier secrets that are still valid: revoke one with --label",
            reason="TOO_MANY_SECRETS",
        )
    for one in kept:
        expires = one.get("expires")
        one["expires"] = min(end, expires) if isinstance(expires, datetime) else end
    secret, described = _new_secret(label, expires_in, taken=[str(one.get("label", "")) for one in kept])
    _set_secrets(token, [described, *kept])
    record = {"name": name, "role": token.get("role", ""), "label": described["label"]}
    _hand_out(session, secret, write, record, tokens_file, file)


@command("token list --tokens-file tokens.toml")
@TOKENS_FILE
def list_tokens(session: Session, tokens_file: Path) -> None:
    """List tokens and their secrets, and how long they are valid."""
    now = datetime.now(UTC)
    records: list[dict[str, object]] = []
    for name, token in sorted(tables(read(tokens_file), "tokens").items()):
        for secret in _secrets(token):
            expires = secret.get("expires")
            records.append(
                {
                    "name": name,
                    "role": token.get("role", ""),
                    "label": secret.get("label", ""),
                    "state": "EXPIRED" if _over(secret, now) else "ACTIVE",
                    "expires": expires if isinstance(expires, datetime) else "never",
                    "tenants": token.get("tenants", [name]),
                    "maxPriority": token.get("max_priority", 0),
                }
            )
    session.output.write_records("tokens", records, _COLUMNS, spare=("label",))


@command("token limit ci --tenant ml --tenant vision --max-priority 10 --tokens-file tokens.toml")
@one_name()
@TOKENS_FILE
@TENANTS
@MAX_PRIORITY
@option("--certificate", is_flag=True, help="Limit the caller with this name in its client certificate.")
def limit(
    session: Session,
    name: str,
    tokens_file: Path,
    tenants: tuple[str, ...],
    max_priority: int,
    certificate: bool,
) -> None:
    """Set the tenants and the highest priority of a token; options left out return to their default.

    A running server applies it within a second. Admins may use all tenants and priorities.
    """
    file = read(tokens_file)
    callers = tables(file, "certificates" if certificate else "tokens")
    if certificate and name not in callers:
        callers[name] = {}
    _set_limits(_existing(callers, name), tenants, max_priority)
    _replace(tokens_file, tomlkit.dumps(file))
    record = {"name": name, "tenants": list(dict.fromkeys(tenants)) or [name], "maxPriority": max_priority}
    session.output.write_records("limits", [record])


@command("token revoke ci --tokens-file tokens.toml")
@one_name()
@TOKENS_FILE
@option(
    "--label", metavar="TEXT", help="Revoke only this secret, such as one that `token rotate` left valid."
)
def revoke(session: Session, name: str, tokens_file: Path, label: str | None) -> None:
    """Revoke a token: it is rejected within a second, and open streams end within a minute.

    What its caller holds goes on: running work renews that by lease tokens. If the file has no token of that name, it revokes that person's logins until now.
    """
    file = read(tokens_file)
    tokens = tables(file, "tokens")
    if name not in tokens and label is None and {"logins", "oidc"} & file.keys():
        revoked = file.setdefault("revoked", tomlkit.table())
        if not _is_table(revoked):
            raise _unusable("the tokens file needs a table [revoked]")
        revoked[name] = datetime.now(UTC).replace(microsecond=0)
        _replace(tokens_file, tomlkit.dumps(file))
        session.output.write_records("revoked", [{"name": name}])
        note(f"{tokens_file} has no token {name}: logins of that person until now are revoked")
        note(_held(name))
        return
    token = _existing(tokens, name)
    found = _secrets(token)
    kept = [one for one in found if one.get("label") != label] if label is not None else []
    if len(kept) == len(found):
        raise errors.NotFoundError(f"token {name} has no secret labelled {label!r}", metadata={"name": name})
    if kept:
        _set_secrets(token, kept)
        _replace(tokens_file, tomlkit.dumps(file))
    else:
        _replace(tokens_file, _without(file, tokens, name))
        note(_held(name))
    session.output.write_records("revoked", [{"name": name}])


def _held(name: str) -> str:
    return f"what {name} holds goes on; to see it: gpuscalectl get reservations -l owner={name}"


def read(file: Path, *, new: bool = False) -> tomlkit.TOMLDocument:
    """The parsed tokens file; empty if it does not exist and `new`.

    Raises FailedPreconditionError: it cannot be read, or is not TOML (reason TOKENS_FILE).
    """
    try:
        return tomlkit.parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if new:
            return tomlkit.document()
        raise _unusable(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"cannot read {file}: {getattr(error, 'strerror', 'it is not UTF-8')}") from None
    except TOMLKitError as error:
        raise _unusable(f"the tokens file is not TOML: {error}") from error


def tables(file: tomlkit.TOMLDocument, kind: str) -> MutableMapping[str, Table]:
    """The tables under `tokens` or `certificates`, by name; changes to them change the file.

    Raises FailedPreconditionError: they are not tables (reason TOKENS_FILE).
    """
    found = file.setdefault(kind, tomlkit.table(is_super_table=True))
    if not (_is_table(found) and all(map(_is_table, found.values()))):
        raise _unusable(f"the tokens file needs tables [{kind}.NAME]")
    return cast("MutableMapping[str, Table]", found)


def _is_table(value: object) -> TypeGuard[Table]:
    return isinstance(value, MutableMapping)


def _existing(tokens: MutableMapping[str, Table], name: str) -> Table:
    if name not in tokens:
        raise errors.NotFoundError(f"token {name} not found", metadata={"name": name})
    return tokens[name]


def _without(file: tomlkit.TOMLDocument, tokens: MutableMapping[str, Table], name: str) -> str:
    """The text of the file without a name. Keeps a comment below its table, which likely belongs to the next one."""
    before = tomlkit.dumps(file)
    comments = [f"{line}\n" for line in tomlkit.dumps(tokens.pop(name)).splitlines() if line.startswith("#")]
    if not tokens:  # a file without this table is invalid, and would leave the last token valid
        file["tokens"] = tomlkit.table()
    after = tomlkit.dumps(file)
    same = next(
        (nth for nth, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after)
    )
    place = after.rfind("\n", 0, same) + 1
    return after[:place] + "".join(comments) + after[place:]


def _new_secret(
    label: str | None, expires_in: float | None, taken: Sequence[str] = ()
) -> tuple[str, dict[str, object]]:
    """A new secret, and its entry in the file: digest, label and expiry."""
    now = datetime.now(UTC).replace(microsecond=0)
    if label is None:
        label = next(text for text in (f"{now:%Y-%m-%d}", now.isoformat()) if text not in taken)
    elif label in taken or not (label.isprintable() and 0 < len(label) <= 63):
        raise errors.InvalidArgumentError(
            f"--label: {label!r} must be 1-63 printable characters not used by another secret of this name"
        )
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    described: dict[str, object] = {"sha256": hashlib.sha256(secret.encode()).hexdigest(), "label": label}
    if expires_in is not None:
        described["expires"] = now + timedelta(seconds=expires_in)
    return secret, described


_SECRET_KEYS = ("sha256", "label", "expires")


def _secrets(token: Table) -> list[Table]:
    """The entries of a name's secrets, the newest first."""
    newest: Table = {key: token[key] for key in _SECRET_KEYS if key in token}
    previous = token.get("previous", [])
    if not (is_list(previous) and all(map(_is_table, previous))):
        raise _unusable("`previous` of a token needs a list of tables")
    return [newest, *(dict(one) for one in previous if _is_table(one))]


def _set_secrets(token: Table, described: Sequence[Table]) -> None:
    newest, *previous = described
    body = token.value.body if isinstance(token, TomlTable) else []
    below: list[tuple[Key | None, Item]] = []  # blank lines and comments, which belong to what follows
    while body and body[-1][0] is None:
        below.insert(0, body.pop())
    for key in (*_SECRET_KEYS, "previous"):
        if key in newest:
            token[key] = newest[key]
        elif key in token:
            del token[key]
    if previous:
        text = ""
        for one in previous:
            parts = [  # JSON strings are TOML strings
                f"{key} = {value.isoformat() if isinstance(value, datetime) else json.dumps(value, ensure_ascii=False)}"
                for key, value in one.items()
            ]
            text += f"  {{ {', '.join(parts)} }},\n"
        token["previous"] = tomlkit.parse(f"previous = [\n{text}]\n")["previous"]
    body += below


def _over(secret: Table, now: datetime) -> bool:
    expires = secret.get("expires")
    return isinstance(expires, datetime) and expires <= now


def _set_limits(table: Table, tenants: tuple[str, ...], max_priority: int) -> None:
    for one in tenants:
        if not (one.isprintable() and one.strip() == one and 0 < len(one) <= LONGEST_TENANT):
            raise errors.InvalidArgumentError(
                f"--tenant: {one!r} must be 1-{LONGEST_TENANT} printable characters without spaces at the ends"
            )
    for key, value in (("tenants", list(dict.fromkeys(tenants))), ("max_priority", max_priority)):
        if value:
            table[key] = value
        else:
            table.pop(key, None)


def _hand_out(
    session: Session,
    secret: str,
    write: Path | None,
    record: dict[str, object],
    tokens_file: Path,
    file: tomlkit.TOMLDocument,
) -> None:
    """Show the secret or write it to its file, then make it valid."""
    if write is not None:
        _replace(write, f"{secret}\n")
    _replace(tokens_file, tomlkit.dumps(file))
    note(f"{record['name']} may call as {record['role']}; the token is not shown again")
    output = session.output
    if write is not None or output.format is Format.NAME:
        output.write_records("tokens", [record])
    elif output.human:
        sys.stdout.write(f"{secret}\n")
    else:
        output.write_data({**record, "token": secret})


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically, so that no server reads half of it."""
    with writing(file, reason="TOKENS_FILE"):
        write_private(file, text.encode())


def _unusable(message: str) -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(message, reason="TOKENS_FILE")


_OF_JOIN_TOKENS = ("id", "role", "node", "usesLeft", "expires")


@command("join-token create --expires-in 1h")
@option(
    "--node", default="", metavar="NAME", help="The only node name it is valid for; by default any new one."
)
@option(
    "--role",
    type=click.Choice(("agent", "operator")),
    default="agent",
    help="What its holder may do; operator needs --node.",
)
@option(
    "--kind",
    type=click.Choice(("gateway", "standby")),
    help="For the standby or gateway host in --node; its holder can act as any service.",
)
@option(
    "--uses", type=click.IntRange(1, 1000), default=1, metavar="N", help="Number of hosts that may use it."
)
@option("--expires-in", type=DURATION, default="1h", help="How long it is valid.")
def create_join_token(
    session: Session, node: str, role: str, kind: str | None, uses: int, expires_in: float
) -> None:
    """Create a join token and print the command to run on the host. The token is not shown again."""
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
        said = _join_token_record(made.join_token)
        said["expires"] = utc_text(wire.to_datetime(made.join_token.expire_time))
        session.output.write_data({**said, "token": made.token, "caHash": made.authority_digest})


@command("join-token list")
@names(metavar="ID", required=False)
def list_join_tokens(session: Session, name: tuple[str, ...]) -> None:
    """List valid join tokens, all or those of these ids."""
    with session.connect() as client:
        found = lookup.join_tokens(client, name)
    session.output.write_records("joinTokens", [_join_token_record(one) for one in found], _OF_JOIN_TOKENS)
    session.output.note_none(found, "none; make one with: gpuscalectl join-token create")


@command("join-token delete 3f9a12cd")
@one_name(metavar="ID")
def delete_join_token(session: Session, name: str) -> None:
    """Delete a join token, which can then no longer be used."""
    with session.connect() as client:
        client.joining.DeleteJoinToken(api.DeleteJoinTokenRequest(name=name.rpartition("/")[2]))
    session.output.write_records("deleted", [{"id": name}])


def _join_token_record(token: "api.JoinToken") -> dict[str, object]:
    return {
        "id": token.name.rpartition("/")[2],
        "role": types_api.Role.Name(token.role).removeprefix("ROLE_").lower(),
        "node": token.node.rpartition("/")[2],
        "usesLeft": token.uses_left,
        "expires": datetime.fromtimestamp(token.expire_time.seconds, UTC),
    }
