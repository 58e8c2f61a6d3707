"""A small OIDC provider on loopback: discovery, keys, device flow, refresh and revocation, by an HTTP server of its own."""

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

CLIENT = "gpuscale-cli"


@dataclass
class OidcProvider:
    """What the provider knows.

    Attributes:
        agreed: whether somebody has agreed to the device's login; False for a refusal, None for not yet.
        claims: beside issuer, audience and times, what its tokens say.
        asked: the paths that were asked for.
        gate: what answers to requests for tokens wait for.
    """

    issuer: str
    agreed: bool | None = None
    claims: dict[str, Any] = field(default_factory=lambda: {"sub": "u1", "groups": ["ml"]})
    lives: float = 3600.0
    echoes: bool = True
    answers: bool = True
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list[str])
    forms: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])

    def __post_init__(self) -> None:
        self.keys: list[RSAKey | ECKey] = []
        self.refresh = ""
        self.nonce = ""
        self.gate.set()
        self.rotate()

    def rotate(self, kind: type[RSAKey] | type[ECKey] = RSAKey) -> None:
        """Sign with a new key, and withdraw the old one."""
        parameters = {"kid": secrets.token_hex(4), "use": "sig"}
        rsa = kind is RSAKey
        made = RSAKey.generate_key(2048, parameters) if rsa else ECKey.generate_key("P-256", parameters)
        self.keys = [made]

    def token(self, *, algorithm: str = "RS256", key: Any = None, header: Any = None, **claims: Any) -> str:
        """A token; a claim of None is left out."""
        now = int(time.time())
        says = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + int(self.lives)}
        says |= {"jti": secrets.token_hex(4)} | self.claims | claims
        head = {"alg": algorithm, "kid": str(self.keys[0].kid), **(header or {})}
        says = {name: value for name, value in says.items() if value is not None}
        return jwt.encode(head, says, key or self.keys[0], algorithms=[algorithm])

    def answer(self, path: str, form: Mapping[str, str]) -> tuple[int, object]:
        if path == "/.well-known/openid-configuration":
            names = {"jwks_uri": "keys", "token_endpoint": "token", "revocation_endpoint": "revoke"}
            names["device_authorization_endpoint"] = "device"
            found = {key: f"{self.issuer}/{name}" for key, name in names.items()}
            return 200, {"issuer": self.issuer} | found
        if path == "/keys":
            return 200, {"keys": [one.as_dict(private=False) for one in self.keys]}
        if path == "/device" and form["client_id"] == CLIENT:
            self.nonce = form["nonce"]
            page = {"verification_uri": f"{self.issuer}/activate", "user_code": "WDJB-MJHT"}
            return 200, {"device_code": "d1", "expires_in": 30, "interval": 0.2, **page}
        if path == "/token":
            self.gate.wait(60)
            return self._token(form)
        return (200, {}) if path == "/revoke" else (404, {"error": "not_found"})

    def _token(self, form: Mapping[str, str]) -> tuple[int, object]:
        echoed = {"nonce": self.nonce} if self.echoes else {}
        if form["grant_type"] == "refresh_token":
            if not self.refresh or form["refresh_token"] != self.refresh:
                return 400, {"error": "invalid_grant"}
        elif form["device_code"] != "d1" or self.agreed is not True:
            return 400, {"error": "access_denied" if self.agreed is False else "authorization_pending"}
        self.refresh = secrets.token_hex(8)  # each is good once
        return 200, {"id_token": self.token(**echoed), "refresh_token": self.refresh, "token_type": "Bearer"}


@contextmanager
def oidc_provider() -> Iterator[OidcProvider]:
    """A provider that answers until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            self._reply({key: values[0] for key, values in parse_qs(body).items()})

        def _reply(self, form: Mapping[str, str]) -> None:
            provider.asked.append(self.path)
            provider.forms.append(form)
            status, found = provider.answer(self.path, form) if provider.answers else (503, [])
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = OidcProvider(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
