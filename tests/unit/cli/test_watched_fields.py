"""A watched table shows of the fields that it asks for what it would show of all."""

from typing import Any

import pytest
from google.protobuf.message import Message

from gpuscale.api.monitor.v1 import Node
from gpuscale.cli.views import monitor
from gpuscale.monitor.fleet.servicer import fields_of, keep


def fill(message: Message) -> None:
    """Set every field of it that is no map, and of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            fill(value.add() if hasattr(value, "add") else value)
        elif field.message_type is None and hasattr(value, "extend"):
            value.extend(["text"])
        elif field.message_type is None:
            kind = {str: "text", bool: True, float: 12.0, int: 1}[type(value)]
            setattr(message, field.name, kind)


@pytest.mark.parametrize("noun", ["nodes", "gpus"])
def test_every_column_is_filled_from_the_fields_that_are_asked_for(noun: str) -> None:
    whole = Node()
    fill(whole)
    masked = Node()
    masked.CopyFrom(whole)
    keep(masked, fields_of([*(monitor.NODE_FIELDS if noun == "nodes" else monitor.GPU_FIELDS)]))
    assert masked.ByteSize() < whole.ByteSize() / 2
    view: Any = monitor.nodes() if noun == "nodes" else monitor.gpus({})
    items = [node if noun == "nodes" else node.snapshot.gpus[0] for node in (whole, masked)]
    shown = [[column.cell(one) for column in view.columns] for one in items]
    assert shown[0] == shown[1]
