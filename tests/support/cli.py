"""Runs `gpuscalectl` inside of the test's process: quick, and its output can be looked at."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from gpuscale.cli import main
from gpuscale.cli.console.terminal import TERMINAL


def leaves(
    command: click.Command | None = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command there is, with the words that lead to it."""
    command = command or main.root()
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None, name
        yield from leaves(found, (*path, name))


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def python(
    program: str, *arguments: object, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Ran:
    """Run this text by a Python of its own; in this process's environment and folder, unless others are given."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    ran = subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


class _Keyboard(io.StringIO):
    """Standard input at which a person sits."""

    def isatty(self) -> bool:
        return True


def run_cli(
    *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None, person: bool = False
) -> Ran:
    """Run one command as its own process would; `person`: somebody types what is on standard input."""
    with pytest.MonkeyPatch.context() as patch:
        written, err = io.BytesIO(), io.StringIO()
        out = io.TextIOWrapper(written, "utf-8", newline="", write_through=True)
        patch.setattr(sys, "argv", ["gpuscalectl", *arguments])
        patch.setattr(sys, "stdin", _Keyboard(stdin) if person else io.StringIO(stdin))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        for name in [name for name in os.environ if name.startswith("GPUSCALE_")]:
            patch.delenv(name)
        patch.setenv("GPUSCALE_CONTEXTS", os.devnull)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        code = 0
        try:
            main.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            TERMINAL.reset()  # or the next test would write as this run was told to
    return Ran(code, written.getvalue().decode(), err.getvalue())
