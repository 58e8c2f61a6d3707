"""Prometheus servers: their locations (from the configuration, never from the API), and instant queries.

    [prometheus.main]
    url = "https://prometheus.example.org"       # http:// or https://, with a path where it has one
    token_file = "/etc/gpuscale/prometheus.token"
    allow_private = true                         # for servers on this host, or in a private network

Queries are limited in time and size. Each query resolves the server's name, checks every address, and connects to one that was
checked; redirects and proxies are not followed. Without a series a value is missing, and a series that is NaN is silent;
neither is zero.

An instant query finds samples of the last five minutes, and dates all of them now. So a query looks back no further than its
signal's max_age (`lookback_delta`; servers before 2.43 ignore it), and its `timestamp()` gives the age of the oldest sample if
the query is a selector: https://prometheus.io/docs/prometheus/latest/querying/api/#instant-queries
"""

import asyncio
import ipaddress
import math
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Literal, Self

import httpx
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator, model_validator

from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.autoscaler.signals.polling import NoAnswerError, PollAnswer
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.secrets import SecretUrl

TIMEOUT = 5.0
"""Seconds for a query, including name resolution."""
MAX_ANSWER_BYTES = 1024 * 1024
MAX_SERIES = 10_000
_CONNECTIONS = 4
_MAX_SHOWN = 200
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class InstantQuery:
    """A signal's query, and how many seconds it looks back."""

    text: str
    lookback: float


@dataclass(frozen=True, slots=True)
class InstantVector:
    """The values of a query's series; `age` of the oldest sample, in seconds, if known."""

    values: tuple[float, ...]
    age: float = 0.0


class PrometheusSettings(BaseModel):
    """A table [prometheus.NAME] of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: SecretUrl
    """http:// or https:// URL of the server; user and password in it are sent as basic authentication."""
    token_file: Path | None = None
    """File with the bearer token to send."""
    ca_file: Path | None = None
    """CA certificates for https://, instead of the system's."""
    allow_private: bool = False
    """Whether the server may have a private address or be on this host."""

    @field_validator("url")
    @classmethod
    def _http(cls, url: SecretUrl) -> SecretUrl:
        if url.scheme not in _PORTS or "?" in url.reveal() or "#" in url.reveal():
            raise ValueError("must begin with http:// or https:// and end with its host, port and path")
        return url

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if self.token_file is not None and self.url.username.get_secret_value():
            raise ValueError("token_file and a user in url exclude each other")
        return self


class _Vector(BaseModel):
    value: tuple[float, float]


class _VectorData(BaseModel):
    resultType: Literal["vector"]  # noqa: N815  (Prometheus's own spelling)
    result: list[_Vector]

    def pairs(self) -> list[tuple[float, float]]:
        return [one.value for one in self.result]


class _ScalarData(BaseModel):
    resultType: Literal["scalar"]  # noqa: N815
    result: tuple[float, float]

    def pairs(self) -> list[tuple[float, float]]:
        return [self.result]


class _Success(BaseModel):
    status: Literal["success"]
    data: _VectorData | _ScalarData


class _Failure(BaseModel):
    error: str


class PrometheusServer:
    """Queries to a server, over a few connections; its certificates and token must exist."""

    def __init__(self, name: str, settings: PrometheusSettings) -> None:
        self._name = name
        self._url = settings.url
        self._port = settings.url.port or _PORTS[settings.url.scheme]
        self._allow_private = settings.allow_private
        self._token = _token(name, settings.token_file)
        user = settings.url.username.get_secret_value()
        tls: ssl.SSLContext | None = None
        if settings.url.scheme == "https":
            try:
                tls = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:  # ssl.SSLError is one
                text = f"cannot use the certificates in {settings.ca_file}: {error.strerror}"
                raise _unusable(f"prometheus {name}: {text}") from None
        self._client = httpx.AsyncClient(
            auth=httpx.BasicAuth(user, settings.url.password.get_secret_value()) if user else None,
            verify=tls or False,  # there is always one if the URL is https://
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=_CONNECTIONS),
            follow_redirects=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def fetch(self, query: InstantQuery) -> InstantVector:
        """The values of an instant query, one per series, and their age; NoAnswerError if there are none."""
        try:
            async with asyncio.timeout(TIMEOUT):
                *others, last = await self._addresses()
                for address in others:  # `localhost` has two, and often nobody listens on the first
                    with suppress(httpx.ConnectError):
                        return await self._fetch(address, query)
                return await self._fetch(last, query)
        except (TimeoutError, httpx.TimeoutException):
            raise self._error(f"does not answer within {TIMEOUT:g} s") from None
        except httpx.RequestError as error:
            raise self._error(f"cannot be reached: {type(error).__name__}") from error

    async def _addresses(self) -> list[str]:
        """The addresses of the server, all of which are allowed."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._url.host, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError):  # the latter for invalid names
            raise self._error("has a name that cannot be resolved") from None
        addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
        if any(not _allowed(one, private=self._allow_private) for one in addresses):
            raise self._error("is at an address that is not allowed: allow_private is not set for it")
        return [str(one) for one in dict.fromkeys(addresses)]

    async def _fetch(self, address: str, query: InstantQuery) -> InstantVector:
        found = self._parsed(*await self._ask(address, query))
        values = tuple(value for _, value in found.pairs())
        if isinstance(found, _ScalarData):
            return InstantVector(values)
        dated = InstantQuery(f"min(timestamp(\n{query.text}\n))", query.lookback)
        status, body = await self._ask(address, dated)
        if status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
            return InstantVector(values)  # two series differ only in their names, which timestamp() drops
        at, sampled = self._parsed(status, body).pairs()[0]
        return InstantVector(values, max(0.0, at - sampled))

    async def _ask(self, address: str, query: InstantQuery) -> tuple[int, bytes]:
        """Status and body of the server's answer at exactly this address."""
        host = f"[{address}]" if ":" in address else address
        named = f"[{self._url.host}]" if ":" in self._url.host else self._url.host
        # Not compressed: a few bytes could expand to gigabytes before anybody counts them.
        headers = {"Host": f"{named}:{self._port}", "Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
        request = self._client.stream(
            "POST",
            f"{self._url.scheme}://{host}:{self._port}{self._url.path.rstrip('/')}/api/v1/query",
            data={"query": query.text, "timeout": f"{TIMEOUT:g}s", "lookback_delta": f"{query.lookback:g}"},
            headers=headers,
            extensions={"sni_hostname": self._url.host},
        )
        async with request as response:
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise self._error(f"answers with more than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(body)

    def _parsed(self, status: int, body: bytes) -> _VectorData | _ScalarData:
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise self._error("refuses the token, user or password")
        if httpx.codes.is_redirect(status):
            raise self._error("answers with a redirect, which is not followed")
        if status != HTTPStatus.OK:
            try:
                said = _Failure.model_validate_json(body).error
            except ValidationError:
                raise self._error(f"answers with HTTP status {status}") from None
            shown = "".join(one if one.isprintable() else " " for one in said[:_MAX_SHOWN])
            refused = status == HTTPStatus.BAD_REQUEST
            raise self._error(f"refuses the query: {shown}" if refused else f"failed: {shown}")
        try:
            data = _Success.model_validate_json(body).data
        except ValidationError:
            raise self._error("answers something that is neither a vector nor a scalar") from None
        count = len(data.pairs())
        if not count:
            raise self._error("finds no series for the query, or none that is recent enough")
        if count > MAX_SERIES:
            raise self._error(f"finds more than {MAX_SERIES} series for the query")
        return data

    def _error(self, what: str) -> NoAnswerError:
        return NoAnswerError(f"prometheus {self._name} {what}")


def prometheus_sample(answer: PollAnswer[InstantVector]) -> Sample:
    """The values of a query, dated by the oldest; no work is left if each is 0. A series that is NaN is silent."""
    found = answer.value
    if found is None or answer.at is None:
        return Sample(at=answer.at, problem=answer.problem)
    told = tuple(value for value in found.values if not math.isnan(value))
    silent = len(found.values) - len(told)
    if not told:  # invalid, which is not missing
        return Sample(found.values, answer.at - found.age)
    return Sample(told, answer.at - found.age, silent_count=silent, proven_empty=not silent and not any(told))


def _allowed(address: ipaddress.IPv4Address | ipaddress.IPv6Address, *, private: bool) -> bool:
    """Whether a server may have this address: never an unspecified, multicast or link-local one; with `private`, any other."""
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if inner is not None:
        return _allowed(inner, private=private)
    if address.is_unspecified or address.is_multicast or address.is_link_local:
        return False
    return address.is_global or private


def _token(name: str, path: Path | None) -> SecretStr | None:
    if path is None:
        return None
    try:
        return SecretStr(path.read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"prometheus {name}: cannot read {path}: {type(error).__name__}") from None


def _unusable(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, reason="PROMETHEUS_CONFIGURATION")
