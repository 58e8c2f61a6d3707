"""Standard output and standard error, whatever the shell made of them: closed, full, or of another encoding than UTF-8."""

import io
import os
import sys
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpuscale.cli.console.faults import report_os
from gpuscale.cli.grammar.exit_codes import ExitCode


@runtime_checkable
class _Encoding(Protocol):
    """A stream of bytes underneath."""

    def reconfigure(self, *, encoding: str) -> None:
        """Take another encoding."""


def prepare(*, data: bool) -> None:
    """Make them fit to write to; `data` is UTF-8 whatever the locale says, as JSON and YAML are.

    What is closed (`>&-`) takes what it gets and keeps nothing.
    """
    if sys.__stdout__ is None:
        sys.stdout = _nowhere()
    if sys.__stderr__ is None:
        sys.stderr = _nowhere()
    if data and isinstance(sys.stdout, _Encoding):
        sys.stdout.reconfigure(encoding="utf-8")


def finish(code: int) -> int:
    """Bring the rest of the payload on its way; the exit code, which says where that failed."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = _nowhere()  # else the interpreter would try it again, and complain in its own words
        return ExitCode.OTHER if isinstance(error, BrokenPipeError) else report_os(error)
    return code


def _nowhere() -> io.TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")
