"""Between the values of the program and those of protobuf."""

import hashlib
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 1_000_000_000
_DAY = 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_duration(seconds: float) -> Duration:
    """A Duration of that many seconds, rounded to nanoseconds."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * _NANOS))
    return duration


def seconds(duration: Duration) -> float:
    """The seconds of a Duration."""
    return duration.seconds + duration.nanos / _NANOS


def optional_seconds(message: Message, field: str) -> float | None:
    """The seconds of the Duration in `field`; None if the message does not set it.

    Raises:
        TypeError: the field is not a Duration.
    """
    if not message.HasField(field):
        return None
    value: object = getattr(message, field)
    if not isinstance(value, Duration):
        raise TypeError(f"{field} is not a Duration")
    return seconds(value)


def to_timestamp(date: datetime) -> Timestamp:
    """The Timestamp of an aware date; ValueError for a date without a time zone."""
    timestamp = Timestamp()
    put_timestamp(timestamp, date)
    return timestamp


def put_timestamp(timestamp: Timestamp, date: datetime) -> None:
    """Set a Timestamp, such as one that is part of a message; ValueError for a date without a time zone."""
    if date.tzinfo is None:
        raise ValueError("a Timestamp needs a date with a time zone")
    passed = date - _EPOCH  # by far cheaper than Timestamp.FromDatetime, which goes through a calendar
    timestamp.seconds, timestamp.nanos = passed.days * _DAY + passed.seconds, passed.microseconds * 1000


def to_datetime(timestamp: Timestamp) -> datetime:
    """The date of a Timestamp, in UTC."""
    return timestamp.ToDatetime(tzinfo=UTC)


def fingerprint(message: Message) -> str:
    """SHA-256, in hex, of the type and content of a message.

    Tells a repeated request from another one with the same request id. It holds within one build of the program:
    protobuf promises a stable serialization no further.
    """
    kind = message.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(kind + b"\0" + message.SerializeToString(deterministic=True)).hexdigest()
