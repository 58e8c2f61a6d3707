"""Sessions end by themselves, and there are never too many."""

from collections.abc import Sequence

import pytest

from gpuscale.client import connect_async
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Role
from gpuscale.dashboard.visitors import LENGTH, MARKS, MOST, Sessions, VisitorActions, VisitorSession


@pytest.mark.parametrize(
    ("role", "marks"),
    [(Role.VIEWER, ()), (Role.OPERATOR, ("cordon", "uncordon")), (Role.ADMIN, MARKS), (None, MARKS)],
)
def test_a_visitor_is_offered_what_the_role_allows(role: Role | None, marks: Sequence[str]) -> None:
    actions = VisitorActions(connect_async, VisitorSession("token", 0.0, role), SystemClock())
    assert actions.marks == [*marks]
    assert actions.may("autoscaler.v1.EndpointService/UpdateEndpoint") is bool(marks)


def test_a_session_is_known_by_its_secret_until_its_time_is_over() -> None:
    sessions = Sessions()
    sessions.begin("secret", "token", 100.0)
    found = sessions.find("secret", 100.0 + LENGTH - 1)
    assert found.token == "token"
    assert sessions.find("secret", 100.0 + LENGTH) is sessions.find("guess", 100.0) is None


def test_the_oldest_makes_room() -> None:
    sessions = Sessions()
    for number in range(MOST + 1):
        sessions.begin(str(number), "token", 0.0)
    assert [number for number in range(MOST + 1) if sessions.find(str(number), 0.0) is None] == [0]


def test_whoever_signs_out_is_out_and_sessions_are_found_by_their_token() -> None:
    sessions = Sessions()
    for secret, token in enumerate(("one", "one", "other", "old")):
        sessions.begin(str(secret), token, -LENGTH if token == "old" else 0.0)
    found = sessions.by_token(1.0)
    assert {token: len(each) for token, each in found.items()} == {"one": 2, "other": 1}
    found["other"][0].end = 0.0
    assert sessions.find("2", 1.0) is None
    assert sessions.by_token(1.0).keys() == {"one"}
