"""A login at an OIDC provider, refreshed by the programs that use it.

NAME.token holds its ID token; NAME.login beside it, readable only by its owner, holds issuer, client id, subject and the one-time
refresh token. Programs that share the files take turns with a lock on NAME.login.
"""

import base64
import fcntl
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from gpuscale.common import errors
from gpuscale.common.secrets import write_private

if TYPE_CHECKING:
    from gpuscale.common.security.signed_tokens import Provider

FRESH: Final = 60.0
"""Seconds before its expiry at which a token is refreshed."""
PAUSE: Final = 10.0
"""Seconds to wait after a failed refresh."""


def find_provider(issuer: object, client_id: object) -> "Provider":
    """The provider of a login. Raises FailedPreconditionError (OIDC_NOT_INSTALLED) without the libraries for it."""
    try:
        from gpuscale.common.security.signed_tokens import Provider
    except ImportError as error:
        message = f"a login at an OIDC provider needs a library ({error}): pip install 'gpuscale[oidc]'"
        raise errors.FailedPreconditionError(message, reason="OIDC_NOT_INSTALLED") from error
    return Provider(str(issuer), str(client_id))


class KeptLogin(grpc.AuthMetadataPlugin):
    """Supplies the token for each call, in a thread of gRPC's own, so that a refresh blocks no event loop."""

    def __init__(self, token_file: Path, login_file: Path) -> None:
        self._files = (token_file, login_file)
        self._lock = threading.Lock()
        self._token, self._ends = "", 0.0
        self._next_try = 0.0
        self.problem: errors.GpuscaleError | None = None

    def __call__(self, context: object, callback: grpc.AuthMetadataPluginCallback) -> None:  # noqa: ARG002
        """Add the token to a call."""
        try:
            token = self.token()
        except errors.GpuscaleError as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {token}"),), None)

    def token(self) -> str:
        """A valid token. Blocks while it is refreshed.

        Raises:
            UnauthenticatedError: it can no longer be refreshed (reason LOGIN_OVER).
            UnavailableError: the provider does not answer.
            FailedPreconditionError: libraries are missing (reason OIDC_NOT_INSTALLED).
        """
        if time.time() + FRESH < self._ends:
            return self._token
        with self._lock:
            try:
                if time.time() + FRESH >= self._ends and time.monotonic() >= self._next_try:
                    self._read()
                    self.problem = None
            except (OSError, ValueError) as error:
                message = f"the files of the login cannot be used ({type(error).__name__}): log in again"
                self._failed(errors.UnauthenticatedError(message, reason="LOGIN_OVER"))
            except errors.GpuscaleError as error:
                self._failed(error)
            if self.problem is not None and self._ends <= time.time():
                raise self.problem
            return self._token

    @staticmethod
    def lacked(error: errors.UnavailableError) -> bool:
        """Whether a call failed for lack of a token; `problem` says why."""
        return error.message.startswith("Getting metadata from plugin failed")

    def _failed(self, error: errors.GpuscaleError) -> None:
        self.problem = error
        self._next_try = time.monotonic() + PAUSE

    def _read(self) -> None:
        token_file, login_file = self._files

        def is_fresh() -> bool:
            self._token = token_file.read_text("ascii").strip()
            self._ends = _end_of(self._token)
            return time.time() + FRESH < self._ends

        if is_fresh():
            return
        with login_file.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_fresh():
                return  # another program refreshed it
            over = errors.UnauthenticatedError(
                "the login is over: gpuscalectl login ADDRESS --oidc", reason="LOGIN_OVER"
            )
            kept: dict[str, Any] = json.load(lock)
            if not kept.get("refresh_token"):
                raise over
            provider = find_provider(kept["issuer"], kept["client_id"])
            form = {
                "grant_type": "refresh_token",
                "refresh_token": str(kept["refresh_token"]),
                "client_id": provider.audience,
            }
            answer = provider.ask(provider.described("token_endpoint", "jwks_uri")["token_endpoint"], form)
            if "error" in answer:
                raise over
            # Save the refresh token first, since it cannot be obtained again. In place: the lock is on this file.
            kept["refresh_token"] = answer.get("refresh_token") or kept["refresh_token"]
            lock.seek(0)
            lock.write(json.dumps(kept).encode())
            lock.truncate()
            lock.flush()
            provider.load()
            token = str(answer.get("id_token", ""))
            if provider.check(token).claims.get("sub") != kept.get("sub"):
                raise over
            self._token, self._ends = token, _end_of(token)
            write_private(token_file, f"{token}\n".encode())


def _end_of(token: str) -> float:
    """The expiry of an ID token, in seconds since 1970; 0 if it has none."""
    try:
        return float(json.loads(base64.urlsafe_b64decode(f"{token.split('.')[1]}=="))["exp"])
    except (IndexError, KeyError, TypeError, ValueError):
        return 0.0
