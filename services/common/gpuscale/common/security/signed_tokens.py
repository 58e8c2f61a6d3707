"""Signed bearer tokens (JWT, RFC 7519): login tokens of `gpuscalectl login`, and ID tokens of an OIDC provider.

Login tokens are signed with the key of the fleet's authority, whose certificate every service has. The keys of a provider
are fetched when an unknown one is needed, and every few minutes so that withdrawn keys stop working. For their tables in
the tokens file see `gpuscale.common.security.auth`.

Only the public-key algorithms below are accepted: never `none`, and never a MAC, which could be forged with a public key.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard, cast
from urllib.parse import urlsplit

import httpx
from cryptography import x509
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, RSAKey
from pydantic import BaseModel, ValidationError

from gpuscale.common.errors import UnauthenticatedError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import KeysNeededError, is_safe
from gpuscale.common.security.followed import Followed

LOGIN_ISSUER: Final = "gpuscale"
"""Issuer and audience of login tokens."""
ALGORITHMS: Final = frozenset({"RS256", "PS256", "ES256"})
LEEWAY: Final = 60.0
"""Seconds of clock skew allowed between an issuer and a service."""
FETCH_TIMEOUT: Final = 5.0
FETCH_PAUSE: Final = 10.0
"""Minimum seconds between two fetches of a provider's keys."""
KEYS_AGE: Final = 300.0
"""Seconds after which keys are fetched again."""
MOST_BYTES: Final = 1 << 20
"""Limit for a response of a provider."""
MOST_KEYS: Final = 100
MOST_KEPT: Final = 4096
"""Size of the cache of checked tokens."""
_KINDS: Final[Mapping[str, type[RSAKey] | type[ECKey]]] = {"RSA": RSAKey, "EC": ECKey}
_PUBLIC: Final = frozenset({"kty", "kid", "alg", "use", "n", "e", "crv", "x", "y"})

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SignedToken:
    """A verified token. `begins` and `ends` are seconds since 1970."""

    claims: Mapping[str, Any]
    begins: float
    ends: float


def invalid(why: str) -> UnauthenticatedError:
    """The error for an invalid token; `why` never contains the token."""
    return UnauthenticatedError(f"the token is refused: {why}", reason="TOKEN_INVALID")


def unchecked(token: str) -> Mapping[str, Any]:
    """The unverified claims of a token; empty if it is no JWT."""
    try:
        claims: object = json.loads(jws.extract_compact(token.encode()).payload)
    except (JoseError, ValueError):
        return {}
    return cast("dict[str, Any]", claims) if isinstance(claims, dict) else {}


def check(token: str, key_of: Callable[[str, str], Key], issuer: str, audience: str) -> SignedToken:
    """Verify a token; `key_of` returns the key for a key id and algorithm, or raises. Raises UnauthenticatedError: TOKEN_INVALID or TOKEN_EXPIRED."""
    try:
        header = jws.extract_compact(token.encode()).headers()
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        if algorithm not in ALGORITHMS or not isinstance(key_id, str):
            raise invalid(f"its algorithm must be one of {', '.join(sorted(ALGORITHMS))}")
        claims = jwt.decode(token, key_of(key_id, algorithm), algorithms=[algorithm]).claims
    except (JoseError, ValueError) as error:
        raise invalid(f"its signature or form is invalid ({type(error).__name__})") from None
    if claims.get("iss") != issuer:
        raise invalid("it has another issuer")
    audiences = claims.get("aud")
    if audience not in (audiences if isinstance(audiences, list) else [audiences]):
        raise invalid("it has another audience")
    now = time.time()
    ends, begins, not_before = claims.get("exp"), claims.get("iat"), claims.get("nbf", 0)
    if not (_is_time(ends) and _is_time(begins) and _is_time(not_before)):
        raise invalid("it has no valid iat, nbf or exp")
    if max(begins, not_before) > now + LEEWAY:
        raise invalid("it is not valid yet")
    if ends <= now:
        raise UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
    return SignedToken(claims, float(begins), float(ends))


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class LoginTokens:
    """Verifies tokens signed by the authorities of a file, `keys`. Raises OSError or ValueError if it cannot be used."""

    def __init__(self, ca_file: Path) -> None:
        def load() -> Mapping[str, ECKey]:
            found = x509.load_pem_x509_certificates(ca_file.read_bytes())
            return {key_id(one): ECKey.import_key(one.public_key()) for one in found}  # type: ignore[arg-type]

        self.keys = Followed("authority of logins", (ca_file,), load, 1.0)

    def check(self, token: str) -> SignedToken:
        """Verify a token. Raises as `check`."""

        def key_of(key: str, _algorithm: str) -> Key:
            found = self.keys.current.get(key)
            if found is None:
                raise invalid("another authority signed it")
            return found

        return check(token, key_of, LOGIN_ISSUER, LOGIN_ISSUER)


def key_id(authority: x509.Certificate) -> str:
    """The key id of an authority in its tokens."""
    return authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest.hex()


class _Keys(BaseModel):
    keys: list[dict[str, Any]]


class Provider:
    """An OIDC provider: its discovery document and keys. `audience` is our client id.

    `ca_file` is the authority for its TLS; None for those of the system.
    """

    def __init__(self, issuer: str, audience: str, ca_file: Path | None = None) -> None:
        self.issuer = issuer
        self.audience = audience
        self.ca_file = ca_file
        self._keys: Sequence[Key] = ()
        self._fetched = self._looked = float("-inf")
        self._failed = False
        self._fetching: asyncio.Task[None] | None = None
        self.on_fetched: Callable[[], None] = lambda: None

    def same_as(self, other: "Provider") -> bool:
        """Whether both can share fetched keys."""
        return (self.issuer, self.audience, self.ca_file) == (other.issuer, other.audience, other.ca_file)

    def check(self, token: str) -> SignedToken:
        """Verify a token.

        Raises:
            KeysNeededError: its key is unknown, and keys may be fetched.
            UnauthenticatedError: as `check`.
            UnavailableError: its key is unknown, and the provider did not answer.
        """
        return check(token, self._key_of, self.issuer, self.audience)

    def stay_fresh(self) -> None:
        """Start to fetch old keys again, which are valid meanwhile; needs a running event loop."""
        if time.monotonic() - self._fetched > KEYS_AGE and self._may_look():
            self._begin()

    def _may_look(self) -> bool:
        return time.monotonic() - self._looked >= FETCH_PAUSE

    def _key_of(self, wanted: str, algorithm: str) -> Key:
        kind = "EC" if algorithm.startswith("E") else "RSA"
        named = [one for one in self._keys if one.key_type == kind and (not wanted or one.kid == wanted)]
        if len(named) == 1 and named[0].get("alg", algorithm) == algorithm:
            return named[0]
        if self._may_look() or self._fetching is not None:
            raise KeysNeededError(self.fetch)
        if self._failed:
            raise UnavailableError(
                "the OIDC provider does not answer, and the key of this token is not known yet",
                reason="OIDC_PROVIDER",
                retry_after=FETCH_PAUSE,
            )
        raise invalid("no key of the provider signed it")

    async def fetch(self) -> None:
        """Fetch the keys; concurrent calls share one fetch."""
        await asyncio.shield(self._begin())

    def _begin(self) -> "asyncio.Task[None]":
        async def look() -> None:
            try:
                await asyncio.to_thread(self.load)
                self._failed = False
            except UnavailableError as error:
                self._failed = True
                _log.warning("cannot fetch the keys of the OIDC provider", problem=error.message)
            finally:
                self._fetching = None

        if self._fetching is None:
            self._looked = time.monotonic()
            self._fetching = asyncio.get_running_loop().create_task(look())
        return self._fetching

    def load(self) -> None:
        """Fetch the keys. Blocks. Raises UnavailableError: no valid answer of the provider (reason OIDC_PROVIDER)."""
        try:
            found = _Keys.model_validate(self.ask(str(self.described("jwks_uri")["jwks_uri"]))).keys
        except ValidationError:
            raise _unusable(f"{self.issuer} publishes no keys") from None
        keys: list[Key] = []
        for one in found[:MOST_KEYS]:
            try:
                if one["kty"] in _KINDS and one.get("use", "sig") == "sig":
                    public = {name: value for name, value in one.items() if name in _PUBLIC}
                    keys.append(_KINDS[one["kty"]].import_key(public))
            except (JoseError, ValueError, TypeError, KeyError):
                continue  # malformed, or of an unsupported kind
        self._keys, self._fetched = tuple(keys), time.monotonic()
        self.on_fetched()

    def described(self, *endpoints: str) -> Mapping[str, Any]:
        """The discovery document, which must have these endpoints. Blocks; raises as `load`."""
        found = self.ask(f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != self.issuer:
            raise _unusable(f"{self.issuer} reports another issuer")
        for name in endpoints:
            if not is_safe(str(found.get(name, ""))):
                raise _unusable(f"{self.issuer} has no https {name}")
        return cast("dict[str, Any]", found)

    def ask(self, url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        """GET a JSON object, or POST a form; returns OAuth errors too. Blocks; raises as `load`."""
        from ssl import create_default_context

        try:
            verify = create_default_context(cafile=self.ca_file)
            with httpx.Client(verify=verify, timeout=FETCH_TIMEOUT, trust_env=False) as client:
                method = "GET" if form is None else "POST"
                with client.stream(method, url, data=form, headers={"accept": "application/json"}) as answer:
                    content = b""
                    for part in answer.iter_bytes():
                        content += part
                        if len(content) > MOST_BYTES:
                            break  # the truncated content is no JSON
            found: object = json.loads(content) if content else {}
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _unusable(f"{urlsplit(url).netloc}: {type(error).__name__}") from None
        if not isinstance(found, dict) or (answer.is_error and "error" not in found):
            raise _unusable(f"{urlsplit(url).netloc} answers {answer.status_code}")
        return cast("dict[str, Any]", found)


def _unusable(message: str) -> UnavailableError:
    return UnavailableError(f"the OIDC provider cannot be used: {message}", reason="OIDC_PROVIDER")
