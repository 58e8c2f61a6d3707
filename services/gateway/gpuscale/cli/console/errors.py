"""Reports failures: text or a JSON object on standard error, and an exit code."""

import json
import re
import sys
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NoReturn, TypeVar

import click

from gpuscale.cli.console.terminal import TERMINAL, note
from gpuscale.cli.grammar.nouns import NOUNS, plural
from gpuscale.common import errors
from gpuscale.common.errors import UNANSWERED, GpuscaleError, InvalidArgumentError

V = TypeVar("V")


class ExitCode(IntEnum):
    """Exit codes of the program."""

    OK = 0
    OTHER = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    NO_CAPACITY = 5
    TIMEOUT = 6
    UNAVAILABLE = 7
    AUTH = 8
    INTERRUPTED = 130


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.OTHER: "another failure, or a bug in gpuscalectl",
    ExitCode.USAGE: "the command, an option or a file is wrong",
    ExitCode.NOT_FOUND: "no such resource",
    ExitCode.CONFLICT: "it exists already, has changed meanwhile, or its state forbids the change",
    ExitCode.NO_CAPACITY: "no GPUs that fit, now or ever",
    ExitCode.TIMEOUT: "no answer in time; the change may have been made",
    ExitCode.UNAVAILABLE: "nothing answers at the address, or a service is down or overloaded",
    ExitCode.AUTH: "not authenticated, or not allowed",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}

BY_ERROR: Mapping[type[GpuscaleError], ExitCode] = {
    errors.InvalidArgumentError: ExitCode.USAGE,
    errors.OutOfRangeError: ExitCode.CONFLICT,
    errors.UnauthenticatedError: ExitCode.AUTH,
    errors.PermissionDeniedError: ExitCode.AUTH,
    errors.NotFoundError: ExitCode.NOT_FOUND,
    errors.AlreadyExistsError: ExitCode.CONFLICT,
    errors.FailedPreconditionError: ExitCode.CONFLICT,
    errors.AbortedError: ExitCode.CONFLICT,
    errors.ResourceExhaustedError: ExitCode.UNAVAILABLE,
    errors.UnavailableError: ExitCode.UNAVAILABLE,
    errors.DeadlineExceededError: ExitCode.TIMEOUT,
    errors.CancelledCallError: ExitCode.OTHER,
    errors.UnimplementedError: ExitCode.OTHER,
    errors.InternalError: ExitCode.OTHER,
}
_BY_REASON: Mapping[str, ExitCode] = {
    # One thing to a script: no GPUs now, in time, of the quota, or on any node.
    "NO_CAPACITY": ExitCode.NO_CAPACITY,
    "UNSATISFIABLE": ExitCode.NO_CAPACITY,
    "WAIT_TIMEOUT": ExitCode.NO_CAPACITY,
    "QUOTA_EXCEEDED": ExitCode.NO_CAPACITY,
    # Files and addresses on the command line.
    **dict.fromkeys(("CERTIFICATES", "CONTEXTS", "INSECURE_TRANSPORT", "REVOKED_FILE"), ExitCode.USAGE),
    **dict.fromkeys(("CODE_FILE", "TLS_FILES", "TOKEN_FILE", "TOKENS_FILE"), ExitCode.USAGE),
}


def exit_code(error: GpuscaleError) -> ExitCode:
    """The exit code of an error: of its reason if listed, else of its nearest class."""
    if error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    return next((BY_ERROR[cls] for cls in type(error).__mro__ if cls in BY_ERROR), ExitCode.OTHER)


def report(error: GpuscaleError, name: str = "") -> ExitCode:
    """Report an error, with the name if it is one of several; returns the exit code."""
    code = exit_code(error)
    fields = error.violations if isinstance(error, InvalidArgumentError) else ()
    if TERMINAL.json:
        found: dict[str, object] = {
            "fields": [{"field": one.field, "description": one.description} for one in fields],
            "metadata": dict(error.metadata),
            "retryAfterSeconds": error.retry_after,
            "name": name,
        }
        known = {key: value for key, value in found.items() if value or value == 0.0}
        _write_json(error.reason, error.message, code, known)
        return code
    first, *more = error.lines()
    if name and name not in error.message.split():
        first = f"error: {name}: {error.message}"
    named = [one.field for one in fields] or [error.metadata.get("field", "")]
    for line in (*(_as_typed(one, named) for one in (first, *more)), *remedy(error)):
        note(line)
    if TERMINAL.verbose:
        facts = "".join(f", {key}={value}" for key, value in sorted(error.metadata.items()))
        note(f"  {type(error).__name__} {error.reason}{facts}; exit code {code.value} {code.name}")
    return code


_OPTIONS: Mapping[str, str] = dict(
    re.findall(
        r"(\w+)=(\w+)",
        "duration=for max_duration=for goal=wait timeout=wait gpu_count=gpus gpu_milli_limit=gpus gpus=gpu cpu_milli=cpus"
        " gpu_milli=share gpu_hours_per_month=hours gang_strategy=strategy member_count=members may_preempt=preempt"
        " start_time=at token_ttl=valid_for ttl=expires_in",
    )
)
"""Options that are called otherwise than the last part of their field, in any number and unit."""
_KEY = re.compile(r'\["(?:[^"\\]|\\.)*"\]|\[\d+\]')
_UNIT = re.compile("_(bytes|percent|watts)$")


def _as_typed(line: str, fields: Iterable[str]) -> str:
    """A line of an error with the options of the command in place of their fields."""
    for field in fields:
        name = _UNIT.sub("", _KEY.sub("", field).rpartition(".")[2])
        for word in (_OPTIONS.get(name, name), name, name.removesuffix("s")):
            if option := TERMINAL.options.get(word):
                line = re.sub(rf"(?<![\w.-]){re.escape(field)}(?=:? )", option, line, count=1)
                break
    return line


_REMEDIES: Mapping[str, str] = {
    "CERTIFICATE_REVOKED": "to let a host in again, on it: gpuscalectl leave, and join with a new token",
    "JOIN_TOKEN_INVALID": "an admin makes another: gpuscalectl join-token create",
    "LOGIN_CODE_INVALID": "an admin makes another: gpuscalectl login-code create NAME",
    "ROLE_TOO_LOW": "an admin can do it, or give you the role: gpuscalectl login-code create NAME --role ROLE",
    "TLS_SERVER": "or log in by the digest that an admin gives you: gpuscalectl login ADDRESS --ca-hash DIGEST",
    "TOKEN_MISSING": "to send one: --token-file PATH, or gpuscalectl login ADDRESS",
    "UNIMPLEMENTED": "it is older than this program (gpuscalectl upgrade --plan), or another service: driver and snapshot ask an agent, at port 7071",
}
"""What to do, by the reason of an error."""
_SILENT = re.compile(r"no answer within [1-9]")  # less than a second is the user's own limit


def remedy(error: GpuscaleError) -> list[str]:
    """A line with the command that helps, if one is known."""
    if error.reason in _REMEDIES:
        return [_REMEDIES[error.reason]]
    if error.reason == "TOKEN_EXPIRED" and (again := TERMINAL.login()):
        return [f"to log in again{'' if '--oidc' in again else ', with a new code of an admin'}: {again}"]
    if isinstance(error, errors.DeadlineExceededError) and _SILENT.match(error.message):
        return ["a service runs but hangs, is stopped or overloaded; to see which: gpuscalectl doctor"]
    *_, collection, _ = ("", "", *error.metadata.get("name", "").split("/"))
    if isinstance(error, errors.NotFoundError) and any(collection == noun.plural for noun in NOUNS):
        return [f"to list all: gpuscalectl get {collection}"]
    return []


def unknown(what: str, error: GpuscaleError) -> None:
    """Note what is not known for want of an answer, and what helps; each line once."""
    for line in (f"{what} are unknown: {error.message}", *remedy(error)):
        if line not in TERMINAL.noted:
            note(line)
            TERMINAL.noted.add(line)


def known(what: str, read: Callable[[], V], fatal: Container[str] = ()) -> V | None:
    """The answer of a service; None, with a note, while it is down or hangs. Errors of `fatal` reasons are raised."""
    try:
        return read()
    except UNANSWERED as error:
        if error.reason in fatal:
            raise
        unknown(what, error)
        return None


def report_usage(error: click.ClickException) -> ExitCode:
    """Report a wrong command line, with where to find help; returns the exit code."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    usage = context.get_usage() if context is not None else ""
    message = error.format_message()
    if context is not None and (meant := _meant(error, context, message)):
        message = f"{message.partition(' (Did')[0].removesuffix('.')}; {meant}"
    if usage and message.startswith(usage):  # nothing was typed, and the message is the whole help
        if not TERMINAL.json:
            note(message)
            return ExitCode.USAGE
        message = "missing command"
    if TERMINAL.json:
        _write_json("USAGE", message, ExitCode.USAGE)
        return ExitCode.USAGE
    if context is not None:
        note(f"{usage}\nTry '{context.command_path} --help' for help.")
    note(f"error: {message}")
    return ExitCode.USAGE


_OPTIONS_OF_OTHER_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("--count", "--gres", "--gpus-per-node", "--num-gpus", "-G", "-g", "-n"), "--gpus"),
    **dict.fromkeys(("--mem", "--memory", "--mem-per-gpu"), "--min-memory"),
    **dict.fromkeys(("--time", "-t"), "--time-limit"),
    **dict.fromkeys(("--nodelist", "--host", "-w"), "--node"),
    **dict.fromkeys(("--partition", "--constraint", "-p", "-C"), "--node-label"),
    **dict.fromkeys(("--user", "-u"), "--holder"),
    "--exclude": "--exclude-node",
    "--namespace": "--tenant",
}
"""Options of Slurm, Docker and kubectl, and their equivalents here."""
_NAMESPACES = {"-A", "--all-namespaces", "-n", "--namespace"}
_EXTRA = re.compile(r"Got unexpected extra arguments? \((\S+).*\)")


def _meant(error: click.ClickException, context: click.Context, message: str) -> str:
    """A hint at what may have been meant by an unknown option or word; empty if unknown."""
    known = {one for parameter in context.command.get_params(context) for one in parameter.opts}
    if isinstance(error, click.NoSuchOption):
        if isinstance(context.command, click.Group):
            if error.possibilities:
                return f"did you mean {error.possibilities[0]}?"
            return "options of a command come after its name"
        other = _OPTIONS_OF_OTHER_TOOLS.get(error.option_name)
        if other in known:
            return f"try: {other}"
        return "there are no namespaces: leave it out" if error.option_name in _NAMESPACES else ""
    extra = _EXTRA.fullmatch(message)
    if extra and extra[1].isdecimal() and "--gpus" in known:
        return f"did you mean --gpus {extra[1]}?"
    if extra and plural(extra[1]) in {noun.plural for noun in NOUNS}:
        return f"try: gpuscalectl get {extra[1]}"
    return ""


def report_value(error: ValueError) -> ExitCode:
    """Report text that is not UTF-8, or a number that exceeds its 32- or 64-bit field; raises any other ValueError again."""
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        return report(InvalidArgumentError(f"{error.object!a} is not UTF-8: write it in another way"))
    fault, _, number = str(error).partition(": ")
    if fault != "Value out of range":  # protobuf's message
        raise error
    return report(InvalidArgumentError(f"the number {number} is out of range"))


def report_os(error: OSError) -> ExitCode:
    """Report a failed system call, such as writing to a full disk, but not a closed pipe; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        return ExitCode.OTHER
    what = f"{error.strerror or type(error).__name__}{f': {error.filename}' if error.filename else ''}"
    if TERMINAL.json:
        _write_json("SYSTEM", what, ExitCode.OTHER)
    else:
        note(f"error: {what}")
    return ExitCode.OTHER


def _write_json(reason: str, message: str, code: ExitCode, more: Mapping[str, object] | None = None) -> None:
    error = {
        "reason": reason,
        "message": message,
        "exitCode": code.value,
        "exitName": code.name,
        **(more or {}),
    }
    sys.stderr.write(json.dumps({"error": error}) + "\n")


@contextmanager
def writing(place: Path | None = None, *, reason: str, what: str = "write") -> Generator[None]:
    """Tell which file of a block, or which `place`, cannot be written."""
    try:
        yield
    except OSError as error:
        message = f"cannot {what} {place or error.filename or 'its files'}: {error.strerror}"
        raise errors.FailedPreconditionError(message, reason=reason) from error


def leave(code: int) -> NoReturn:
    """Exit with this code."""
    raise click.exceptions.Exit(code)
