"""Two hosts where systemd seems to run: `init` and `join` write and start units, and `leave` takes them away."""

import os
import re
import sqlite3
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.cli import Ran
from tests.support.fixtures import need
from tests.support.hosts import Hosts, why_unavailable
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.nvml_double.build import library_folder
from tests.support.shell import Shell
from tests.support.systemctl_double import SystemctlDouble

SERVICES = ["gpuscale-fleet", "gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway"]
HOST = ["gpuscale-agent", "gpuscale-adapter"]


@pytest.mark.timeout(480)
def test_init_and_join_start_their_units_and_leave_removes_them(tmp_path: Path) -> None:
    need(why_unavailable() or why_no_double())
    library_folder().chmod(0o755)
    with Hosts(("first", "left"), tmp_path, shared=(library_folder(),)) as hosts, ExitStack() as shells:
        doubles = {name: SystemctlDouble(tmp_path / f"systemd-{name}") for name in ("first", "left")}
        (place := tmp_path / "double").mkdir()
        (driver := NvmlDouble(place)).write()

        at = dict[str, Shell]()
        finds = {key: value for key, value in env_with_double(driver).items() if os.environ.get(key) != value}
        for name, double in doubles.items():
            words, environment = hosts.typed(name, *double.words, user="root", environment=finds)
            at[name] = Shell(environment, words)
            shells.callback(at[name].close)

        def ctl(host: str, *words: str) -> Ran:
            return at[host].ctl(*words)

        where = ("--dir", str(tmp_path / "first"))
        planned = ctl("first", "init", "--host", "10.77.0.1", *where, "--plan").out
        assert not any(doubles["first"].units.iterdir())
        made = ctl("first", "init", "--host", "10.77.0.1", *where)
        assert made.code == 0, made.err
        added = ["useradd --system --shell /usr/sbin/nologin --home-dir /var/lib/gpuscale gpuscale"]
        started = [
            "systemctl daemon-reload",
            f"systemctl enable --now {' '.join(SERVICES)} gpuscale-certificates.timer",
        ]
        assert doubles["first"].calls() == [*added, *started]
        written = {file.stem for file in doubles["first"].units.iterdir()}
        assert written == {*SERVICES, "gpuscale-certificates"}
        for file in doubles["first"].units.iterdir():
            assert f"# /etc/systemd/system/{file.name}\n{file.read_text()}" in planned
        assert [f"# {line}" for line in (*added, *started)] == planned.splitlines()[-3:]
        pair = tmp_path / "first/pki/server.crt"
        old, unit = pair.read_bytes(), doubles["first"].units / "gpuscale-certificates.service"
        [renews] = [one.split()[1:] for one in unit.read_text().splitlines() if one.startswith("ExecStart=")]
        assert ctl("first", *renews).code == 0
        assert pair.read_bytes() != old
        line = re.search(r"^gpuscalectl (join \S+ --token \S+ --ca-hash \S+)$", made.out, re.MULTILINE)
        assert line is not None, made
        where = ("--dir", str(tmp_path / "left"))
        joined = ctl("left", *line[1].split(), "--node", "left", *where)
        assert (joined.code, joined.out) == (0, "left is ONLINE\n"), joined.err
        assert {file.stem for file in doubles["left"].units.iterdir()} == set(HOST)
        admin = f"--address 10.77.0.1:7070 --ca-file {tmp_path}/first/pki/ca.crt --token-file {tmp_path}/first/admin.token".split()
        typed = ("upgrade", "--config", str(tmp_path / "first" / "gpuscale.toml"))
        asked = ("reserve", "--gpus", "1", "--max-utilization", "100", "-o", "name")
        reserved = ctl("first", *admin, *asked).out.strip()
        before, calls = doubles["first"].pid(SERVICES[0]), len(doubles["first"].calls())
        planned = ctl("first", *admin, *typed, "--plan")
        assert planned.code == 0, planned
        for one in ("nodes/left", "adapters/left", "fleet", "allocator", "autoscaler", "10.77.0.1:7070"):
            assert re.search(rf"OK +{one} +its .* is {version('gpuscale')}", planned.out), planned
        assert (planned.out.count("which stays"), len(doubles["first"].calls())) == (3, calls), planned
        upgraded = ctl("first", *admin, *typed)
        assert upgraded.code == 0, upgraded.err
        assert (upgraded.out + upgraded.err).splitlines() == [f"{name} is restarted" for name in SERVICES]
        assert doubles["first"].calls()[calls:] == [f"systemctl restart {name}" for name in SERVICES]
        assert doubles["first"].pid(SERVICES[0]) != before
        assert reserved in ctl("first", *admin, "get", "reservations", "-o", "name").out
        with closing(sqlite3.connect(tmp_path / "first/state/autoscaler/autoscaler.db")) as store:
            store.execute("PRAGMA user_version=999")
        refused = ctl("first", *admin, *typed)
        assert (refused.code, "schema 999" in refused.err) == (4, True), refused
        assert len(doubles["first"].calls()) == calls + len(SERVICES)
        left = ctl("left", "leave", *where)
        assert left.code == 0, left.err
        stopped = [f"systemctl disable --now {' '.join(HOST)}", "systemctl daemon-reload"]
        assert doubles["left"].calls()[-2:] == stopped
        assert not any(doubles["left"].units.iterdir())
        assert not list((tmp_path / "left").rglob("*.toml"))
