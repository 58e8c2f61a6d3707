"""The kinds of resources under all their names, and what can be read off a command line before it is parsed.

`endpoints`, `endpoint` and `ep` are one kind, and a resource name says its own: `delete endpoints/jobs` is
`delete endpoint endpoints/jobs`. Names are typed complete, as `endpoints/jobs/replicas/r1`, with any noun, as `ep/jobs`, or without
one, as `jobs/r1`. Pure.
"""

import re
from collections.abc import Container, Sequence
from typing import NamedTuple

from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError


class Noun(NamedTuple):
    """The names of one kind of resource."""

    plural: str
    singular: str
    short: str
    other: str = ""


NOUNS = (
    Noun("nodes", "node", "no"),
    Noun("gpus", "gpu", "gpu"),
    Noun("processes", "process", "ps"),
    Noun("reservations", "reservation", "rsv", "res"),
    Noun("jobs", "job", "job"),
    Noun("endpoints", "endpoint", "ep"),
    Noun("replicas", "replica", "rep"),
    Noun("rules", "rule", "rule"),
    Noun("watchers", "watcher", "qw"),
    Noun("decisions", "decision", "dec"),
    Noun("adapters", "adapter", "ad"),
    Noun("recordings", "recording", "rec"),
    Noun("cordons", "cordon", "cor"),
    Noun("metrics", "metric", "met"),
    Noun("quotas", "quota", "quo"),
    Noun("bookings", "booking", "bk"),
    Noun("backtests", "backtest", "bt"),
    Noun("policies", "policy", "pol"),
    Noun("acts", "act", "policy-act", "policy-acts"),
    Noun("targets", "target", "nt", "notification-target"),
    Noun("budgets", "budget", "pb", "power-budget"),
    Noun("changes", "change", "power-change", "power-changes"),
    Noun("notifications", "notification", "msg"),
    Noun("healthEvents", "healthEvent", "health"),
)
_BY_NAME = {name: noun for noun in NOUNS for name in noun if name}


def plural(noun: str) -> str:
    """The plural of a noun under any of its names; other words unchanged."""
    return _BY_NAME[noun].plural if noun in _BY_NAME else noun


def with_noun(words: Sequence[str], known: Container[str]) -> list[str]:
    """The words behind a verb, beginning with the noun under the name that is `known`.

    `ep jobs` becomes `endpoints jobs`, and `endpoints/jobs` becomes `endpoints endpoints/jobs`; anything else is unchanged.
    """
    if not words:
        return []
    typed, *rest = words
    collection, *name = (typed.split("/")[-2], typed) if "/" in typed else (typed,)
    if names.cordoned(typed) != typed:
        collection = "cordons"
    found = next((one for one in _BY_NAME.get(collection, ()) if one in known), None)
    return [typed, *rest] if found is None else [found, *name, *rest]


def is_field(words: Sequence[str]) -> bool:
    """Whether the words behind `explain` ask about the contract: a path of fields, or a kind and no name."""
    if not words or words[0].startswith("-") or "/" in words[0]:
        return False
    first, others = words[0], [word for word in words[1:] if word != "--recursive"]
    return "." in first or first[:1].isupper() or (not others and first in _BY_NAME)


def format_of(arguments: Sequence[str]) -> str:
    """What `-o` asks for, found before the line is parsed so that parse errors can be JSON too; empty without it."""
    found = ""
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            break
        if argument in {"-o", "--output"}:
            found = next(left, "")
        elif argument.startswith("--output="):
            found = argument.removeprefix("--output=")
        elif argument.startswith("-o"):
            found = argument[2:].removeprefix("=")
    return found


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


def tenant_of(typed: str) -> str:
    """The tenant of what was typed: `vision` of `quotas/vision` or `quo/vision`."""
    return canonical(typed).removeprefix("quotas/")


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
