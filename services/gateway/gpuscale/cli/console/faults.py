"""Where every failure of a command ends: words or one JSON object on standard error, and a code of the one table."""

import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

import typer

from gpuscale.cli.console.terminal import TERMINAL, note
from gpuscale.cli.grammar.arguments import GET_OPTIONS, GLOBAL_OPTIONS
from gpuscale.cli.grammar.exit_codes import ExitCode, exit_code
from gpuscale.common.errors import FieldViolation, GpuscaleError, InvalidArgumentError

USAGE_ERRORS: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""What the option parser raises; which module that class is in depends on the version of typer."""


def report_usage(error: Any) -> int:
    """Say what was typed wrong: how the command is used, what is wrong, and what was meant, perhaps; the exit code."""
    context: Any = error.ctx  # None where nothing was understood yet
    usage: str = context.get_usage() if context is not None else ""
    message = f"{error.format_message()}{_meant(error)}"
    if usage and message.startswith(usage):  # nothing was typed, and the message is the whole help
        if not TERMINAL.json:
            note(message)
            return ExitCode.USAGE
        message = "a command is missing"
    if TERMINAL.json:
        _write_json("USAGE", message, ExitCode.USAGE)
        return ExitCode.USAGE
    if usage:
        note(usage)
        note(f"more: {error.ctx.command_path} --help")
    note(f"error: {message}")
    return ExitCode.USAGE


def _meant(error: Any) -> str:
    """The option that was meant, where the parser does not know it since it may stand anywhere."""
    typed: str = getattr(error, "option_name", "")
    if not typed or getattr(error, "possibilities", None):
        return ""
    words = [*GLOBAL_OPTIONS, *(GET_OPTIONS if " get" in error.ctx.command_path else ())]
    found = difflib.get_close_matches(typed, words, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def report(error: GpuscaleError, name: str = "") -> ExitCode:
    """Say what failed, and for which of several things where it has a name; returns the exit code."""
    code = exit_code(error)
    violations = error.violations if isinstance(error, InvalidArgumentError) else ()
    if TERMINAL.json:
        _write_json(error.reason, error.message, code, violations, error.metadata, error.retry_after, name)
        return code
    note(f"error: {f'{name}: ' if name and name not in error.message.split() else ''}{error.message}")
    for violation in violations:
        note(f"  {violation.field}: {violation.description}")
    if error.retry_after is not None:
        note(f"  it may go in {error.retry_after:g} s")
    if TERMINAL.verbose:
        facts = "".join(f", {key}={value}" for key, value in sorted(error.metadata.items()))
        note(f"  {type(error).__name__} {error.reason}{facts}; exit code {code.value} {code.name}")
    return code


def beyond_field(error: ValueError) -> InvalidArgumentError:
    """The error that a number is which no field of a message holds, of 32 or 64 bits; any other is raised again."""
    fault, _, number = str(error).partition(": ")
    if fault != "Value out of range":  # the words of protobuf
        raise error
    return InvalidArgumentError(f"the number {number} is out of range")


def report_os(error: OSError) -> int:
    """Say what the system would not do; returns the exit code."""
    what = f"{error.strerror or type(error).__name__}{f': {error.filename}' if error.filename else ''}"
    if TERMINAL.json:
        _write_json("SYSTEM", what, ExitCode.OTHER)
    else:
        note(f"error: {what}")
    return ExitCode.OTHER


def report_interrupt() -> int:
    """Say that Ctrl-C ended the command; returns the exit code."""
    if TERMINAL.json:
        _write_json("INTERRUPTED", "interrupted", ExitCode.INTERRUPTED)
    else:
        note("")
    return ExitCode.INTERRUPTED


def _write_json(
    reason: str,
    message: str,
    code: ExitCode,
    violations: tuple[FieldViolation, ...] = (),
    metadata: Mapping[str, str] | None = None,
    retry_after: float | None = None,
    name: str = "",
) -> None:
    error: dict[str, object] = {
        "reason": reason,
        "message": message,
        "exitCode": code.value,
        "exitName": code.name,
    }
    if violations:
        error["fields"] = [{"field": one.field, "description": one.description} for one in violations]
    if metadata:
        error["metadata"] = dict(metadata)
    if retry_after is not None:
        error["retryAfterSeconds"] = retry_after
    if name:
        error["name"] = name
    sys.stderr.write(json.dumps({"error": error}) + "\n")
