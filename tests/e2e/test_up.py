"""`gpuscalectl up` as a user has it: one command, everything there, state that survives, and a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import open_sync_channel
from gpuscale.common.rpc.status import rpc_errors
from tests.support.cli import Ran, run_cli
from tests.support.fixtures import need
from tests.support.nvml_double import NvmlDouble, env_with_double, why_unavailable
from tests.support.ports import free_port, listens
from tests.support.up import Typed, Up, ctl_environment
from tests.support.waiting import eventually_sync

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
CONFIG = f"""
[templates.stubborn]
command = ["{{python}}", "-c", "{STUBBORN}"]
"""
ENDPOINT = """
kind: Endpoint
name: stubborn
spec: {minReplicas: 2, maxReplicas: 2, tick: 0.2s, template: {template: stubborn, gpuCount: 1, maxUtilizationPercent: 100}}
"""


def ctl(address: str, *arguments: str, stdin: str = "") -> Ran:
    return run_cli("--address", address, *arguments, stdin=stdin)


def data(address: str, *arguments: str) -> Any:
    """What a command prints as JSON."""
    ran = ctl(address, *arguments, "-o", "json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def opened(url: str, cookie: str = "") -> tuple[int, str]:
    """Status of a page of the dashboard, and the cookie that it sets."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.netloc, timeout=180)) as connection:
        connection.request("GET", parts.path, headers={"Cookie": cookie})
        answer = connection.getresponse()
        return answer.status, (answer.headers["Set-Cookie"] or "").partition(";")[0]


def dashboards(up: int) -> list[psutil.Process]:
    children = psutil.Process(up).children()
    return [one for one in children if "gpuscale.dashboard.main" in one.cmdline()]


def test_the_link_of_the_banner_signs_in_once(tmp_path: Path) -> None:
    """It is there before anybody looks, on another port where its own is in use, and ends with `up`, in whatever way that ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Up(tmp_path, simulate=1, arguments=("--dashboard-port", str(port))) as up:
            link = up.banner.split("dashboard")[1].split()[0]
            assert not dashboards(up.process.pid)
            site = link.partition("/open/")[0] + "/"
            assert site != f"http://127.0.0.1:{port}/"
            assert opened(site) == (303, "")  # to the page that says how to sign in
            status, cookie = opened(link)
            assert status == 303
            assert opened(site, cookie)[0] == 200
            assert opened(link) == (403, "")
            file = tmp_path / "data" / "dashboard-link"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            (first,) = dashboards(up.process.pid)
            first.kill()
            first.wait(60)
            assert opened(file.read_text().strip())[0] == 303  # who asks for it starts it again
            (second,) = dashboards(up.process.pid)
            up.kill()
            second.wait(60)


def reserve(address: str, gpus: int, ttl: str = "60s", holder: str = "first") -> Ran:
    arguments = ("--gpus", str(gpus), "--min-memory", "8GiB", "--max-utilization", "100", "--ttl", ttl)
    return ctl(address, "reserve", *arguments, "--holder", holder, "-o", "json")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up"), simulate=4, typed=True) as running:
        yield running


def test_it_is_there_at_once(up: Up) -> None:
    """Done means 1: the banner, and what it says."""
    first, dashboard, *lines = up.banner.splitlines()
    assert first.endswith(f" is up at {up.address}")
    assert re.fullmatch(r"  dashboard  http://127\.0\.0\.1:\d+/open/\S{22}", dashboard)
    assert lines == [
        f"  data       {up.folder / 'data'}",
        "  GPUs       4 SIMULATED: no hardware stands behind them",
    ]
    eventually_sync(lambda: up.errors.read_text().startswith("next:  gpuscalectl --address "))


def test_a_second_one_is_turned_away(up: Up, tmp_path: Path) -> None:
    """Done means 5: on the data directory or the port of another, it says so and ends at once."""
    for arguments, complaint in (
        (
            ("--listen", "127.0.0.1:0", "--data-dir", str(up.folder / "data")),
            f"is in use by process {up.process.pid}",
        ),
        (("--listen", up.address, "--data-dir", str(tmp_path)), f"another program listens on {up.address}"),
    ):
        ran = Typed("up", *arguments).ended()
        assert (ran.code, ran.out) == (4, "")
        assert complaint in ran.err
        assert len(ran.err.splitlines()) == 1
    assert data(up.address, "get", "nodes")["nodes"]


def test_a_reservation_survives_a_power_cut_and_ctrl_c_is_a_clean_end(tmp_path: Path) -> None:
    """It goes on to run out at the same time."""
    ttl = 600.0
    with Up(tmp_path, simulate=4) as up:
        asked = time.monotonic()
        ran = reserve(up.address, 2, ttl=f"{ttl:g}s")
        granted = time.monotonic()
        assert ran.code == 0, ran.err
        name = json.loads(ran.out)["name"]
        up.kill()
    with Up(tmp_path, simulate=4, typed=True) as up:
        before = time.monotonic()
        kept = data(up.address, "get", "reservations", name)
        after = time.monotonic()
        assert kept["state"] == "STATE_ACTIVE"
        assert kept["gpus"] == json.loads(ran.out)["gpus"]
        left = float(kept["remaining"].rstrip("s"))
        assert ttl - (after - asked) - 1 < left < ttl - (before - granted) + 1
        assert reserve(up.address, 3).code == 5
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(60) == 0
        assert "Traceback" not in up.errors.read_text()


def test_whatever_it_writes_is_for_its_user_alone_and_sigterm_takes_the_workers_along(tmp_path: Path) -> None:
    """Also where the umask would let everybody in, and where workers ignore SIGTERM."""
    data_dir = tmp_path / "data"
    (tmp_path / "c.toml").write_text(CONFIG)
    arguments = ("--config", str(tmp_path / "c.toml"), "--audit-file", f"{data_dir}/audit")
    before = os.umask(0)
    try:
        up = Up(tmp_path, simulate=2, arguments=arguments)
    finally:
        os.umask(before)
    with up:
        assert ctl(up.address, "apply", "-f", "-", stdin=ENDPOINT).out == "endpoints/stubborn created\n"

        def ready() -> list[Any]:
            replicas = data(up.address, "get", "replicas")["replicas"]
            return replicas if [item["state"] for item in replicas] == ["STATE_READY"] * 2 else []

        replicas = eventually_sync(ready)
        admitted = json.loads((data_dir / "agent" / "admissions.json").read_text())["fences"]
        assert {uuid for one in replicas for uuid in one["gpuUuids"]} == set(admitted), "before it starts"
        workers = [psutil.Process(int(one["pid"])) for one in replicas]
        assert {worker.ppid() for worker in workers} == {up.process.pid}
        wanted = ("replicas/*.json", "logs/stubborn/*.log", "audit", "*.db")
        eventually_sync(lambda: all(list(data_dir.glob(one)) for one in wanted))
        opened = []
        for path in (data_dir, *data_dir.rglob("*")):
            with suppress(FileNotFoundError):  # a new version of a file that has replaced the old one by now
                mode = path.lstat().st_mode
                if stat.S_ISSOCK(mode) or mode & 0o077:  # who shares the user could put another socket there
                    opened.append((str(path), oct(mode)))
        assert opened == []
        assert up.stop() == 0
        # What is killed is gone once the kernel comes to it.
        eventually_sync(lambda: not any(map(_runs, workers)))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.is_running()
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_refused_for_ever_while_it_starts(tmp_path: Path) -> None:
    """Asked from the moment it listens until its driver has opened: at the first start, and after kill -9."""
    need(why_unavailable())
    double, port = NvmlDouble(tmp_path, 1), free_port()
    arguments, environment = ("--listen", f"127.0.0.1:{port}"), ctl_environment(**env_with_double(double))
    for _ in range(2):
        opens = double.hold(double.rules, "nvmlInitWithFlags")
        double.write()
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(reasons_until_granted, port, opens)
            up = Up(tmp_path, arguments=arguments, environment=environment)
            reasons = asked.result(60)
            up.kill()
        assert "NO_CAPACITY" in reasons
        assert reasons <= {"NO_CAPACITY", "NO_TELEMETRY", "UNAVAILABLE"}


def reasons_until_granted(port: int, opens: Path) -> set[str]:
    """Reserve every few milliseconds; lets the driver open once something is said of the node."""
    eventually_sync(lambda: listens(port), timeout=60, interval=0.002)
    reasons = set[str]()
    with open_sync_channel(f"127.0.0.1:{port}") as channel:
        stub = allocator_api.AllocatorServiceStub(channel)
        while True:
            ask = allocator_api.Ask(gpu_count=1, max_utilization_percent=100)
            request = allocator_api.ReserveRequest(request_id=str(uuid4()), holder="first", ask=ask)
            try:
                with rpc_errors():
                    granted = stub.Reserve(request, timeout=60).reservation
            except GpuscaleError as error:
                reasons.add(error.reason)
                if reasons - {"NO_TELEMETRY", "UNAVAILABLE"}:
                    opens.touch()
                time.sleep(0.002)
            else:
                release = allocator_api.ReleaseReservationRequest(name=granted.name, fence=granted.fence)
                stub.ReleaseReservation(release, timeout=60)
                return reasons
