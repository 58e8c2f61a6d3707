"""Values of enums that only a later agent or adapter knows: each field in which one may say something, found by descriptor."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from gpuscale.common.rpc.validation import forget_unknown, violations
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.internal.monitor import v1 as monitor_internal

LATER = 99


def enums(kind: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """Each field of an enum below a message, once."""
    if kind.full_name not in seen:
        seen.add(kind.full_name)
        for field in kind.fields:
            if field.enum_type is not None:
                yield field
            elif field.message_type is not None:
                yield from enums(field.message_type, seen)


STREAMS = (monitor_internal.StreamTelemetryRequest.DESCRIPTOR, autoscaler_internal.ConnectRequest.DESCRIPTOR)
FIELDS = [field for stream in STREAMS for field in enums(stream, set())]


def test_fields_are_found() -> None:
    assert {field.name for field in FIELDS} >= {"state", "recovery_action", "status"}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.full_name)
def test_a_value_that_is_not_known_is_another_or_not_stated(field: FieldDescriptor) -> None:
    """Never one that says that all is well; what people say is refused."""
    message = GetMessageClass(field.containing_type)()
    setattr(message, field.name, [LATER] if field.is_repeated else LATER)
    assert any(f"value of {field.enum_type.name}" in one.description for one in violations(message))
    forget_unknown(message)
    found = getattr(message, field.name)
    for number in found if field.is_repeated else [found]:
        assert field.enum_type.values_by_number[number].name.endswith(("_OTHER", "_UNSPECIFIED"))
