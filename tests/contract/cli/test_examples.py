"""Each command has an example at the end of its help, which can be typed as it stands."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest

from gpuscale.cli.console.command import Command
from gpuscale.cli.main import COMMANDS
from tests.support.cli import leaves, run_cli

SERVES = {("up",), ("dashboard",)}
"""They parse their own arguments, and list every setting."""
LEAVES = {path: command for path, command in leaves() if isinstance(command, Command)}
EXAMPLES = {path: command.example for path, command in LEAVES.items()}


def test_every_command_has_one() -> None:
    assert {path[0] for path in EXAMPLES} == COMMANDS.keys()
    assert {path for path, example in EXAMPLES.items() if not example} == SERVES


@pytest.mark.parametrize("path", sorted(EXAMPLES.keys() - SERVES), ids=" ".join)
def test_it_can_be_typed(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole line is parsed, and leads to the command, which may stand at several places."""
    reached: list[tuple[str, ...]] = []

    def invoke(self: Command, ctx: click.Context) -> Any:
        if isinstance(self, click.Group):
            return click.Group.invoke(self, ctx)
        reached.append(tuple(ctx.command_path.split()[1:]))
        return None

    monkeypatch.setattr(Command, "invoke", invoke)
    monkeypatch.setattr("gpuscale.cli.commands.watching.GetCommand.invoke", invoke)
    words = shlex.split(EXAMPLES[path])
    ran = run_cli(*(words[: words.index("|")] if "|" in words else words))
    same = [[one] for one, command in LEAVES.items() if command is LEAVES[path]]
    assert (ran.code, reached in same) == (0, True), ran.err


def test_the_help_ends_with_it() -> None:
    assert "Example:\n    gpuscalectl renew r3fa7kq2vnb4d --ttl 1h\n" in run_cli("renew", "--help").out
