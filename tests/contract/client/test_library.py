"""What users of the client library rely on: its names, its weight, and its types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gpuscale.client
from gpuscale.client import GpuscaleError
from tests.support.cli import Ran, python

HEAVY = (
    *("pydantic", "structlog", "click", "sqlmodel", "sqlalchemy", "aio_pika"),
    *("pynvml", "psutil", "uvloop", "httpx", "rich"),
)

SCRIPT = '''\
"""A user's script; what mypy says about each reveal_type stands beside it."""
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import NotFoundError, connect, connect_async, pages, pages_async
from gpuscale.client import wait_ready, wait_ready_async, watch, watch_async
from gpuscale.client.worker import Worker
from gpuscale.testing import FakeServer


def main() -> None:
    with connect("127.0.0.1:7070", timeout=5) as client:
        reveal_type(client.fleet.GetNode(monitor_api.GetNodeRequest(name="nodes/a")).node.snapshot.gpus[0].uuid)  # str
        for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
            reveal_type(page.nodes[0].snapshot.host_reading.cpu_percent)  # float
        for update in client.fleet.WatchNodes(monitor_api.WatchNodesRequest()):
            reveal_type(update.full)  # bool
        reveal_type(client.reserve(2, "me", ttl=60, min_memory=8 << 30).fence)  # int
        with client.reserve(gpus=2, min_memory="8GiB") as lease:
            reveal_type(lease)  # gpuscale.client.lease.Lease
            reveal_type(lease.cuda_visible_devices)  # str
            reveal_type(lease.lost.is_set())  # bool
            reveal_type(lease.env())  # dict[str, str]
            reveal_type(lease.gpus[0].uuid)  # str
        reveal_type(client.run(["true"], members=2, title="two").wait(timeout="1h"))  # int
        reveal_type(wait_ready(client, "endpoints/jobs", timeout=5).status.ready_replicas)  # int
        for news in watch(client.allocator.WatchReservations, allocator_api.WatchReservationsRequest()):
            reveal_type(news.reservations[0].fence)  # int
        try:
            client.allocator.GetReservation(allocator_api.GetReservationRequest(name="reservations/x"))
        except NotFoundError as error:
            reveal_type(error.retry_after)  # float | None


async def amain() -> None:
    async with connect_async() as client:
        reveal_type(await client.allocator.ListReservations(allocator_api.ListReservationsRequest()))  # gpuscale.api.allocator.v1.allocator_service_pb2.ListReservationsResponse
        async for page in pages_async(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
            reveal_type(page.nodes[0].agent_version)  # str
        async for update in client.fleet.WatchNodes(monitor_api.WatchNodesRequest()):
            reveal_type(update.nodes[0].name)  # str
        reveal_type((await client.reserve(1, "me")).reservation.remaining)  # google.protobuf.duration_pb2.Duration
        async with client.reserve(gpus=1) as lease:
            reveal_type(lease)  # gpuscale.client.lease.AsyncLease
        reveal_type(await client.run(["true"]))  # gpuscale.client.jobs.AsyncJob
        reveal_type((await wait_ready_async(client, "endpoints/jobs")).etag)  # str
        async for news in watch_async(client.fleet.WatchNodes, monitor_api.WatchNodesRequest()):
            reveal_type(news.removed[0])  # str


def test_mine() -> None:
    with FakeServer(gpus=2) as server, server.connect() as client:
        reveal_type(client)  # gpuscale.client.client.Client
        reveal_type(server.reservations[0].holder)  # str


def work() -> None:
    with Worker() as worker:
        worker.admit()
        reveal_type(worker.draining.is_set())  # bool
        reveal_type(worker.fence)  # int | None
'''
REVEALED = re.findall(r"reveal_type\(.*\)  # (.*)", SCRIPT)
WRONG = {
    "client.fleet.GetNode(monitor_api.ListNodesRequest())": "incompatible type",
    "client.fleet.ListNodes(monitor_api.ListNodesRequest()).nods": "has no attribute",
    'client.reserve(1, "me", tll=5)': "Unexpected keyword argument",
    'client.reserve("two", "me")': "incompatible type",
}


def test_every_error_of_the_tree_is_exported() -> None:
    tree = {one.__name__ for one in [GpuscaleError, *GpuscaleError.__subclasses__()]}
    assert tree <= set(gpuscale.client.__all__)


def test_all_is_what_is_public() -> None:
    """Modules of it are there too, once somebody has imported them."""
    found = vars(gpuscale.client).items()
    public = {name for name, value in found if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert public == set(gpuscale.client.__all__)


def test_it_and_what_is_for_its_users_tests_import_nothing_heavy() -> None:
    mine = "gpuscale.client, gpuscale.client.worker, gpuscale.testing"
    program = f"import sys, {mine}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert python(program) == Ran(0, "[]\n", "")


def test_types_reach_the_user_and_mistakes_are_found(tmp_path: Path) -> None:
    """By mypy --strict over two scripts of a user, outside of the repository.

    What the fake server is made of, the whole of the services, says nothing of its types, and would take a minute more.
    """
    (tmp_path / "right.py").write_text(SCRIPT)
    head = "from gpuscale.api.monitor import v1 as monitor_api\nfrom gpuscale.client import Client\n\n\n"
    body = "".join(f"    {line}\n" for line in WRONG)
    (tmp_path / "wrong.py").write_text(f"{head}def main(client: Client) -> None:\n{body}")
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-gpuscale.testing.site]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir=/dev/null"]
    command += ["right.py", "wrong.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    lines = ran.stdout.splitlines()
    assert [line.partition('"')[2].rstrip('"') for line in lines if "Revealed type" in line] == REVEALED
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == len(WRONG), errors
    for number, complaint in enumerate(WRONG.values(), head.count("\n") + 2):
        assert any(line.startswith(f"wrong.py:{number}: error") and complaint in line for line in errors), (
            errors
        )
