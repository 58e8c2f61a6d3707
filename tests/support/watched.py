"""A resource that is watched, and a reader of it: messages of the contract's shape that belong to no service."""

from collections.abc import AsyncGenerator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TEXT, _BOOL, _MESSAGE = 9, 8, 11
_SHAPE = {
    "Thing": [("name", _TEXT, False), ("team", _TEXT, False)],
    "WatchThingsRequest": [("filter", _TEXT, False), ("resume_token", _TEXT, False)],
    "WatchThingsResponse": [
        ("things", _MESSAGE, True), ("full", _BOOL, False), ("removed", _TEXT, True),
        ("resume_token", _TEXT, False), ("reset", _BOOL, False),
    ],
}  # fmt: skip


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="watched_things.proto", package="watched", syntax="proto3")
    for name, fields in _SHAPE.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            type_name = ".watched.Thing" if kind == _MESSAGE else None
            message.field.add(
                name=field, number=number, type=kind, label=3 if repeated else 1, type_name=type_name
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"watched.{name}") for name in _SHAPE}
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


_MADE = _messages()
Thing = _MADE["Thing"]
WatchThingsRequest = _MADE["WatchThingsRequest"]
WatchThingsResponse = _MADE["WatchThingsResponse"]


class WatchReader:
    """What one reader makes of a stream, as the contract tells it to: `has` is what it believes there is, by name."""

    def __init__(self) -> None:
        self.has: dict[str, Any] = {}
        self.token = ""
        self.resets = 0
        self._new: set[str] | None = None

    def take(self, raw: bytes) -> Any:
        """Take a response; returns it."""
        message = WatchThingsResponse.FromString(raw)
        if message.reset:
            self.resets += 1
            self._new = set()
        for thing in message.things:
            self.has[thing.name] = thing
            if self._new is not None:
                self._new.add(thing.name)
        for name in message.removed:
            self.has.pop(name, None)
        if message.full and self._new is not None:
            self.has = {name: thing for name, thing in self.has.items() if name in self._new}
            self._new = None
        self.token = message.resume_token or self.token
        return message

    async def follow(self, stream: AsyncGenerator[bytes]) -> None:
        """Take the first round."""
        while not self.take(await anext(stream)).full:
            pass
