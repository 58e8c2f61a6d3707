"""Patterns of queue names: a part of Python's regular expressions that cannot take long. Pure.

A pattern that backtracks could stop the whole program: `re` knows no limit of time. So a group may not repeat, and the
number of things that repeat and of alternatives is small: each such thing multiplies the work, the length of a name for one
that repeats, and the ways through a group for one of alternatives.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

MAX_REPEATS = 3
"""Things in a pattern that may repeat or be left out."""
MAX_ALTERNATIVES = 10
"""Times that a pattern may offer another way, by `|`."""
MAX_WAYS_BESIDE_REPEATS = 16
"""Ways through a pattern that has as many repeats as there may be."""
_TOKEN = re.compile(
    r"""
    (?P<repeat> [*+?] \?? | \{ (?! \} ) [0-9]* (?: , [0-9]* )? \} \?? )
    | (?P<special> \( \? | \\ [^\W\ddswDSW_] | \\ \d )
    | (?P<open> \( )
    | (?P<close> \) )
    | (?P<other_way> \| )
    | (?P<atom> \\ . | \[ \^? \]? (?: \\. | [^\]\\] )* \] | . )
    """,
    re.VERBOSE,
)


def problem(pattern: str) -> str:
    """What is wrong with a pattern, in the words of an error; empty for one that may be used."""
    repeats, others, after_group = 0, 0, False
    for token in _TOKEN.finditer(pattern):
        match token.lastgroup:
            case "special":
                return f"must not hold {token[0]}"
            case "repeat" if after_group:
                return "must not repeat a group"
            case "repeat":
                repeats += 1
            case "other_way":
                others += 1
            case _:
                pass
        after_group = token.lastgroup == "close"
    if repeats > MAX_REPEATS:
        return f"must not repeat more than {MAX_REPEATS} things"
    if others > MAX_ALTERNATIVES:
        return f"must not have more than {MAX_ALTERNATIVES} alternatives"
    if repeats == MAX_REPEATS and _ways(pattern) > MAX_WAYS_BESIDE_REPEATS:
        return f"must not have so many alternatives beside {MAX_REPEATS} things that repeat"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", FutureWarning
            )  # a set in a set, which may mean something else one day
            re.compile(pattern)
    except (re.error, OverflowError, FutureWarning) as error:
        return f"must be a regular expression: {error}"
    return ""


def _ways(pattern: str) -> int:
    """The ways through a pattern by its alternatives: those of its groups, multiplied."""
    ways, open_groups = 1, [1]
    for token in _TOKEN.finditer(pattern):
        match token.lastgroup:
            case "other_way":
                open_groups[-1] += 1
            case "open":
                open_groups.append(1)
            case "close" if len(open_groups) > 1:
                ways *= open_groups.pop()
            case _:
                pass
    return ways * open_groups[0]


class NamePattern:
    """A pattern with what it matched so far: the names of queues seldom change.

    Raises:
        ValueError: it is none that may be used.
    """

    def __init__(self, pattern: str) -> None:
        if wrong := problem(pattern):
            raise ValueError(wrong)
        self._pattern = re.compile(pattern)
        self._known: dict[str, bool] = {}

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of all the queue names that there are which match as a whole."""
        known = self._known
        self._known = {
            name: known[name] if name in known else self._pattern.fullmatch(name) is not None
            for name in names
        }
        return [name for name, matched in self._known.items() if matched]
