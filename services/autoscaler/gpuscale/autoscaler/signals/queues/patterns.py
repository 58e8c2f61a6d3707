"""Patterns of queue names: regular expressions in RE2's syntax. Pure.

Anybody who may create a watcher writes patterns, so none may take long. RE2 does not backtrack: the time of a match is
at most the size of the compiled pattern times the length of the name, and `LARGEST_BYTES` bounds that size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import re2

LARGEST_BYTES: Final = 1 << 15
"""Memory for a compiled pattern; the worst that fits takes a few milliseconds for a name of 255 characters."""


def _compiled(pattern: str) -> re2.Pattern:
    options = re2.Options()
    options.max_mem = LARGEST_BYTES
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said: bytes = error.args[0]
        raise ValueError(f"must be a regular expression of RE2: {said.decode('utf-8', 'replace')}") from None


def problem(pattern: str) -> str:
    """What is wrong with a pattern, in the words of an error; empty for one that may be used."""
    try:
        _compiled(pattern)
    except ValueError as error:
        return str(error)
    return ""


class NamePattern:
    """A pattern with what it matched so far: the names of queues seldom change.

    Raises:
        ValueError: it is none that may be used.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = _compiled(pattern)
        self._known: dict[str, bool] = {}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Those of the names that it has not been matched with."""
        return [name for name in names if name not in self._known]

    def learn(self, names: Iterable[str]) -> None:
        """Match it with names. RE2 lets other threads run meanwhile."""
        self._known |= {name: self._pattern.fullmatch(name) is not None for name in names}

    def of(self, names: Collection[str]) -> list[str]:
        """Those of all the queue names that there are which match as a whole."""
        self.learn(self.unknown(names))
        self._known = {name: self._known[name] for name in names}
        return [name for name, matched in self._known.items() if matched]
