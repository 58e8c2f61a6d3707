"""Conversions between Python and protobuf: times, request fingerprints, list pages."""

import base64
import binascii
import hashlib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from typing import Any, Final, TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.common.errors import InvalidArgumentError, NotFoundError

_NANOS = 1_000_000_000
_DAY = 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
T = TypeVar("T")

KEDA: Final = ("externalscaler", "gpuscale.api.keda.v1")
"""KEDA's package name and ours: ours is served under KEDA's name, and one process may load both."""


@cache
def find_service(name: str) -> Any:
    """The descriptor of a service by its served name, importing its contract module; KeyError if unknown."""
    own = name.replace(*KEDA, 1)
    package, _, service = own.rpartition(".")
    if package.startswith(("gpuscale.api.", "gpuscale.internal.")):
        with suppress(ImportError, AttributeError):
            getattr(import_module(package), f"{service}Stub")
    return descriptor_pool.Default().FindServiceByName(own)


def find_method(path: str) -> Any:
    """The descriptor of a method by its path, `/package.Service/Method`; KeyError if unknown."""
    service, _, method = path.removeprefix("/").partition("/")
    return find_service(service).methods_by_name[method]


def to_duration(seconds: float) -> Duration:
    """Seconds as a Duration, rounded to nanoseconds."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * _NANOS))
    return duration


def seconds(duration: Duration) -> float:
    """A Duration in seconds."""
    return duration.seconds + duration.nanos / _NANOS


def optional_seconds(message: Message, field: str) -> float | None:
    """The Duration in `field` in seconds; None if unset, TypeError for another type."""
    if not message.HasField(field):
        return None
    value: object = getattr(message, field)
    if not isinstance(value, Duration):
        raise TypeError(f"{field} is not a Duration")
    return seconds(value)


def or_else(message: Message, field: str, default: T) -> T:
    """A field of a message, or its default."""
    value: T = getattr(message, field) if message.HasField(field) else default
    return value


def to_timestamp(date: datetime) -> Timestamp:
    """A date as a Timestamp; ValueError without a time zone."""
    timestamp = Timestamp()
    put_timestamp(timestamp, date)
    return timestamp


def optional_timestamp(date: datetime | None) -> Timestamp | None:
    """A date as a Timestamp; None for None."""
    return None if date is None else to_timestamp(date)


def put_timestamp(timestamp: Timestamp, date: datetime) -> None:
    """Set a Timestamp in place; ValueError for a date without a time zone."""
    if date.tzinfo is None:
        raise ValueError("a Timestamp needs a date with a time zone")
    passed = date - _EPOCH  # far cheaper than Timestamp.FromDatetime
    timestamp.seconds, timestamp.nanos = passed.days * _DAY + passed.seconds, passed.microseconds * 1000


def to_datetime(timestamp: Timestamp) -> datetime:
    """A Timestamp as a date in UTC."""
    return timestamp.ToDatetime(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A time range, both ends included; None for an open end."""

    since: datetime | None = None
    until: datetime | None = None

    def __bool__(self) -> bool:
        return self != ANY_TIME

    def meets(self, begin: datetime, end: datetime | None) -> bool:
        """Whether something that lasted from `begin` to `end` (None: still lasts) overlaps the range."""
        ended_before = self.since is not None and end is not None and end < self.since
        return not ended_before and (self.until is None or begin <= self.until)


ANY_TIME = TimeRange()


def asked_period(request: Message) -> TimeRange:
    """The range given by `since` and `until` of a request. Raises InvalidArgumentError if it ends before it begins."""
    fields: list[object] = [
        getattr(request, field) if request.HasField(field) else None for field in ("since", "until")
    ]
    since, until = (to_datetime(one) if isinstance(one, Timestamp) else None for one in fields)
    if since is not None and until is not None and until < since:
        raise InvalidArgumentError("until must not be before since", field="until")
    return TimeRange(since, until)


def fingerprint(message: Message, sent: bytes | None = None) -> str:
    """SHA-256, in hex, of the type and content of a message; or of what was `sent` of it.

    Tells a retry from another request with the same request id. Stable within one build of the program only, as
    protobuf's serialization is.
    """
    kind = message.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(kind + b"\0" + (sent or message.SerializeToString(deterministic=True))).hexdigest()


DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_CHECKSUM_BYTES = 6
_SEAL_LENGTH = 8


def page_limit(page_size: int) -> int:
    """The maximum number of items of a page. Raises InvalidArgumentError for a negative size."""
    if page_size < 0:
        raise InvalidArgumentError("page_size must not be negative", field="page_size")
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def last_key(page_token: str) -> str:
    """The key in a token of `to_token` ("" for ""); InvalidArgumentError for any other token."""
    if not page_token:
        return ""
    try:
        raw = base64.b64decode(page_token + "=" * (-len(page_token) % 4), altchars=b"-_", validate=True)
        last = raw[_CHECKSUM_BYTES:].decode()
    except (binascii.Error, ValueError):
        raise forged_token() from None
    if to_token(last) != page_token:
        raise forged_token()
    return last


def open_page(request: Any) -> str:
    """Check the seal of a request's page token and take it off; returns the seal for the next token.

    The seal is a digest of the request without its page, so a token works only with the same list and filters.

    Raises InvalidArgumentError: the seal does not match.
    """
    token, size = request.page_token, request.page_size
    request.page_token, request.page_size = "", 0
    seal = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()[:_SEAL_LENGTH]
    if token and token[-_SEAL_LENGTH:] != seal:
        raise InvalidArgumentError(
            "page_token is not of this list: repeat the filters of the first page", field="page_token"
        )
    request.page_token, request.page_size = token[:-_SEAL_LENGTH], size
    return seal


def to_token(last: str) -> str:
    """The page token for what follows the key `last`."""
    payload = last.encode()
    checksum = hashlib.sha256(b"page<" + payload).digest()[:_CHECKSUM_BYTES]
    return base64.urlsafe_b64encode(checksum + payload).decode().rstrip("=")


def forged_token() -> InvalidArgumentError:
    """The error for a page token that no page returned."""
    return InvalidArgumentError("page_token was not returned by this list", field="page_token")


@contextmanager
def absence_allowed(request: Any) -> Generator[None]:
    """Ignore NotFoundError in the block if the request sets allow_missing."""
    try:
        yield
    except NotFoundError:
        if not request.allow_missing:
            raise


def merge(source: Message, target: Message, mask: FieldMask) -> None:
    """Take what a valid mask names from `source`; cleared first, since `MergeMessage` passes over what lies in an unset message."""
    for path in mask.paths:
        above, inner = path.split("."), target
        for name in above[:-1]:
            if not inner.HasField(name):
                break
            inner = getattr(inner, name)
        else:
            inner.ClearField(above[-1])
    mask.MergeMessage(source, target, replace_message_field=True, replace_repeated_field=True)


def enum_word(message: Message, field: str) -> str:
    """The enum value of a field without its prefix, such as `ONLINE` for `NODE_STATE_ONLINE`.

    Empty if unspecified; the number for a value of a newer version.
    """
    enum = message.DESCRIPTOR.fields_by_name[field].enum_type
    value: object = getattr(message, field)
    if enum is None or not value:
        return ""
    found = enum.values_by_number.get(value) if isinstance(value, int) else None
    return found.name.removeprefix(enum.values[0].name.removesuffix("UNSPECIFIED")) if found else str(value)
