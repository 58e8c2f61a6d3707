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


CODES = {
    1: (errors.InternalError, errors.UnimplementedError, errors.CancelledCallError, errors.GpuscaleError),
    2: (errors.InvalidArgumentError,),
    3: (errors.NotFoundError,),
    4: (
        *(errors.AlreadyExistsError, errors.FailedPreconditionError),
        *(errors.AbortedError, errors.OutOfRangeError),
    ),
    6: (errors.DeadlineExceededError,),
    7: (errors.UnavailableError, errors.ResourceExhaustedError),
    8: (errors.UnauthenticatedError, errors.PermissionDeniedError),
}
NO_ROOM = ("NO_CAPACITY", "WAIT_TIMEOUT", "QUOTA_EXCEEDED")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind("x"), code) for code, kinds in CODES.items() for kind in kinds),
        *((errors.ResourceExhaustedError("x", reason=reason), 5) for reason in NO_ROOM),
        (errors.FailedPreconditionError("x", reason="UNSATISFIABLE"), 5),
        (errors.FailedPreconditionError("x", reason="TLS_FILES"), 2),
    ],
)
def test_exit_code(error: errors.GpuscaleError, code: int) -> None:
    assert exit_code(error) == code


def test_a_subclass_has_the_code_of_its_class() -> None:
    class NearestMiss(errors.NotFoundError):
        pass

    assert exit_code(NearestMiss("x")) == ExitCode.NOT_FOUND
