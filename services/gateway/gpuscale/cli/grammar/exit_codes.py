"""The exit codes of `gpuscalectl`: one table, from the error tree, for every command."""

from collections.abc import Mapping
from enum import IntEnum

from gpuscale.common import errors


class ExitCode(IntEnum):
    """What the shell sees."""

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
    ExitCode.OK: "done",
    ExitCode.OTHER: "another failure, or a fault of the program",
    ExitCode.USAGE: "the command, an option or a file is wrong",
    ExitCode.NOT_FOUND: "there is no such thing",
    ExitCode.CONFLICT: "it exists already, was changed meanwhile, or its state forbids it",
    ExitCode.NO_CAPACITY: "no GPUs that fit, now or at all",
    ExitCode.TIMEOUT: "no answer in time; it may have happened",
    ExitCode.UNAVAILABLE: "nothing answers at the address, or a service is down or overloaded",
    ExitCode.AUTH: "no valid identity, or one that may not do this",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}

_BY_ERROR: Mapping[type[errors.GpuscaleError], ExitCode] = {
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
    # No room now, none in time, none left of the quota, and more than any node has, are one thing to a script that
    # asked for GPUs.
    "NO_CAPACITY": ExitCode.NO_CAPACITY,
    "UNSATISFIABLE": ExitCode.NO_CAPACITY,
    "WAIT_TIMEOUT": ExitCode.NO_CAPACITY,
    "QUOTA_EXCEEDED": ExitCode.NO_CAPACITY,
    # Files and addresses that were typed.
    "CONTEXTS": ExitCode.USAGE,
    "TOKEN_FILE": ExitCode.USAGE,
    "TLS_FILES": ExitCode.USAGE,
    "INSECURE_TRANSPORT": ExitCode.USAGE,
}


def exit_code(error: errors.GpuscaleError) -> ExitCode:
    """The exit code of an error: by its reason where that is listed, else by the nearest class in the table."""
    if error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    for cls in type(error).__mro__:
        if cls in _BY_ERROR:
            return _BY_ERROR[cls]
    return ExitCode.OTHER
