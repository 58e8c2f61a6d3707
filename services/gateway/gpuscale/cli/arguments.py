"""What people may type, put into the one order and the names that the commands know.

    gpuscalectl get ep jobs -o json      ->  gpuscalectl -o json get endpoints jobs
    gpuscalectl delete endpoints/jobs    ->  gpuscalectl delete endpoint endpoints/jobs

Global options may stand anywhere before `--`; nouns have a plural, a singular and a short name; a resource name says
its noun. Pure: argument list in, argument list out.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

GLOBAL_OPTIONS: Mapping[str, bool] = {
    "--address": True,
    "--token-file": True,
    "--request-timeout": True,
    "--ca-file": True,
    "--cert-file": True,
    "--key-file": True,
    "--output": True,
    "-o": True,
    "--no-headers": False,
}
"""Each global option, and whether a value follows it."""


class Noun(NamedTuple):
    """The names of one kind of resource."""

    plural: str
    singular: str
    short: str


NOUNS = (
    Noun("nodes", "node", "no"),
    Noun("gpus", "gpu", "gpu"),
    Noun("reservations", "reservation", "rsv"),
    Noun("endpoints", "endpoint", "ep"),
    Noun("replicas", "replica", "rep"),
    Noun("rules", "rule", "rule"),
    Noun("watchers", "watcher", "qw"),
    Noun("decisions", "decision", "dec"),
    Noun("adapters", "adapter", "ad"),
    Noun("recordings", "recording", "rec"),
    Noun("cordons", "cordon", "cor"),
    Noun("quotas", "quota", "quo"),
)
_BY_NAME = {name: noun for noun in NOUNS for name in noun}
_SINGULAR_VERBS = frozenset({"create", "delete", "evaluate", "scale", "explain", "update"})
_OWN_ARGUMENTS = frozenset(
    {"up"}
)  # reads its arguments itself: every setting of every service is a flag there


def normalise(arguments: Sequence[str]) -> list[str]:
    """The arguments with global options first and the noun under the name its command has."""
    hoisted, rest = _hoist(arguments)
    if len(rest) >= 2 and rest[0] in {"get", "rank", *_SINGULAR_VERBS}:
        rest = [rest[0], *_noun(rest[0], rest[1]), *rest[2:]]
    return [*hoisted, *rest]


def _hoist(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(global options with their values, everything else), each in the order it was typed."""
    hoisted: list[str] = []
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        option, equals, _ = argument.partition("=")
        if argument == "--" or (rest and rest[0] in _OWN_ARGUMENTS):
            rest += [argument, *left]
        elif argument.startswith("-o") and not argument.startswith("--"):
            hoisted += [argument] if len(argument) > 2 else [argument, *islice(left, 1)]
        elif option in GLOBAL_OPTIONS:
            hoisted += [argument, *islice(left, 1 if GLOBAL_OPTIONS[option] and not equals else 0)]
        else:
            rest.append(argument)
    return hoisted, rest


def _noun(verb: str, typed: str) -> list[str]:
    """The noun as the verb's command knows it, followed by the name where `typed` is a whole resource name."""
    collection, *name = (typed.split("/")[-2], typed) if "/" in typed else (typed,)
    noun = _BY_NAME.get(collection)
    if noun is None:
        return [typed]
    return [noun.singular if verb in _SINGULAR_VERBS else noun.plural, *name]
