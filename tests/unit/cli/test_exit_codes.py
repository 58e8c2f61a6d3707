"""One table of exit codes, and every error has a place in it."""

import pytest

from gpuscale.cli.console.errors import BY_ERROR, MEANINGS, ExitCode, exit_code, report
from gpuscale.cli.console.terminal import TERMINAL
from gpuscale.common import errors

TREE = errors.GpuscaleError.__subclasses__()


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


TOO_SHORT = errors.FieldViolation("ttl", "must be at least 2 s")


@pytest.mark.parametrize(
    ("error", "more"),
    [
        (errors.InvalidArgumentError("ttl must be at least 2 s", violations=[TOO_SHORT]), []),
        (
            errors.InvalidArgumentError("two are wrong", violations=[TOO_SHORT]),
            ["  ttl: must be at least 2 s"],
        ),
        (errors.ResourceExhaustedError("no room now", retry_after=2.88263), ["  try again in 2.9 s"]),
        (errors.ResourceExhaustedError("of a month", retry_after=1_300_021.5), ["  try again in 15d1h8m"]),
        (errors.NotFoundError("x", metadata={"name": "nodes/a"}), ["to list all: gpuscalectl get nodes"]),
        (errors.NotFoundError("x", metadata={"name": "host-1"}), []),
        (
            errors.UnauthenticatedError("x", reason="TOKEN_MISSING"),
            ["to send one: --token-file PATH, or gpuscalectl login ADDRESS"],
        ),
        (
            errors.UnavailableError("x", reason="TLS_SERVER"),
            ["or log in by the digest that an admin gives you: gpuscalectl login ADDRESS --ca-hash DIGEST"],
        ),
        (
            errors.DeadlineExceededError("no answer within 10 s"),
            ["a service runs but hangs, is stopped or overloaded; to see which: gpuscalectl doctor"],
        ),
        *((errors.DeadlineExceededError(one), []) for one in ("it ran too long", "no answer within 0.05 s")),
        (
            errors.UnimplementedError("Method not found!"),
            [
                "it is older than this program (gpuscalectl upgrade --plan), or another service: driver and snapshot ask an agent, at port 7071"
            ],
        ),
        (
            errors.UnauthenticatedError("x", reason="JOIN_TOKEN_INVALID"),
            ["an admin makes another: gpuscalectl join-token create"],
        ),
    ],
)
def test_an_error_says_once_what_is_wrong_and_what_would_help(
    error: errors.GpuscaleError, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report(error)
    assert capsys.readouterr().err.splitlines() == [f"error: {error.message}", *more]


def test_a_denied_field_is_told_by_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TERMINAL, "options", {"priority": "--priority"})
    field = "reserve.priority"
    report(errors.PermissionDeniedError(f"{field}: 0 at most", metadata={"field": field}))
    assert capsys.readouterr().err == "error: --priority: 0 at most\n"
