"""`gpuscalectl login-code`, `login` and `logout`: a token for a person, by a code or an OIDC provider, and the context that uses it.

Writes NAME.token, NAME.ca.crt and, for a provider, NAME.login with the refresh token beside the contexts file; NAME.token and NAME.login
are readable only by their owner. Secrets are read from a terminal, standard input or a file.

A login through a provider uses the device flow (RFC 8628).
"""

import json
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.commands.config import read_all, write_all
from gpuscale.cli.commands.hosts import read_secret, trusted, trusting
from gpuscale.cli.commands.tokens import MAX_PRIORITY, TENANTS
from gpuscale.cli.console.command import FILE, Session, command, context_names, names, one_name
from gpuscale.cli.console.errors import writing
from gpuscale.cli.console.terminal import TYPED, note
from gpuscale.cli.grammar.parameters import DURATION, local_text, option
from gpuscale.client.kept_login import find_provider
from gpuscale.common import errors, wire
from gpuscale.common.names import is_id
from gpuscale.common.rpc import channel
from gpuscale.common.secrets import write_private
from gpuscale.common.security.auth import is_safe

if TYPE_CHECKING:
    from gpuscale.common.security.signed_tokens import Provider


@command("login-code create alice bob --role operator")
@names()
@option(
    "--role", type=click.Choice(("viewer", "operator", "admin")), default="viewer", help="What they may do."
)
@TENANTS
@MAX_PRIORITY
@option("--expires-in", type=DURATION, default="1h", help="How long the code is valid.")
@option("--valid-for", type=DURATION, default="30d", help="How long a login lasts.")
def create(
    session: Session,
    name: tuple[str, ...],
    role: str,
    tenants: tuple[str, ...],
    max_priority: int,
    expires_in: float,
    valid_for: float,
) -> None:
    """Create a one-time login code for each name, and print the command to type. The code is not shown again."""
    records: list[dict[str, object]] = []
    with session.connect() as client:
        for one in name:
            made = client.logins.CreateLoginCode(
                api.CreateLoginCodeRequest(
                    name=one,
                    role=types_api.Role.Value(f"ROLE_{role.upper()}"),
                    tenants=tenants,
                    max_priority=max_priority,
                    ttl=wire.to_duration(expires_in),
                    token_ttl=wire.to_duration(valid_for),
                    request_id=str(uuid.uuid4()),
                )
            )
            line = f"gpuscalectl login {client.address} --ca-hash {made.authority_digest}"
            records.append(
                {"name": one, "code": made.code, "expires": _moment(made.expire_time.seconds), "type": line}
            )
    session.output.write_records("codes", records, ("name", "code", "expires"))
    note(f"each types, and is asked for the code: {records[0]['type']}", TYPED)


@command("login gpus.example:7070 --ca-hash sha256:5f9d…")
@one_name(metavar="ADDRESS")
@option(
    "--ca-hash", metavar="DIGEST", help="Digest of the server's authority; or pass its file with --ca-file."
)
@option(
    "--code-file", type=FILE, help="File with the code; - for standard input; by default you are prompted."
)
@option("--oidc", is_flag=True, help="Log in through the server's OIDC provider, without a code.")
@option("--as", "context", metavar="CONTEXT", help="Name of the context; by default the host of ADDRESS.")
def login(
    session: Session, name: str, ca_hash: str | None, code_file: Path | None, oidc: bool, context: str | None
) -> None:
    """Log in to a server: get a token, and make a context that uses it the current one."""
    from gpuscale.client.connection import Context, contexts_file

    first = channel.split_addresses(name)[0]
    context = context or first.rpartition(":")[0].strip("[]").replace(":", "-").lower()
    if not is_id(context):
        raise errors.InvalidArgumentError(
            f"{context!r} is not a valid name of a context: pass --as NAME", field="as"
        )
    folder = contexts_file().parent
    token_file, ca_file, login_file = (folder / f"{context}.{kind}" for kind in ("token", "ca.crt", "login"))
    there = next(one for one in (folder, *folder.parents) if one.is_dir())
    with writing(folder, reason="LOGIN_FILES"), tempfile.TemporaryFile(dir=there) as probe:
        probe.write(bytes(8192))  # before a code is spent
    with ExitStack() as stack:
        authority = session.ca_file
        if ca_hash is not None:
            authority = trusted(
                session, name, ca_hash, Path(stack.enter_context(tempfile.TemporaryDirectory()))
            )
        caller = trusting(session, name, authority)
        if oidc:
            who, token, kept = by_device(caller)
        else:
            if code_file is None and sys.stdin.isatty():
                code = click.prompt("one-time code", hide_input=True, err=True)
            else:
                code = read_secret(code_file, reason="CODE_FILE")
            with caller.connect() as client:
                answer = client.logins.Login(api.LoginRequest(code=code))
            role = types_api.Role.Name(answer.role).removeprefix("ROLE_").lower()
            until = local_text(_moment(answer.expire_time.seconds))
            who, token, kept = f"logged in as {answer.name} ({role}) until {until}", answer.token, b""
        with writing(folder, reason="LOGIN_FILES"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(token_file, f"{token}\n".encode())
            if authority is not None:
                write_private(ca_file, authority.read_bytes(), public=True)
            if kept:
                write_private(login_file, kept)
            else:
                login_file.unlink(missing_ok=True)
    _, _, by_name = read_all()
    made = Context(name, token_file, ca_file if authority is not None else None)
    write_all(contexts_file(), context, {**by_name, context: made})
    mine = replace(session, context=context, address=None, token_file=None, ca_file=None)
    with mine.connect() as client:
        client.fleet.ListNodes(api.ListNodesRequest(page_size=1))
    session.output.write_said([who, f"the current context is {context}"], {"name": context}, context)


@command("logout lab")
@click.argument("context", metavar="[CONTEXT]", default="", shell_complete=context_names)
def logout(session: Session, context: str) -> None:
    """Delete the files of a login, by default of the current context, and revoke its refresh token at the provider.

    Copies of the token stay valid until they expire, or an admin revokes them (`gpuscalectl token revoke`).
    """
    path, current, by_name = read_all()
    context = context or current
    token_file = path.parent / f"{context}.token"
    if context not in by_name or by_name[context].token_file != token_file:
        which = f"{context} is not a context" if context else "there is no current context"
        raise errors.NotFoundError(f"{which} that login wrote into {path}")
    login_file = token_file.with_suffix(".login")
    if login_file.exists():
        end_login(login_file)
    for file in (token_file, login_file, token_file.with_suffix(".ca.crt")):
        file.unlink(missing_ok=True)
    left = {name: one for name, one in by_name.items() if name != context}
    write_all(path, "" if current == context else current, left)
    session.output.write_said(f"logged out of {context}", {"name": context}, context)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
INTERVAL: Final = 5.0
"""Default seconds between polls of the provider; added when it answers slow_down (RFC 8628)."""
LONGEST: Final = 1800.0


def by_device(session: Session) -> tuple[str, str, bytes]:
    """Log in; returns a message, the ID token, and the data to refresh it, if possible.

    Raises:
        FailedPreconditionError: the server has no provider.
        PermissionDeniedError: the user or the provider refused.
        DeadlineExceededError: no approval in time.
        UnauthenticatedError: the provider's answer is not for this login.
        UnavailableError: the provider does not answer.
    """
    with session.connect() as client:
        found = client.logins.GetProvider(api.GetProviderRequest())
    if not found.issuer:
        raise errors.FailedPreconditionError(
            "this server has no OIDC provider: log in with a code", reason="NO_OIDC"
        )
    provider, nonce = find_provider(found.issuer, found.client_id), secrets.token_urlsafe(16)
    if not is_safe(provider.issuer):
        raise errors.FailedPreconditionError(
            "the OIDC provider of this server does not use https", reason="NO_OIDC"
        )
    told = provider.described("device_authorization_endpoint", "token_endpoint", "jwks_uri")
    form = {"client_id": found.client_id, "scope": found.scopes, "nonce": nonce}
    asked = _answer(provider.ask(told["device_authorization_endpoint"], form))
    where, code = str(asked.get("verification_uri", "")), str(asked.get("user_code", ""))
    if not is_safe(where) or not where.isprintable() or not code.isprintable():
        raise errors.UnavailableError("the OIDC provider names no page to log in at", reason="OIDC_PROVIDER")
    note(f"open {where} in a browser, and enter {code}")
    answer = _wait(provider, told["token_endpoint"], asked)
    token = str(answer.get("id_token", ""))
    provider.load()
    signed = provider.check(token)
    # Not every provider echoes the nonce in this flow; if it does, it must be ours.
    if signed.claims.get("nonce", nonce) != nonce:
        raise errors.UnauthenticatedError("the token belongs to another login", reason="TOKEN_INVALID")
    kept = {
        "issuer": found.issuer,
        "client_id": found.client_id,
        "sub": signed.claims.get("sub"),
        "refresh_token": answer.get("refresh_token"),
    }
    until = local_text(datetime.fromtimestamp(signed.ends, UTC))
    more = ", refreshed automatically" if answer.get("refresh_token") else ""
    return f"logged in until {until}{more}", token, json.dumps(kept).encode()


def _wait(provider: "Provider", endpoint: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    form = {"grant_type": DEVICE_GRANT, "client_id": provider.audience}
    form["device_code"] = str(asked.get("device_code", ""))
    pause = min(max(float(asked.get("interval", INTERVAL)), 0.2), 60.0)
    until = time.monotonic() + min(float(asked.get("expires_in", LONGEST)), LONGEST)
    while time.monotonic() < until:
        time.sleep(pause)
        try:
            answer = provider.ask(endpoint, form)
        except errors.UnavailableError:
            pause = min(pause * 2, 60.0)
            continue
        if (wrong := answer.get("error")) == "slow_down":
            pause += INTERVAL
        elif wrong != "authorization_pending":
            return _answer(answer)
    raise errors.DeadlineExceededError("the login was not approved in time", reason="LOGIN_TIMEOUT")


def _answer(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if "error" in answer:
        # The description is untrusted text of any length.
        said = str(answer["error"])[:64]
        raise errors.PermissionDeniedError(f"the OIDC provider says {said!r}", reason="OIDC_REFUSED")
    return answer


def end_login(login_file: Path) -> None:
    """Revoke a refresh token at the provider, if supported; only notes failures."""
    try:
        kept = json.loads(login_file.read_bytes())
        provider = find_provider(kept["issuer"], kept["client_id"])
        endpoint = str(provider.described().get("revocation_endpoint", ""))
        if kept.get("refresh_token") and is_safe(endpoint):
            provider.ask(endpoint, {"token": str(kept["refresh_token"]), "client_id": provider.audience})
    except (OSError, ValueError, KeyError, errors.GpuscaleError) as error:
        note(f"the refresh token was not revoked at the provider: {error}")
