"""Lists for a notebook: of every kind, with a table in HTML and in text, and as records for pandas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gpuscale.client import InvalidArgumentError
from gpuscale.client.tables import KINDS, SHOWN, TableRows
from gpuscale.testing import FakeServer


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(gpus=2, nodes=2) as running:
        yield running


async def test_every_kind_is_a_list_with_and_without_an_event_loop(server: FakeServer) -> None:
    async with server.connect_async() as client:
        for kind in KINDS:
            listed = await client.table(kind)
            assert [*listed] == [*server.connect().table(kind)] or kind in {"nodes", "gpus"}, kind
            assert listed._repr_html_().startswith("<table><tr><th>"), kind
        assert len(await client.gpus()) == 4
    assert len(server.connect().table("nodes", page_size=1)) == 2, "all pages"


async def test_what_is_known_is_there_by_path_and_who_holds_a_gpu(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    with server.connect() as client, client.reserve(1, "<b>ana</b>", nodes=["nodes/node-1"]) as lease:
        [held] = [one for one in client.gpus().records() if one["holder"]]
        assert (held["holder"], held["name"]) == ("<b>ana</b>", lease.gpus[0].name)
        assert held["reading.memory_total_bytes"] > 0
        assert isinstance(held["reading.age"], timedelta)
        [record] = client.reservations(filter='holder = "<b>ana</b>"').to_pandas()
        assert isinstance(record["create_time"], datetime)
        assert (record["state"], record["gpus"][0]["uuid"]) == ("ACTIVE", lease.gpus[0].uuid)
        assert "end_time" not in record, "what is absent is no value"
        shown = client.reservations()
        assert "<td>&lt;b&gt;ana&lt;/b&gt;</td>" in shown._repr_html_()
        assert repr(shown).splitlines()[0].startswith("NAME")
        assert len(client.gpus(filter="index = 1", order_by="name desc")) == 2
    many = TableRows([*client_nodes(server)] * SHOWN, ["name"])
    assert many._repr_html_().count("<tr>") == SHOWN + 1


def client_nodes(server: FakeServer) -> Any:
    """By the name that is a stub too."""
    client: Any = server.connect()
    assert client.nodes.ListCordons
    return client.nodes()


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("node", {}, "error: unknown kind 'node'; did you mean nodes?"),
        ("gpus", {"page_size": 2}, "error: unknown option 'page_size'; gpus take filter, order_by"),
        ("jobs", {"filter": "nosuch = 1"}, "Reservation has no field 'nosuch'"),
    ],
)
async def test_errors_read_like_those_of_the_command_line(
    server: FakeServer, kind: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        server.connect().table(kind, **options)
    assert said in raised.value._render_traceback_()[0]
    async with server.connect_async() as client:
        with pytest.raises(InvalidArgumentError):
            await client.table(kind, **options)
