"""Locations of brokers: from the configuration file and the environment, never from the API.

    [brokers.default]
    amqp_url = "amqp://user:password@host:5672/"        or  amqp_url_file = "PATH"
    management_url = "http://user:password@host:15672"  or  management_url_file = "PATH"

The management API is optional. GPUSCALE_BROKER_<NAME>_AMQP_URL and GPUSCALE_BROKER_<NAME>_MANAGEMENT_URL define or override the
broker <name>, in lower case; with _FILE at their end they name files that hold the URLs.
"""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from gpuscale.autoscaler.domain.signals import QueueFailure
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import is_id
from gpuscale.common.runtime.tasks import Backoff
from gpuscale.common.secrets import SecretUrl, read_secret

_VARIABLE = re.compile(r"GPUSCALE_BROKER_(?P<name>.+)_(?P<url>(AMQP|MANAGEMENT)_URL(_FILE)?)")
_PREFIX = "GPUSCALE_BROKER_"
_ROOT_PATHS = frozenset({"", "/", "/%2F", "/%2f"})


class BrokerSettings(BaseModel):
    """A table [brokers.NAME] of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    amqp_url: SecretUrl | None = None
    """amqp:// or amqps:// with user and password, without a virtual host: watchers name theirs."""
    amqp_url_file: Path | None = None
    """File that holds the URL, instead."""
    management_url: SecretUrl | None = None
    """http:// or https:// of the management API; without it, unacknowledged messages are unknown."""
    management_url_file: Path | None = None
    """File that holds the URL, instead."""
    ca_file: Path | None = None
    """CA certificates for amqps:// and https://, instead of the system's."""

    @model_validator(mode="after")
    def _one_source_each(self) -> Self:
        for name in ("amqp_url", "management_url"):
            if getattr(self, name) and getattr(self, f"{name}_file"):
                raise ValueError(f"{name} and {name}_file exclude each other")
        return self


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker with everything needed to reach it."""

    name: str  # its name in the API
    amqp: SecretUrl  # amqp:// or amqps:// URL
    # http:// or https:// URL of its management API; None without one
    management: SecretUrl | None = None
    # for amqps:// and https://; None if neither is used
    tls: ssl.SSLContext | None = None


class VirtualHostError(Exception):
    """No queue of a virtual host can be read by one of the two ways (AMQP, management API)."""

    def __init__(self, failure: QueueFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RetryGate:
    """Blocks a failing way to a broker for a wait with jitter that grows to 5 s, by any clock that does not go back."""

    def __init__(self) -> None:
        self._backoff = Backoff(initial=0.5, cap=5.0)
        self._failure: QueueFailure | None = None
        self._retry_at = 0.0

    def check(self, now: float) -> None:
        """Pass, or fail like the last attempt. Raises VirtualHostError if it is too early to retry."""
        if self._failure is not None and now < self._retry_at:
            raise VirtualHostError(self._failure)

    def failed(self, failure: QueueFailure, now: float) -> None:
        """The attempt failed."""
        self._failure = failure
        self._retry_at = now + self._backoff.next()

    def succeeded(self) -> None:
        """The attempt succeeded; the next failure starts with a short wait."""
        self._failure = None
        self._backoff.reset()


def resolve(brokers: Mapping[str, BrokerSettings], environment: Mapping[str, str]) -> dict[str, Broker]:
    """The brokers by name, with every URL looked up and checked; errors never show a URL's content."""
    overrides: dict[str, dict[str, str]] = {}  # names of variables, by broker and kind of URL
    for variable in environment:
        if not variable.startswith(_PREFIX):
            continue
        matched = _VARIABLE.fullmatch(variable)
        name = matched["name"].lower() if matched else ""
        if matched is None or not is_id(name):
            raise _unusable(
                f"the environment variable {variable} is not one that gpuscale knows: write {_PREFIX}<NAME>_AMQP_URL"
                " or MANAGEMENT_URL, with _FILE at the end for a file"
            )
        overrides.setdefault(name, {})[matched["url"]] = variable
    found: dict[str, Broker] = {}
    for name in sorted(brokers.keys() | overrides.keys()):
        if not is_id(name):
            raise _unusable(f"{name!r} cannot be the name of a broker: it must be an id")
        where, settings, own = f"broker {name}", brokers.get(name, BrokerSettings()), overrides.get(name, {})
        amqp = _url(where, "AMQP_URL", settings.amqp_url or settings.amqp_url_file, own, environment)
        if amqp is None:
            raise _unusable(f"{where} has neither amqp_url nor amqp_url_file")
        told = settings.management_url or settings.management_url_file
        management = _url(where, "MANAGEMENT_URL", told, own, environment)
        _check(f"amqp_url of {where}", amqp, ("amqp", "amqps"))
        if amqp.path not in _ROOT_PATHS:
            raise _unusable(f"amqp_url of {where} must not name a virtual host: each watcher names its own")
        if management is not None:
            _check(f"management_url of {where}", management, ("http", "https"))
        tls: ssl.SSLContext | None = None
        if {"amqps", "https"} & {amqp.scheme, management.scheme if management else ""}:
            try:
                tls = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:  # ssl.SSLError is one
                text = f"{where}: cannot use the certificates in {settings.ca_file}: {error.strerror}"
                raise _unusable(text) from None
        found[name] = Broker(name, amqp, management, tls)
    return found


def _url(
    where: str,
    kind: str,
    told: SecretUrl | Path | None,
    overrides: Mapping[str, str],
    environment: Mapping[str, str],
) -> SecretUrl | None:
    """A URL from the environment, or else as `told` by the settings, which may name its file."""
    variable, of_file = overrides.get(kind), overrides.get(f"{kind}_FILE")
    if variable and of_file:
        raise _unusable(f"the environment variables {variable} and {of_file} exclude each other")
    found = Path(environment[of_file]) if of_file else told
    if variable:
        text = environment[variable]
    elif isinstance(found, Path):
        try:
            text = read_secret(found, "its URL from")
        except ValueError as error:
            raise _unusable(f"{where}: {error}") from None
    else:
        return found
    try:
        return SecretUrl(text)
    except ValueError as error:
        raise _unusable(f"{where}: the URL in {variable or found} {error}") from None


def _check(what: str, url: SecretUrl, schemes: tuple[str, ...]) -> None:
    if url.scheme not in schemes:
        raise _unusable(f"{what} must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    if not url.username.get_secret_value():
        raise _unusable(f"{what} must hold a user and a password")
    if "?" in url.reveal() or "#" in url.reveal():
        raise _unusable(f"{what} must end with its host, port and path")


def _unusable(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, reason="BROKER_CONFIGURATION")
