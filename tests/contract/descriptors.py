"""The contract, read from its descriptors: every RPC, requests that are right, and requests that are wrong in one field."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf import descriptor, descriptor_pool, message_factory, symbol_database
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gpuscale.common.rpc.validation import FieldRules, rules_of
from gpuscale.common.wire import KEDA

PROTOS = Path(__file__).resolve().parents[2] / "protos"
ANNOTATIONS = PROTOS / "gpuscale" / "api" / "types" / "v1" / "rules.proto"
"""Which no other program needs than those that enforce them."""
Field = descriptor.FieldDescriptor
INTEGERS = {Field.CPPTYPE_INT32, Field.CPPTYPE_INT64}
FLOATS = {Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT}
STATUS_NAMES = (
    "INVALID_ARGUMENT|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED"
    "|OUT_OF_RANGE|UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED"
)
MAPS = {"gpuscale.api.keda.v1.ScaledObjectRef.scalerMetadata": {"endpoint": "no-such-thing"}}
"""What stands in maps that must be set: their keys are words that no rule tells."""


@dataclass(frozen=True)
class Rpc:
    path: str
    method: descriptor.MethodDescriptor
    documented: frozenset[str]  # statuses that its comment names

    @property
    def request_class(self) -> type[Message]:
        return message_factory.GetMessageClass(self.method.input_type)

    @property
    def client_streaming(self) -> bool:
        return bool(self.method.client_streaming)

    @property
    def server_streaming(self) -> bool:
        return bool(self.method.server_streaming)


@cache
def rpcs() -> tuple[Rpc, ...]:
    """Every RPC that any .proto file of ours declares."""
    pool = descriptor_pool.Default()
    found = []
    for path in sorted(set(PROTOS.rglob("*.proto")) - {ANNOTATIONS}):
        name = path.relative_to(PROTOS)
        import_module(".".join(name.with_suffix("").parts) + "_pb2")
        file = pool.FindFileByName(str(name))
        text = path.read_text(encoding="utf-8")
        for service in file.services_by_name.values():
            for method in service.methods:
                comment = re.search(rf"((?:^ *//.*\n)+) *rpc {method.name}\(", text, re.MULTILINE)
                named = re.findall(STATUS_NAMES, comment.group(1)) if comment else []
                full = f"/{service.full_name}/{method.name}".replace(KEDA[1], KEDA[0])
                found.append(Rpc(full, method, frozenset(named)))
    return tuple(found)


NAMES = {
    "gpuscale.api.allocator.v1.GetCordonRequest.name": "nodes/no-such-thing/cordon",
    "gpuscale.api.allocator.v1.GetQuotaRequest.name": "quotas/no-such-thing",
}
"""Names that are of two patterns, or do not end with an id."""


def right_text(field: descriptor.FieldDescriptor) -> str:
    """A text that keeps the field's rules and names nothing that exists."""
    rules = rules_of(field)
    if field.full_name in NAMES:
        return NAMES[field.full_name]
    if rules.resource:
        return re.sub(r"\{\w+\}", "no-such-thing", rules.resource)
    if field.full_name.endswith(".GetMetricRequest.name"):  # of two kinds of resources
        return "endpoints/no-such-thing"
    if rules.format == "uuid":
        return str(uuid.uuid4())
    return "contract-test"


def right_number(rules: FieldRules) -> int:
    """A number that keeps the rules."""
    least = rules.min if rules.min is not None else rules.above + 1 if rules.above is not None else 1
    return max(1, int(least + 0.999))


def right(kind: type[Message]) -> Any:
    """The smallest request that keeps all rules: required fields, and the first choice of each oneof."""
    message: Any = kind()
    chosen = {oneof.fields[0].name for oneof in kind.DESCRIPTOR.oneofs if not oneof.name.startswith("_")}
    for field in kind.DESCRIPTOR.fields:
        rules = rules_of(field)
        needed = rules.required or field.name in chosen
        if not needed and not (field.cpp_type in INTEGERS and right_number(rules) > 1):
            bounded = rules.min is not None and rules.min > 0
            if not bounded or field.is_repeated or field.message_type:
                continue
        fill(message, field)
    return message


def fill(message: Any, field: descriptor.FieldDescriptor) -> None:
    """Set one field of a message to something that keeps its rules."""
    rules = rules_of(field)
    if field.full_name in MAPS:
        getattr(message, field.name).update(MAPS[field.full_name])
    elif field.message_type is Duration.DESCRIPTOR:
        getattr(message, field.name).FromSeconds(right_number(rules))
    elif field.message_type:
        value = getattr(message, field.name)
        target = value.add() if field.is_repeated else value
        target.CopyFrom(right(symbol_database.Default().GetSymbol(field.message_type.full_name)))
    elif field.is_repeated and field.cpp_type == Field.CPPTYPE_STRING:
        getattr(message, field.name).append(right_text(field))
    elif field.cpp_type == Field.CPPTYPE_STRING:
        setattr(message, field.name, right_text(field))
    elif field.cpp_type == Field.CPPTYPE_ENUM:
        setattr(message, field.name, field.enum_type.values[1].number)
    elif field.cpp_type in INTEGERS | FLOATS:
        setattr(message, field.name, right_number(rules))


def wrong(kind: type[Message]) -> Iterator[tuple[str, str, Any]]:
    """Requests that break one rule each: (field path, what is wrong, request)."""
    yield from _wrong_below(kind, kind.DESCRIPTOR, ())


def _wrong_below(
    kind: type[Message], of: descriptor.Descriptor, path: tuple[str, ...]
) -> Iterator[tuple[str, str, Any]]:
    for field in of.fields:
        where = ".".join((*path, field.name))
        if field.is_repeated and field.cpp_type != Field.CPPTYPE_ENUM:
            continue
        for what, value in wrong_values(field):
            request = right(kind)
            parent = request
            for name in path:
                parent = getattr(parent, name)
            if field.is_repeated:  # where 0 does not mean unset
                for item in (value, 0):
                    getattr(parent, field.name)[:] = [item]
                    yield f"{where}[0]", f"{item} in a list", request
                continue
            if value is None:
                parent.ClearField(field.name)
            elif field.message_type:
                getattr(parent, field.name).CopyFrom(value)
            else:
                setattr(parent, field.name, value)
            yield where, what, request
        ours = field.message_type and field.message_type.full_name.startswith("gpuscale.")
        if ours and len(path) < 4:
            yield from _wrong_below(kind, field.message_type, (*path, field.name))


def wrong_values(field: descriptor.FieldDescriptor) -> Iterator[tuple[str, Any]]:
    """Values that break a rule of the field, or one of the defaults; None stands for "not set"."""
    rules = rules_of(field)
    if rules.required:
        yield "missing", None
    if field.type == Field.TYPE_STRING:
        yield from _wrong_texts(rules)
    elif field.cpp_type == Field.CPPTYPE_ENUM:
        yield "undefined value", 9999
    elif field.message_type is Duration.DESCRIPTOR:
        yield "nanos of another sign", Duration(seconds=1, nanos=-5)
        yield "out of range", Duration(seconds=400_000_000_000)
        yield from ((what, Duration(seconds=value)) for what, value in _wrong_numbers(rules))
    elif field.cpp_type in INTEGERS:
        yield from _wrong_numbers(rules)
    elif field.cpp_type in FLOATS:
        yield from _wrong_numbers(rules)
        yield "not a number", float("nan")
        yield "infinite", float("inf")


def _wrong_texts(rules: FieldRules) -> Iterator[tuple[str, str]]:
    yield "control character", "a\x00b"
    yield "too long", "a" * (max(1024, rules.max_length or 0) + 1)
    if rules.format == "uuid":
        yield "not a UUID", "12345"
    if rules.resource:
        yield "another pattern", "../" + rules.resource
        yield "a path", "a/b/c/d/e"


def _wrong_numbers(rules: FieldRules) -> Iterator[tuple[str, int]]:
    if rules.min is not None:
        yield "below min", math.ceil(rules.min) - 1
    if rules.above is not None:
        yield "not above", math.floor(rules.above)
    if rules.max is not None:
        yield "above max", math.floor(rules.max) + 1
