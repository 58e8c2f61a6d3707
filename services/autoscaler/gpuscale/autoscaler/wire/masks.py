"""Field masks, with the difference between what is unset and what is zero: protobuf's own merge writes a 0 for both."""

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from gpuscale.common.errors import InvalidArgumentError


def taken(mask: FieldMask, source: Message, target: Message, field: str) -> None:
    """Take what a mask names from `source` into `target`; what `source` does not set is cleared there.

    Raises:
        InvalidArgumentError: a path names no field, or goes through a list.
    """
    for path in mask.paths:
        _take(path.split("."), source, target, f"{field}: {path}")


def _take(parts: list[str], source: Message, target: Message, where: str) -> None:
    name, *rest = parts
    known = source.DESCRIPTOR.fields_by_name.get(name)
    if known is None or (rest and (known.message_type is None or known.is_repeated)):
        raise InvalidArgumentError(f"{where} is no field", field=where.partition(":")[0])
    if rest:
        _take(rest, getattr(source, name), getattr(target, name), where)
        return
    target.ClearField(name)
    if known.is_repeated:
        getattr(target, name).extend(getattr(source, name))
    elif known.message_type is not None:
        if source.HasField(name):
            getattr(target, name).CopyFrom(getattr(source, name))
    elif not known.has_presence or source.HasField(name):
        setattr(target, name, getattr(source, name))
