"""Sessions end by themselves, and there are never too many."""

from collections.abc import Sequence

import pytest

from gpuscale.client import connect_async
from gpuscale.common.security.auth import Role
from gpuscale.dashboard.visitors import LENGTH, MARKS, MOST, Sessions, VisitorActions


@pytest.mark.parametrize(
    ("role", "marks"),
    [(Role.VIEWER, ()), (Role.OPERATOR, ("cordon", "uncordon")), (Role.ADMIN, MARKS), (None, MARKS)],
)
def test_a_visitor_is_offered_what_the_role_allows(role: Role | None, marks: Sequence[str]) -> None:
    sessions = Sessions()
    sessions.begin("secret", "token", 100.0, role)
    actions = VisitorActions(connect_async, str, role=sessions.role("secret"))
    assert actions.marks == [*marks]
    assert actions.may("autoscaler.v1.EndpointService/UpdateEndpoint") is bool(marks)


def test_a_session_is_known_by_its_secret_until_its_time_is_over() -> None:
    sessions = Sessions()
    sessions.begin("secret", "token", 100.0)
    assert sessions.token("secret", 100.0 + LENGTH - 1) == "token"
    assert sessions.token("secret", 100.0 + LENGTH) is None
    assert sessions.token("guess", 100.0) is None


def test_the_oldest_makes_room() -> None:
    sessions = Sessions()
    for number in range(MOST + 1):
        sessions.begin(str(number), "token", 0.0)
    assert sessions.token("0", 0.0) is None
    assert sessions.token("1", 0.0) == sessions.token(str(MOST), 0.0) == "token"


def test_whoever_signs_out_is_out_and_so_are_all_of_a_revoked_token() -> None:
    sessions = Sessions()
    for number in range(2):
        sessions.begin(str(number), "revoked", 0.0)
    sessions.begin("2", "good", 0.0)
    sessions.begin("3", "old", -LENGTH)
    assert sessions.tokens(1.0) == {"revoked", "good"}
    sessions.revoke("revoked")
    assert [sessions.token(str(number), 1.0) for number in range(3)] == [None, None, "good"]
    sessions.end("2")
    sessions.end("2")
    assert sessions.token("2", 1.0) is None
