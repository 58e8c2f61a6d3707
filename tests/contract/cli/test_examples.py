"""Each command has an example at the end of its help, which can be typed as it stands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from gpuscale.cli.grammar.arguments import GET_OPTIONS, GLOBAL_OPTIONS, normalise
from gpuscale.cli.grammar.examples import EXAMPLES
from gpuscale.cli.main import root
from gpuscale.cli.tree import COMMANDS
from tests.support.cli import run_cli

SERVES = {"up", "dashboard"}
"""They read their own arguments, and list every setting."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name in group.commands:
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name))


def test_every_command_has_one() -> None:
    assert COMMANDS.keys() >= SERVES
    assert set(commands(root())) - SERVES == EXAMPLES.keys()


@pytest.mark.parametrize("command", EXAMPLES)
def test_it_can_be_typed(command: str) -> None:
    words = shlex.split(EXAMPLES[command])
    words = words[: words.index("|")] if "|" in words else words
    left = [word for word in _without(normalise(words), {**GLOBAL_OPTIONS, **GET_OPTIONS}) if word]
    found: Any = root()
    for name in command.split():
        assert left.pop(0) == name
        found = found.commands[name]
    found.make_context(command, left)  # raises where an option or an argument is none


def _without(words: list[str], options: dict[str, bool]) -> Iterator[str]:
    """The words without the options that stand before the command, and their values."""
    left = iter(words)
    for word in left:
        if word == "--":
            yield from (word, *left)
        elif word not in options:
            yield word
        elif options[word]:
            next(left)


def test_the_help_ends_with_it() -> None:
    assert "Example:\n    gpuscalectl renew r3fa7kq2vnb4d --ttl 1h\n" in run_cli("renew", "--help").out
