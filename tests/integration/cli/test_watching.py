"""`get --watch` writes a change when it happens, where the API has a stream of it."""

from __future__ import annotations

import json
import re
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.cli.console.lookup import Streams
from gpuscale.client import UnavailableError
from gpuscale.testing import FakeServer
from tests.support.up import Typed
from tests.support.waiting import eventually_sync


@contextmanager
def watching(
    address: str, *words: str, of: tuple[str, ...] = ("get", "--every", "1h")
) -> Iterator[list[dict[str, object]]]:
    """What a `get -w` writes that would read again by itself only in an hour; it ends by Ctrl-C, with nothing but JSON."""
    lines: list[dict[str, object]] = []
    process = Typed("--address", address, *of, *words, "-w", "-o", "jsonl")

    def read() -> None:
        lines.extend(json.loads(line) for line in process.stdout)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield lines
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == ""
    finally:
        process.send_signal(signal.SIGKILL)
        reader.join(10)
        process.close()


def test_a_reservation_is_written_when_it_is_made_and_when_it_ends() -> None:
    with FakeServer(gpus=2) as server, server.connect() as client:
        first = client.reserve(gpus=1, holder="first", ttl=600.0)
        with watching(server.address, "reservations") as lines:
            eventually_sync(lambda: len(lines) == 1, timeout=60)
            server.fail("ListReservations", UnavailableError("asked again"), times=1000)
            second = client.reserve(gpus=1, holder="second", ttl=600.0)
            eventually_sync(lambda: [line.get("holder") for line in lines] == ["first", "second"], timeout=60)
            second.release()
            eventually_sync(lambda: lines[-1] == {"name": second.name, "deleted": True}, timeout=60)
        first.release()


def test_endpoints_are_written_when_they_come_and_go() -> None:
    spec = autoscaler_api.EndpointSpec(max_replicas=1, template={"template": "worker"})
    wanted = autoscaler_api.Endpoint(name="endpoints/mine", spec=spec)
    with FakeServer() as server, server.connect() as client, watching(server.address, "endpoints") as lines:
        request = autoscaler_api.CreateEndpointRequest(endpoint=wanted, request_id=str(uuid.uuid4()))
        client.endpoints.CreateEndpoint(request)
        eventually_sync(lambda: [line["name"] for line in lines[:1]] == [wanted.name], timeout=60)
        client.endpoints.DeleteEndpoint(autoscaler_api.DeleteEndpointRequest(name=wanted.name))
        eventually_sync(lambda: lines[-1] == {"name": wanted.name, "deleted": True}, timeout=60)


def test_events_are_written_when_they_happen() -> None:
    with (
        FakeServer(gpus=2) as server,
        server.connect() as client,
        watching(server.address, "reservation", "--since", "1h", of=("events", "--kind")) as lines,
    ):
        held = client.reserve(gpus=1, holder="me", ttl=600.0)
        eventually_sync(lambda: [line["name"] for line in lines] == [held.name], timeout=60)
        held.release()
        eventually_sync(lambda: len(lines) == 2, timeout=60)


def test_without_changes_it_waits_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("gpuscale.cli.console.lookup.time", Mock(sleep=slept.append))
    with FakeServer() as server, server.connect() as client:
        Streams(client).pause(0.3, away=True)
    assert slept == [0.2]


def test_a_watched_table_of_gpus_shows_as_much_as_it_did_at_first() -> None:
    with FakeServer(gpus=1) as server, server.connect() as client:
        process = Typed("--address", server.address, "get", "gpus", "-w", "--every", "1h")
        rows = ([*map(str.strip, re.split(" {2,}", line))] for line in process.stdout)
        try:
            heading, first = next(rows), next(rows)
            with client.reserve(gpus=1, holder="me", ttl=600.0):
                then = next(row for row in rows if row[heading.index("HOLDER")] == "me")
        finally:
            process.close()
    still = [heading.index(name) for name in ("NODE", "GPU", "MODEL", "STATE", "UUID")]
    assert [first[at] for at in still] == [then[at] for at in still]
    assert first[heading.index("HOLDER")] == "-"
