"""Messages of the contract as data: the protobuf JSON mapping, and the name of a resource."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.message import Message


def to_dict(item: "Message") -> dict[str, object]:
    """The protobuf JSON mapping; a field that has no presence is there with its zero, an absent one is not."""
    from google.protobuf.json_format import MessageToDict

    data: dict[str, object] = MessageToDict(item, always_print_fields_with_no_presence=True)
    return data


def name_of(item: "Message") -> str:
    """The name of a resource; the tenant where it is named by that; empty where it has neither."""
    for field in ("name", "tenant"):
        value: object = getattr(item, field, "")
        if value:
            return str(value)
    return ""
