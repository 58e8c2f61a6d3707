"""The kinds of resources under all their names, and what can be read off a command line before it is parsed.

`endpoints`, `endpoint` and `ep` are one kind, and a resource name says its own: `delete endpoints/jobs` is
`delete endpoint endpoints/jobs`. Pure.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple


class Noun(NamedTuple):
    """The names of one kind of resource."""

    plural: str
    singular: str
    short: str
    other: str = ""


NOUNS = (
    Noun("nodes", "node", "no"),
    Noun("gpus", "gpu", "gpu"),
    Noun("reservations", "reservation", "rsv", "res"),
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
    found = next((one for one in _BY_NAME.get(collection, ()) if one in known), None)
    return [typed, *rest] if found is None else [found, *name, *rest]


def is_field(words: Sequence[str]) -> bool:
    """Whether the words behind `explain` ask about the contract: a path of fields, or a kind and no name."""
    if not words or words[0].startswith("-") or "/" in words[0]:
        return False
    first = words[0]
    return "." in first or first[:1].isupper() or (len(words) == 1 and first in _BY_NAME)


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
