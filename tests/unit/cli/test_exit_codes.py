"""One table of exit codes, and every error has a place in it."""

import pytest

from gpuscale.cli.console.errors import BY_ERROR, MEANINGS, ExitCode, exit_code
from gpuscale.common import errors

TREE = [
    error
    for error in vars(errors).values()
    if isinstance(error, type)
    and issubclass(error, errors.GpuscaleError)
    and error is not errors.GpuscaleError
]


def test_every_error_of_the_tree_is_in_the_table() -> None:
    assert set(BY_ERROR) == set(TREE)


def test_every_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("x"), 2),
        (errors.NotFoundError("x"), 3),
        (errors.AlreadyExistsError("x"), 4),
        (errors.FailedPreconditionError("x"), 4),
        (errors.AbortedError("x"), 4),
        (errors.OutOfRangeError("x"), 4),
        *((errors.ResourceExhaustedError("x", reason=one), 5) for one in ("NO_CAPACITY", "WAIT_TIMEOUT")),
        *((errors.ResourceExhaustedError("x", reason=one), 5) for one in ("UNSATISFIABLE", "QUOTA_EXCEEDED")),
        (errors.FailedPreconditionError("x", reason="TLS_FILES"), 2),
        (errors.DeadlineExceededError("x"), 6),
        (errors.UnavailableError("x"), 7),
        (errors.ResourceExhaustedError("x", reason="OVERLOADED"), 7),
        (errors.UnauthenticatedError("x"), 8),
        (errors.PermissionDeniedError("x"), 8),
        (errors.InternalError("x"), 1),
        (errors.UnimplementedError("x"), 1),
        (errors.CancelledCallError("x"), 1),
        (errors.GpuscaleError("x"), 1),
    ],
)
def test_exit_code(error: errors.GpuscaleError, code: int) -> None:
    assert exit_code(error) == code


def test_a_subclass_has_the_code_of_its_class() -> None:
    class NearestMiss(errors.NotFoundError):
        pass

    assert exit_code(NearestMiss("x")) == ExitCode.NOT_FOUND
