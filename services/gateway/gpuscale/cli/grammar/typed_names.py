"""Names as they are typed: complete, as `endpoints/jobs/replicas/r1`, with any noun, as `ep/jobs`, or without one, as `jobs/r1`."""

import re
from collections.abc import Sequence

from gpuscale.cli.grammar.nouns import plural
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError

RECORDING = "recordings/{recording}"
_UUID = r"[A-Za-z]+-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"


def full_name(pattern: str, typed: str) -> str:
    """The complete resource name of what was typed.

    Raises:
        InvalidArgumentError: it cannot be a name of that pattern.
    """
    in_full = canonical(typed)
    if names.match(pattern, in_full) is not None:
        return in_full
    collections, ids = pattern.split("/")[::2], typed.split("/")
    name = "/".join(part for pair in zip(collections, ids, strict=False) for part in pair)
    if len(collections) != len(ids) or names.match(pattern, name) is None:
        short = "/".join(pattern.split("/")[1::2]).replace("{", "").replace("}", "").upper()
        raise InvalidArgumentError(f"{typed!r} is not a valid name; write {short} or {pattern}")
    return name


def canonical(typed: str) -> str:
    """A name with its nouns in the plural: `endpoints/jobs` of `ep/jobs`; unchanged without a noun in front."""
    parts = typed.split("/")
    if len(parts) % 2:
        return typed
    return "/".join(part if index % 2 else plural(part) for index, part in enumerate(parts))


def without_noun(typed: Sequence[str], *nouns: str) -> tuple[str, list[str]]:
    """(the noun in front of the names, empty where there is none; the names): `node host-1` and `host-1` are the same.

    Args:
        typed: the noun, if any, and names.
        nouns: the plurals of those that may stand there.
    """
    noun = plural(typed[0]) if len(typed) > 1 else ""
    return (noun, list(typed[1:])) if noun in nouns else ("", list(typed))


def is_uuid(typed: str) -> bool:
    """Whether a text looks like the UUID of a GPU, such as GPU-6afcb721-67c0-5d87-a657-b17ffccbb12a."""
    return re.fullmatch(_UUID, typed) is not None
