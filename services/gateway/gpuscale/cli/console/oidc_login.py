"""Log in through an OIDC provider from a terminal (device flow, RFC 8628), and out again."""

import json
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import local_text
from gpuscale.client.kept_login import find_provider
from gpuscale.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    GpuscaleError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from gpuscale.common.security.auth import is_safe

if TYPE_CHECKING:
    from gpuscale.common.security.signed_tokens import Provider

DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
INTERVAL: Final = 5.0
"""Seconds between two questions whether somebody has agreed, where the provider names no other; added when it says slow_down."""
LONGEST: Final = 1800.0


def by_device(session: Session) -> tuple[str, str, bytes]:
    """Log in: what to say of it, the ID token, and what the refresh needs, or nothing.

    Raises:
        FailedPreconditionError: the server has no provider.
        PermissionDeniedError: somebody refused, or the provider does.
        DeadlineExceededError: nobody agreed in time.
        UnauthenticatedError: what the provider answers is not for us.
        UnavailableError: it does not answer.
    """
    from gpuscale.api.monitor import v1 as api

    with session.connect() as client:
        found = client.logins.GetProvider(api.GetProviderRequest())
    if not found.issuer:
        raise FailedPreconditionError(
            "this server has no OIDC provider: log in with a code", reason="NO_OIDC"
        )
    provider, nonce = find_provider(found.issuer, found.client_id), secrets.token_urlsafe(16)
    if not is_safe(provider.issuer):
        raise FailedPreconditionError("the OIDC provider of this server does not use https", reason="NO_OIDC")
    told = provider.described("device_authorization_endpoint", "token_endpoint", "jwks_uri")
    form = {"client_id": found.client_id, "scope": found.scopes, "nonce": nonce}
    asked = _answer(provider.ask(told["device_authorization_endpoint"], form))
    where, code = str(asked.get("verification_uri", "")), str(asked.get("user_code", ""))
    if not is_safe(where) or not where.isprintable() or not code.isprintable():
        raise UnavailableError("the OIDC provider names no page to log in at", reason="OIDC_PROVIDER")
    note(f"open {where} in a browser, and enter {code}")
    answer = _wait(provider, told["token_endpoint"], asked)
    token = str(answer.get("id_token", ""))
    provider.load()
    signed = provider.check(token)
    # Not every provider echoes it in this flow; one that does echoes ours.
    if signed.claims.get("nonce", nonce) != nonce:
        raise UnauthenticatedError("the token belongs to another login", reason="TOKEN_INVALID")
    kept = {
        "issuer": found.issuer,
        "client_id": found.client_id,
        "sub": signed.claims.get("sub"),
        "refresh_token": answer.get("refresh_token"),
    }
    until = local_text(datetime.fromtimestamp(signed.ends, UTC))
    more = ", and refreshed by itself" if answer.get("refresh_token") else ""
    return f"logged in until {until}{more}", token, json.dumps(kept).encode()


def _wait(provider: "Provider", endpoint: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tokens, once somebody has agreed."""
    form = {
        "grant_type": DEVICE_GRANT,
        "device_code": str(asked.get("device_code", "")),
        "client_id": provider.audience,
    }
    pause = min(max(float(asked.get("interval", INTERVAL)), 0.2), 60.0)
    until = time.monotonic() + min(float(asked.get("expires_in", LONGEST)), LONGEST)
    while time.monotonic() < until:
        time.sleep(pause)
        try:
            answer = provider.ask(endpoint, form)
        except UnavailableError:
            pause = min(pause * 2, 60.0)
            continue
        if (wrong := answer.get("error")) == "slow_down":
            pause += INTERVAL
        elif wrong != "authorization_pending":
            return _answer(answer)
    raise DeadlineExceededError("nobody approved the login in time", reason="LOGIN_TIMEOUT")


def _answer(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if "error" in answer:
        # Its description may be of any length and hold anything.
        said = str(answer["error"])[:64]
        raise PermissionDeniedError(f"the OIDC provider says {said!r}", reason="OIDC_REFUSED")
    return answer


def end_login(login_file: Path) -> None:
    """Revoke a refresh token at the provider, if it offers that; notes a provider that does not answer."""
    try:
        kept = json.loads(login_file.read_bytes())
        provider = find_provider(kept["issuer"], kept["client_id"])
        endpoint = str(provider.described().get("revocation_endpoint", ""))
        if kept.get("refresh_token") and is_safe(endpoint):
            provider.ask(endpoint, {"token": str(kept["refresh_token"]), "client_id": provider.audience})
    except (OSError, ValueError, KeyError, GpuscaleError) as error:
        note(f"the refresh token was not revoked at the provider: {error}")
