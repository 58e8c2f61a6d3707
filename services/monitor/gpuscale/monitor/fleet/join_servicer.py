"""JoinService, LoginService and CertificateService on the wire: secrets that admins create, and what is signed in exchange.

A join token gets certificates for a host, a login code a token for a person. Names that joined are kept in a file, so that nobody else gets them; answers with a secret, in memory for repeated calls.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types.v1 import options_pb2
from gpuscale.common import errors
from gpuscale.common.filters import listed
from gpuscale.common.names import JOINING, NODE, id_of, node_name, parse
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, uninterrupted
from gpuscale.common.secrets import write_private
from gpuscale.common.security.auth import RESERVED_NAMES, Context, Limits, Role, TokenFile, current_principal
from gpuscale.common.wire import fingerprint, optional_seconds, to_timestamp
from gpuscale.internal.monitor import v1 as internal
from gpuscale.monitor.fleet.nodes import Nodes

if TYPE_CHECKING:
    from gpuscale.common.security.certificate_authority import Signer


class Joined:
    """Names that joined, and as what, in a file of lines `what/name`; in memory only without a file.

    The folder `issued` beside it has the newest certificate of each, for `gpuscalectl certs`.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = asyncio.Lock()
        try:
            lines = [] if file is None or not file.exists() else file.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            message = f"cannot read the names of joined hosts from {file}: {error}"
            raise errors.FailedPreconditionError(message, reason="AUTHORITY") from error
        self._lines = {line.rpartition("/")[2]: line for line in lines}

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def what(self, name: str) -> str:
        """What joined with that name; empty if nothing did."""
        return self._lines.get(name, "").partition("/")[0]

    def add(self, what: str, name: str) -> None:
        """Add a name; `save` stores it."""
        self._lines[name] = f"{what}/{name}"

    def forget(self, name: str) -> None:
        """Free a name; `save` stores that."""
        self._lines.pop(name, None)

    @uninterrupted
    async def save(self, name: str = "", certificate: str = "") -> None:
        """Write all names, and a certificate that was issued to one. UnavailableError if that fails."""
        if (file := self._file) is None:
            return
        own = file.with_name("issued") / f"{name}.crt"

        def put() -> None:
            write_private(file, content)
            if name in self._lines:
                own.parent.mkdir(mode=0o700, exist_ok=True)
                write_private(own, certificate.encode())
            else:
                own.unlink(missing_ok=True)

        async with self._lock:  # the newest state is written last
            content = "".join(f"{line}\n" for line in self._lines.values()).encode()
            try:
                await asyncio.to_thread(put)
            except OSError as error:
                raise errors.UnavailableError(f"cannot write {file.parent}: {error.strerror}") from error


MOST_SECRETS: Final = 1000
"""Maximum number of join tokens, of login codes, and of repeatable answers."""

A = TypeVar("A")


class Repeats(Generic[A]):
    """Answers by caller and request id, kept in memory until the secret in them expires."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[tuple[str, str], tuple[str, A, float]] = {}

    def find(self, request: Any) -> A | None:
        """The earlier answer to this request of this caller; None without one. AlreadyExistsError if its arguments differ."""
        now = self._clock.now()
        self._all = {key: one for key, one in self._all.items() if one[2] > now}
        found = self._all.get(_key(request))
        if found is None:
            return None
        if found[0] != fingerprint(request):
            raise errors.request_id_reused(request.request_id)
        return found[1]

    def keep(self, request: Any, answer: A, expires: float) -> None:
        """Keep an answer until `expires` if the request has an id; drops the oldest if there are too many."""
        if request.request_id:
            if len(self._all) >= MOST_SECRETS:
                del self._all[next(iter(self._all))]
            self._all[_key(request)] = fingerprint(request), answer, expires


def _key(request: Any) -> tuple[str, str]:
    return current_principal().name, request.request_id.lower()


LOOK_PERIOD, LOOKS = 1.0, 60
"""Seconds between checks of the files, and checks per call: the host then calls again, with a certificate that is still valid."""
DEFAULT_TTL: Final = 3600.0
"""Default lifetime of a join token or login code, in seconds."""
TOKEN_TTL: Final = 30 * 86400.0
"""Default lifetime of a login's token, in seconds."""
SERVICE_DAYS: Final = 397.0
"""Validity of a services host's first certificates, which it renews once it runs: it may join long before."""
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}|::1")

_log = get_logger(__name__)


@dataclass(slots=True)
class _JoinToken:
    """A join token, with the digest of its secret; `expires` is on the fleet's clock."""

    id: str
    digest: bytes
    role: Role
    node: str
    uses_left: int
    expires: float
    kind: "api.HostKind.ValueType"


class JoinServicer(api.JoinServiceServicer):
    """Signs certificates for holders of join tokens, which are kept in memory only."""

    def __init__(self, signer: "Signer | None", nodes: Nodes, joined: Joined, clock: Clock) -> None:
        self._signer = signer
        self._nodes = nodes
        self._joined = joined
        self._clock = clock
        self._tokens: dict[str, _JoinToken] = {}
        self._repeats = Repeats[api.CreateJoinTokenResponse](clock)

    async def GetAuthority(
        self, request: api.GetAuthorityRequest, context: Context
    ) -> api.GetAuthorityResponse:
        return api.GetAuthorityResponse(authority_pem=must(self._signer).bundle)

    async def CreateJoinToken(
        self, request: api.CreateJoinTokenRequest, context: Context
    ) -> api.CreateJoinTokenResponse:
        signer, role = must(self._signer), request.role or Role.AGENT
        if (before := self._repeats.find(request)) is not None:
            return before
        node = id_of(NODE, request.node, "node") if request.node else ""
        if role not in {Role.AGENT, Role.OPERATOR}:
            raise errors.InvalidArgumentError("role must be agent or operator", field="role")
        if role != Role.AGENT and not node:
            raise errors.InvalidArgumentError("a token of role operator needs a node", field="node")
        if request.kind and (request.role or not node or request.uses > 1):
            raise errors.InvalidArgumentError(
                "a host of services needs a node, no role and one use", field="kind"
            )
        if node in RESERVED_NAMES:
            raise errors.InvalidArgumentError(f"{node} is reserved for callers without a name", field="node")
        if len(self._valid()) >= MOST_SECRETS:
            raise errors.ResourceExhaustedError(
                f"there are {MOST_SECRETS} join tokens: delete one", reason="TOO_MANY_JOIN_TOKENS"
            )
        ttl = optional_seconds(request, "ttl") or DEFAULT_TTL
        secret, now = secrets.token_urlsafe(32), self._clock.now()
        made = _JoinToken(
            secrets.token_hex(4),
            sha256(secret.encode()).digest(),
            Role(role),
            node,
            request.uses or 1,
            now + ttl,
            request.kind,
        )
        self._tokens[made.id] = made
        answer = api.CreateJoinTokenResponse(
            join_token=self._message(made), token=f"{made.id}.{secret}", authority_digest=signer.digest
        )
        self._repeats.keep(request, answer, made.expires)
        return answer

    async def GetJoinToken(
        self, request: api.GetJoinTokenRequest, context: Context
    ) -> api.GetJoinTokenResponse:
        found = self._valid().get(parse(JOINING, request.name)["join_token"])
        token = errors.NotFoundError.unless(found, request.name)
        return api.GetJoinTokenResponse(join_token=self._message(token))

    async def ListJoinTokens(
        self, request: api.ListJoinTokensRequest, context: Context
    ) -> api.ListJoinTokensResponse:
        shown, token = listed(
            sorted(self._valid().values(), key=lambda one: one.id),
            request,
            api.JoinToken,
            key=lambda one: one.id,
            encode=self._message,
        )
        return api.ListJoinTokensResponse(join_tokens=shown, next_page_token=token)

    async def DeleteJoinToken(
        self, request: api.DeleteJoinTokenRequest, context: Context
    ) -> api.DeleteJoinTokenResponse:
        key = id_of(JOINING, request.name)
        if key not in self._valid() and not request.allow_missing:
            raise errors.NotFoundError.of(f"joinTokens/{key}")
        self._tokens.pop(key, None)
        return api.DeleteJoinTokenResponse()

    async def Join(self, request: api.JoinRequest, context: Context) -> api.JoinResponse:
        """Sign for a host. No await between the check of a token and its use."""
        signer = must(self._signer)
        name, _, secret = request.token.partition(".")
        token = self._valid().get(name)
        if token is None or not hmac.compare_digest(token.digest, sha256(secret.encode()).digest()):
            raise errors.UnauthenticatedError(
                "the join token is unknown, used up or expired", reason="JOIN_TOKEN_INVALID"
            )
        node = id_of(NODE, request.node, "node")
        if node != (token.node or node):
            raise errors.PermissionDeniedError(
                f"the join token is for {token.node}", reason="JOIN_TOKEN_OF_OTHER_NODE"
            )
        if node in RESERVED_NAMES or (not token.node and signer.is_taken(node)):
            message = f"{node} is the name of a service or another caller"
            raise errors.PermissionDeniedError(message, reason="NODE_NAME_TAKEN")
        if not token.node and (self._nodes.is_known(node) or node in self._joined):
            message = f"node {node} exists: forget it, or create a join token for it"
            raise errors.AlreadyExistsError(message, reason="NODE_EXISTS", metadata={"name": node_name(node)})
        from gpuscale.common.security.certificate_authority import CertificateSubject

        if token.kind:
            # A host of services also gets the tokens and revocations.
            if not request.hosts or not all(map(_HOST.fullmatch, request.hosts)):
                raise errors.InvalidArgumentError(
                    "hosts must be names or addresses of the host", field="hosts"
                )
            hosts = tuple(dict.fromkeys((*request.hosts, "localhost", "127.0.0.1")))
            what = api.HostKind.Name(token.kind).removeprefix("HOST_KIND_").lower()
            answer = _signed(signer, what, node, hosts, request.csr, SERVICE_DAYS)
            await self._spend(token, what, node, answer.certificate_pem)
            answer.tokens, answer.revoked = await asyncio.to_thread(signer.shared_files)
            _log.info("a host of services joined", node=node, hosts=hosts, join_token=token.id)
            return answer
        role = token.role.name.lower()
        certificate = signer.sign(request.csr, CertificateSubject(node, uri=signer.identity(role, node)))
        await self._spend(token, role, node, certificate)
        _log.info("a host joined", node=node, role=role, join_token=token.id)
        return api.JoinResponse(certificate_pem=certificate, authority_pem=signer.bundle)

    async def _spend(self, token: _JoinToken, what: str, node: str, certificate: str) -> None:
        """Use a token for a host, and store that; if that fails, give back the use and the name."""
        before = self._joined.what(node)
        token.uses_left -= 1
        self._joined.add(what, node)
        try:
            await self._joined.save(node, certificate)
        except errors.UnavailableError:
            token.uses_left += 1
            self._joined.add(before, node) if before else self._joined.forget(node)
            raise
        if not token.uses_left:
            self._tokens.pop(token.id, None)

    def _valid(self) -> dict[str, _JoinToken]:
        now = self._clock.now()
        self._tokens = {key: token for key, token in self._tokens.items() if token.expires > now}
        return {key: token for key, token in self._tokens.items() if token.uses_left > 0}

    def _message(self, token: _JoinToken) -> api.JoinToken:
        left = timedelta(seconds=token.expires - self._clock.now())
        return api.JoinToken(
            name=f"joinTokens/{token.id}",
            role=options_pb2.Role.Value(f"ROLE_{token.role.name}"),
            node=node_name(token.node) if token.node else "",
            uses_left=token.uses_left,
            expire_time=to_timestamp(self._clock.wall() + left),
            kind=token.kind,
        )


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
        signer, name, role = must(self._signer), request.name, request.role or Role.VIEWER
        if (before := self._repeats.find(request)) is not None:
            return before
        if self._tokens is None or not self._tokens.takes_logins:
            message = "the fleet does not accept logins: its tokens file needs the table [logins]"
            raise errors.FailedPreconditionError(message, reason="NO_LOGINS")
        if role not in {Role.VIEWER, Role.OPERATOR, Role.ADMIN}:
            raise errors.InvalidArgumentError("role must be viewer, operator or admin", field="role")
        node = self._nodes.is_known(name) or name in self._joined
        if name in RESERVED_NAMES or node or signer.is_taken(name):
            raise errors.PermissionDeniedError(
                f"{name} is the name of a service, a node or another caller", reason="NAME_TAKEN"
            )
        if len(self._valid()) >= MOST_SECRETS:
            raise errors.ResourceExhaustedError(
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
            raise errors.UnauthenticatedError(
                "the code is unknown, used or expired", reason="LOGIN_CODE_INVALID"
            )
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


class CertificateServicer(api.CertificateServiceServicer):
    """Renews the certificates of callers."""

    def __init__(self, signer: "Signer | None", joined: Joined) -> None:
        self._signer = signer
        self._joined = joined

    async def RenewCertificate(
        self, request: api.RenewCertificateRequest, context: Context
    ) -> api.RenewCertificateResponse:
        principal = current_principal()
        shown = next(iter((context.auth_context() or {}).get("x509_pem_cert", ())), None)
        identity = f"/gpuscale/{principal.role.name.lower()}/{principal.name}"
        if shown is not None:
            from cryptography import x509

            from gpuscale.common.security.certificate_authority import CertificateSubject, subject_of

            signer, old = must(self._signer), x509.load_pem_x509_certificate(shown)
            subject = subject_of(old)
            if subject.uri.endswith(identity):
                joined = self._joined.what(principal.name) == principal.role.name.lower()
                if not signer.has_signed(old) or not (joined or principal.role is Role.AGENT):
                    raise errors.PermissionDeniedError(
                        "only agents and hosts that joined can renew certificates of this authority",
                        reason="NOT_RENEWABLE",
                    )
                signed = signer.sign(request.csr, CertificateSubject(subject.name, uri=subject.uri))
                await self._joined.save(principal.name, signed)
                new = x509.load_pem_x509_certificate(signed.encode("ascii"))
                serials = {"old": f"{old.serial_number:x}", "new": f"{new.serial_number:x}"}
                _log.info("a certificate is renewed", caller=identity.removeprefix("/gpuscale/"), **serials)
                return api.RenewCertificateResponse(certificate_pem=signed, authority_pem=signer.bundle)
        raise errors.PermissionDeniedError(
            "a caller can only renew the certificate that it presents to the fleet itself",
            reason="NO_CERTIFICATE",
        )


class ServicesHostServicer(internal.ServicesHostServiceServicer):
    """Sends the files of the first services host to those that joined."""

    def __init__(self, signer: "Signer | None", joined: Joined) -> None:
        self._signer = signer
        self._joined = joined

    async def FollowFiles(
        self, request: internal.FollowFilesRequest, context: Context
    ) -> AsyncGenerator[internal.FollowFilesResponse, None]:
        """Send certificates if asked for, then the files and each change of them."""
        from cryptography import x509

        from gpuscale.common.security.certificate_authority import subject_of

        signer, name = must(self._signer), current_principal().via
        shown = next(iter((context.auth_context() or {}).get("x509_pem_cert", ())), None)
        old = None if shown is None else x509.load_pem_x509_certificate(shown)
        what, hosts = self._joined.what(name), () if old is None else subject_of(old).hosts
        own = old is not None and subject_of(old).uri == signer.identity("gateway", name)
        if what not in {"standby", "gateway"} or not (own and hosts and old and signer.has_signed(old)):
            message = "only the gateway of a services host that joined can follow the files"
            raise errors.PermissionDeniedError(message, reason="NOT_RENEWABLE")
        answer, told = api.JoinResponse(), tuple[str, ...]()
        if request.csr:
            answer = _signed(signer, what, name, hosts, request.csr)
            await self._joined.save(name, answer.certificate_pem)
            _log.info("the certificates of a host of services are renewed", node=name)
        for _ in range(LOOKS):
            found = (signer.bundle, *await asyncio.to_thread(signer.shared_files))
            if found != told:
                answer.authority_pem, answer.tokens, answer.revoked = told = found
                yield internal.FollowFilesResponse(files=answer)
                answer = api.JoinResponse()
            await asyncio.sleep(LOOK_PERIOD)


def _signed(
    signer: "Signer", what: str, name: str, hosts: Sequence[str], csr: bytes, days: float | None = None
) -> api.JoinResponse:
    from gpuscale.common.security.certificate_authority import CertificateSubject

    uris = [signer.identity("gateway", name)]
    if what == "standby":
        uris.append(signer.identity("operator", "services"))
    found = [signer.sign(csr, CertificateSubject(hosts[0], tuple(hosts), uri), days) for uri in uris]
    return api.JoinResponse(
        certificate_pem=found[-1],
        gateway_certificate_pem=found[0] if found[1:] else "",
        authority_pem=signer.bundle,
    )


def must(signer: "Signer | None") -> "Signer":
    """The signer. FailedPreconditionError (NO_AUTHORITY) without one."""
    if signer is None:
        message = "this fleet cannot sign certificates: set authority_dir"
        raise errors.FailedPreconditionError(message, reason="NO_AUTHORITY")
    return signer
