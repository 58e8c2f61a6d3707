"""Nodes with the fields alone that a reader asked for, as tables show them."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import InvalidArgumentError

Fields = dict[str, "Fields"]
"""The fields of a message that are asked for, and those of their messages; all of them where none is named."""


def fields_of(paths: list[str]) -> Fields:
    """The fields of a node that a mask names. Raises InvalidArgumentError: it has no such field."""
    wanted: Fields = {"name": {}}
    for path in sorted(paths):  # a whole message before the fields of it
        at: Fields | None = wanted  # None below what is wanted whole
        kind: Descriptor | None = api.Node.DESCRIPTOR
        for name in path.split("."):
            if kind is None or name not in kind.fields_by_name:
                raise InvalidArgumentError(f"a node has no field {path}", field="read_mask")
            kind = kind.fields_by_name[name].message_type
            if at is not None:
                at = None if at.get(name) == {} else at.setdefault(name, {})
    return wanted


def keep(message: Message, wanted: Fields) -> None:
    """Clear all other fields, and round numbers to what tables show: a message that looks as before has the same encoding."""
    for field, value in message.ListFields():
        below: Fields | None = wanted.get(field.name) if wanted else {}
        if below is None:
            message.ClearField(field.name)
        elif isinstance(value, float):
            setattr(message, field.name, round(value, 0 if value >= 10 else 2))
        elif isinstance(value, Duration):
            value.nanos = 0
        elif field.message_type is not None:
            for one in [value] if isinstance(value, Message) else value:
                if isinstance(one, Message):  # not the keys of a map
                    keep(one, below)
