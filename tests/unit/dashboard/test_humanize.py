"""Numbers and times as people read them."""

from datetime import UTC, datetime

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.dashboard import humanize


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (7500, "2 h 5 min"), (90_000, "1 d 1 h"), (-3, "0 s")],
)
def test_a_span_has_at_most_two_parts(seconds: float, text: str) -> None:
    assert humanize.span(seconds) == text


def test_what_is_not_known_is_a_dash() -> None:
    assert humanize.number(None, "%") == humanize.size(None) == humanize.clock(Timestamp()) == "-"
    assert humanize.ago(Timestamp(), datetime.now(UTC)) == "-"


def test_sizes_have_binary_units() -> None:
    shown = [humanize.size(count) for count in (0, 1023, 1 << 10, 80 << 30)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "80.0 GiB"]


def test_an_enum_is_words_and_a_value_from_the_future_its_number() -> None:
    node = monitor_api.Node(state=monitor_api.NodeState.NODE_STATE_ONLINE)
    assert humanize.word(node, "state") == "online"
    node = monitor_api.Node.FromString(b"\x10\x63")  # field 2, value 99
    assert humanize.word(node, "state") == "99"


def test_abbreviations_and_the_words_of_a_reason_keep_their_capitals() -> None:
    event = monitor_api.HealthEvent(recommended_action="RECOMMENDED_ACTION_RESET_GPU")
    assert humanize.word(event, "recommended_action") == "reset GPU"
    shown = [humanize.state(one) for one in ("OK,CORDONED", "QUARANTINED: XID 79, since noon")]
    assert shown == ["ok,cordoned", "quarantined: XID 79, since noon"]


def test_what_fails_alike_is_named_together() -> None:
    found = {"nodes": "nothing answers", "health": "nothing answers", "endpoints": "refused"}
    assert humanize.problems(found) == "endpoints: refused; health, nodes: nothing answers"
