"""What people may type, put into the one order and the names that the commands know.

    gpuscalectl get ep jobs -w -o json   ->  gpuscalectl -o json get -w endpoints jobs
    gpuscalectl delete endpoints/jobs    ->  gpuscalectl delete endpoint endpoints/jobs

Global options, and those of every `get`, may stand anywhere before `--`; nouns have a plural, a singular and a short name; a resource name says
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
    "--context": True,
    "--dial-timeout": True,
    "--ascii": False,
    "--verbose": False,
    "-v": False,
}
"""Each global option, and whether a value follows it."""
GET_OPTIONS: Mapping[str, bool] = {
    "--selector": True,
    "-l": True,
    "--sort-by": True,
    "--watch": False,
    "-w": False,
    "--every": True,
}
"""Each option of `get` itself, and whether a value follows it."""


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
_SINGULAR_VERBS = frozenset(
    {"clear", "create", "delete", "evaluate", "forget", "scale", "set", "explain", "start", "stop", "update"}
)
_OWN_ARGUMENTS = frozenset(
    {"up"}
)  # reads its arguments itself: every setting of every service is a flag there


def normalise(arguments: Sequence[str]) -> list[str]:
    """The arguments with global options first and the noun under the name its command has."""
    hoisted, rest = _hoist(arguments, GLOBAL_OPTIONS)
    if rest[:1] == ["get"]:
        own, others = _hoist(rest[1:], GET_OPTIONS)
        return [*hoisted, "get", *own, *(_noun("get", others[0]) if others else ()), *others[1:]]
    if rest[:1] == ["explain"] and _is_field(rest[1:]):
        return [*hoisted, "explain", "field", *rest[1:]]
    if len(rest) >= 2 and rest[0] in {"rank", "wait", *_SINGULAR_VERBS}:
        rest = [rest[0], *_noun(rest[0], rest[1]), *rest[2:]]
    return [*hoisted, *rest]


def _is_field(words: Sequence[str]) -> bool:
    """Whether `explain` is asked about the contract: a path, or a kind of resource and none of them."""
    if not words or words[0].startswith("-") or "/" in words[0]:
        return False
    return "." in words[0] or words[0][:1].isupper() or (len(words) == 1 and words[0] in _BY_NAME)


def plural(noun: str) -> str:
    """The plural of a noun under any of its names; other words as they are."""
    return _BY_NAME[noun].plural if noun in _BY_NAME else noun


def format_of(arguments: Sequence[str]) -> str:
    """What `-o` asks for, before anything else is understood; empty where it does not stand there."""
    hoisted, _ = _hoist(arguments, GLOBAL_OPTIONS)
    found = ""
    left = iter(hoisted)
    for argument in left:
        option, equals, value = argument.partition("=")
        if option == "--output":
            found = value if equals else next(left, "")
        elif argument.startswith("-o"):
            found = argument[2:].removeprefix("=") or next(left, "")
        elif GLOBAL_OPTIONS[option] and not equals:
            next(left, None)
    return found


def _hoist(arguments: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """(those options with their values, everything else), each in the order it was typed."""
    hoisted: list[str] = []
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        option, equals, _ = argument.partition("=")
        if argument == "--" or (rest and rest[0] in _OWN_ARGUMENTS):
            rest += [argument, *left]
        elif option in options:
            hoisted += [argument, *islice(left, 1 if options[option] and not equals else 0)]
        elif argument[:1] == "-" != argument[1:2] and options.get(argument[:2], False):
            hoisted.append(argument)  # a short option with its value behind it, such as -ojson
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
