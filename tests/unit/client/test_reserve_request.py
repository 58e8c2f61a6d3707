"""What `reserve` sends: what was not said is left to the server."""

import uuid

from gpuscale.client.client import reserve_request


def test_what_was_not_said_is_absent() -> None:
    request = reserve_request(2, "me", {})
    assert (request.gpu_count, request.holder) == (2, "me")
    assert str(uuid.UUID(request.request_id)) == request.request_id
    for field in ("min_memory_bytes", "max_utilization_percent", "ttl"):
        assert not request.HasField(field)
    assert not request.nodes


def test_every_call_has_its_own_request_id() -> None:
    assert reserve_request(1, "me", {}).request_id != reserve_request(1, "me", {}).request_id


def test_what_was_said_is_sent() -> None:
    request = reserve_request(
        1,
        "me",
        {
            "ttl": 1.5,
            "min_memory_bytes": 0,
            "max_utilization_percent": 100.0,
            "allow_unknown_utilization": True,
            "nodes": ["nodes/a"],
            "labels": {"team": "x"},
            "request_id": "r",
        },
    )
    assert (request.ttl.seconds, request.ttl.nanos) == (1, 500_000_000)
    assert request.HasField("min_memory_bytes")
    assert request.max_utilization_percent == 100
    assert request.allow_unknown_utilization
    assert (list(request.nodes), dict(request.labels), request.request_id) == (
        ["nodes/a"],
        {"team": "x"},
        "r",
    )
