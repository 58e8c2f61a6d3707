"""LoginService on the wire: login codes that admins create, and tokens in exchange for them."""

import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import RESERVED_NAMES, Context, Limits, Role, TokenFile
from gpuscale.common.wire import optional_seconds, to_timestamp
from gpuscale.monitor.fleet.join_servicer import DEFAULT_TTL, MOST_SECRETS, Joined, Repeats, must
from gpuscale.monitor.fleet.nodes import Nodes

if TYPE_CHECKING:
    from gpuscale.common.security.authority import Signer

LOGIN_SERVICE: Final = "gpuscale.api.monitor.v1.LoginService"
TOKEN_TTL: Final = 30 * 86400.0
"""Default lifetime of a login's token, in seconds."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Code:
    """A login code, with the digest of its secret; `expires` is on the fleet's clock."""

    digest: bytes
    name: str
    role: Role
    limits: Limits
    token_ttl: float
    expires: float


class LoginServicer(api.LoginServiceServicer):
    """Signs tokens for holders of login codes, which are kept in memory only. Without a `signer` calls fail."""

    def __init__(
        self, signer: "Signer | None", tokens: TokenFile | None, nodes: Nodes, joined: Joined, clock: Clock
    ) -> None:
        self._signer = signer
        self._tokens = tokens
        self._nodes = nodes
        self._joined = joined
        self._clock = clock
        self._codes: dict[str, _Code] = {}
        self._repeats = Repeats[api.CreateLoginCodeResponse](clock)

    async def GetProvider(self, request: api.GetProviderRequest, context: Context) -> api.GetProviderResponse:
        oidc = None if self._tokens is None else self._tokens.oidc
        if oidc is None:
            return api.GetProviderResponse()
        return api.GetProviderResponse(issuer=oidc.issuer, client_id=oidc.client_id, scopes=oidc.scopes)

    async def CreateLoginCode(
        self, request: api.CreateLoginCodeRequest, context: Context
    ) -> api.CreateLoginCodeResponse:
        """Create a code, whose secret is not stored."""
        signer, name, role = must(self._signer), request.name, request.role or Role.VIEWER
        if (before := self._repeats.find(request)) is not None:
            return before
        if self._tokens is None or not self._tokens.takes_logins:
            message = "the fleet does not accept logins: its tokens file needs the table [logins]"
            raise FailedPreconditionError(message, reason="NO_LOGINS")
        if role not in {Role.VIEWER, Role.OPERATOR, Role.ADMIN}:
            raise InvalidArgumentError("role must be viewer, operator or admin", field="role")
        node = self._nodes.is_known(name) or name in self._joined
        if name in RESERVED_NAMES or node or signer.is_taken(name):
            raise PermissionDeniedError(
                f"{name} is the name of a service, a node or another caller", reason="NAME_TAKEN"
            )
        if len(self._valid()) >= MOST_SECRETS:
            raise ResourceExhaustedError(
                f"there are {MOST_SECRETS} codes: wait until one expires", reason="TOO_MANY_LOGIN_CODES"
            )
        ttl = optional_seconds(request, "ttl") or DEFAULT_TTL
        key, secret = secrets.token_hex(4), secrets.token_urlsafe(16)
        self._codes[key] = _Code(
            sha256(secret.encode()).digest(),
            name,
            Role(role),
            Limits(tuple(request.tenants), request.max_priority),
            optional_seconds(request, "token_ttl") or TOKEN_TTL,
            self._clock.now() + ttl,
        )
        answer = api.CreateLoginCodeResponse(
            code=f"{key}.{secret}",
            expire_time=to_timestamp(self._clock.wall() + timedelta(seconds=ttl)),
            authority_digest=signer.digest,
        )
        self._repeats.keep(request, answer, self._codes[key].expires)
        return answer

    async def Login(self, request: api.LoginRequest, context: Context) -> api.LoginResponse:
        """Sign a token. No await between the check of a code and its use."""
        signer = must(self._signer)
        key, _, secret = request.code.partition(".")
        code = self._valid().get(key)
        if code is None or not hmac.compare_digest(code.digest, sha256(secret.encode()).digest()):
            raise UnauthenticatedError("the code is unknown, used or expired", reason="LOGIN_CODE_INVALID")
        del self._codes[key]
        token, ends = signer.sign_token(code.name, code.role, code.limits, code.token_ttl)
        _log.info("a person logged in", name=code.name, role=code.role.name.lower(), code=key)
        return api.LoginResponse(
            token=token, name=code.name, role=code.role.value, expire_time=to_timestamp(ends)
        )

    def _valid(self) -> dict[str, _Code]:
        now = self._clock.now()
        self._codes = {key: code for key, code in self._codes.items() if code.expires > now}
        return self._codes
