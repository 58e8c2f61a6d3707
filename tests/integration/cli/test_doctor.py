"""`gpuscalectl doctor`: each thing that can be wrong with a host is found, with what to do; nothing secret is shown."""

import json
import os
import pwd
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import trustme

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.commands import doctor, doctor_host, units
from gpuscale.common.errors import UnauthenticatedError
from gpuscale.common.security.certificate_authority import CertificateSubject, issue, make_authority
from gpuscale.testing import FakeServer
from tests.support.cli import Ran, run_cli
from tests.support.nvml_double import NvmlDouble, NvmlReturn, env_with_double
from tests.support.ports import free_port
from tests.support.tokens import write_tokens

SECRET = "s3cret-in-a-url"
NAMES = ("gpus.example", "127.0.0.1")
Settings = dict[str, dict[str, Any]]


class Host(NamedTuple):
    """A host that is well, with a server that is well; `settings` can be changed until `doctor`."""

    folder: Path
    server: FakeServer
    settings: Settings

    def write(self) -> Path:
        lines: list[str] = []
        for section, table in self.settings.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(str(value))}" for key, value in table.items())]
        file = self.folder / "gpuscale.toml"
        file.write_text("\n".join(lines))
        file.chmod(0o600)
        return file

    def doctor(self, *options: str) -> Ran:
        words = ("--address", self.server.address, "doctor", "--config", str(self.write()), *options)
        return run_cli(*words, "-o", "json")

    def findings(self, *options: str) -> dict[tuple[str, str], dict[str, str]]:
        ran = self.doctor(*options)
        assert SECRET not in ran.out + ran.err
        found = json.loads(ran.out)["findings"]
        assert ran.code == int(any(one["state"] == "FAIL" for one in found))
        assert all(one["advice"] for one in found if one["state"] != "OK")
        # The worst of each: several may tell of one thing.
        return {(one["check"], one["subject"]): one for one in reversed(found)}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Of all tests here, which only ask it."""
    with FakeServer(gpus=2) as running:
        yield running


@pytest.fixture
def host(tmp_path: Path, server: FakeServer) -> Iterator[Host]:
    authority = make_authority("test")
    authority.write(tmp_path, "ca")
    issue(authority, CertificateSubject("gpus", NAMES), 100).write(tmp_path, "server")
    token = tmp_path / "node.token"
    token.write_text(SECRET)
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as broker:
        nowhere = f"127.0.0.1:{broker.getsockname()[1]}"
        (data := tmp_path / "data").mkdir()
        upstream = {"fleet_address": server.address}
        yield Host(
            tmp_path,
            server,
            {
                "gateway": {"listen": server.address, "allocator_address": server.address, "autoscaler_address": server.address, **upstream},
                "allocator": {
                    "listen": server.address,
                    "advertise_address": "gpus.example:7073",
                    "data_dir": data,
                    "tls_cert_file": tmp_path / "server.crt",
                    "tls_key_file": tmp_path / "server.key",
                    "tokens_file": write_tokens(tmp_path / "tokens.toml", me="admin"),
                    **upstream,
                },
                "autoscaler": {"listen": server.address, "data_dir": data, "allocator_address": server.address, **upstream},
                "brokers.default": {"amqp_url": f"amqp://me:{SECRET}@{nowhere}"},
            },
        )  # fmt: skip


def test_what_is_not_for_this_user_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        doctor_host.Diagnosis("disk", f"agent {name}", "FAIL", f"/x/{name}: Permission denied", "do")
        for name in ("state_dir", "data_dir")
    ]
    monkeypatch.setattr(doctor_host, "_examine", lambda _file: iter(found))
    assert [*doctor_host.examine(tmp_path)] == found, "root is told each"
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("nobody").pw_uid)
    [one] = doctor_host.examine(tmp_path)
    assert (one.subject, one.state, one.advice) == ("agent", "WARN", "run it as root")


def test_a_certificate_of_a_host_that_joined_is_no_admins_to_renew(host: Host) -> None:
    ended(host)
    joined = shutil.copy(host.folder / "server.crt", host.folder / "server.pem")
    host.settings["allocator"]["tls_cert_file"] = joined
    assert "join again" in host.findings()["certificate", "allocator tls_cert_file"]["advice"]


def test_a_directory_that_only_the_flags_of_a_unit_name_is_looked_at(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in units that were installed by hand."""
    folder = host.settings["allocator"].pop("data_dir")
    monkeypatch.setattr(units, "SYSTEM", host.folder)
    assert host.findings("--only", "host")["settings", "allocator"]["found"] == "data_dir: Field required"
    shipped = Path("deploy/systemd/gpuscale-allocator.service").read_text()
    unit = host.folder / "gpuscale-allocator.service"
    unit.write_text(shipped.replace("/etc/gpuscale/gpuscale.toml", str(host.write())))
    change = host.folder / "gpuscale-allocator.service.d" / "override.conf"
    change.parent.mkdir()
    change.write_text(f"[Service]\nExecStart=\nExecStart=/x/gpuscale-allocator --data-dir={folder}\n")
    assert host.findings("--only", "host")["disk", "allocator data_dir"]["found"].endswith(
        f"left at {folder}"
    )
    change.unlink()
    flags = units.flags("gpuscale-allocator", host.write())
    assert flags == {"data_dir": "/var/lib/gpuscale/allocator"}
    assert not units.flags("gpuscale-allocator", host.folder), "it reads other settings"


def test_a_host_that_is_well(host: Host) -> None:
    found = host.findings()
    assert {key: one["found"] for key, one in found.items() if one["state"] == "FAIL"} == {}
    assert found.keys() >= {
        ("settings", "allocator"),
        ("port", "gateway listen"),
        ("certificate", "allocator tls_cert_file"),
        ("disk", "allocator data_dir"),
        ("service", "gateway allocator_address"),
        ("broker", "autoscaler brokers.default amqp_url"),
        ("service", "gateway"),
        ("driver", "nodes/node-0"),
    }


def sets(section: str, key: str, value: str) -> Callable[[Host], None]:
    def plant(host: Host) -> None:
        host.settings[section][key] = value.format(folder=host.folder, free=f"127.0.0.1:{free_port()}")

    return plant


def ends_soon(host: Host) -> None:
    lasts(host, -30, 3)


def lives_shortly(host: Host) -> None:
    """As certificates of hosts that join do, which are renewed in time."""
    issue(make_authority("x"), CertificateSubject("gpus", NAMES), 7).write(host.folder, "server")


def ended(host: Host) -> None:
    lasts(host, -2, -1)


def lasts(host: Host, begins: float, ends: float) -> None:
    """From and until so many days from now."""
    first, last = (datetime.now(UTC) + timedelta(days) for days in (begins, ends))
    made = trustme.CA().issue_cert(*NAMES, not_before=first, not_after=last)
    made.cert_chain_pems[0].write_to_path(host.folder / "server.crt")
    made.private_key_pem.write_to_path(host.folder / "server.key")


def other_key(host: Host) -> None:
    issue(make_authority("x"), CertificateSubject("gpus", NAMES), 9).write(host.folder, "other")
    shutil.copy(host.folder / "other.key", host.folder / "server.key")


def other_authority(host: Host) -> None:
    issue(make_authority("x"), CertificateSubject("gpus", NAMES), 99).write(host.folder, "server")
    host.settings["allocator"]["ca_file"] = host.folder / "ca.crt"


def open_token(host: Host) -> None:
    file = host.folder / "node.token"
    file.chmod(file.stat().st_mode | stat.S_IROTH)
    host.settings["allocator"]["token_file"] = file


def silent_upstream(host: Host) -> None:
    """It takes connections, as a service that is frozen does."""
    host.settings["gateway"]["fleet_address"] = host.settings["brokers.default"]["amqp_url"].rpartition("@")[
        2
    ]


def no_broker(host: Host) -> None:
    host.settings["brokers.default"]["amqp_url"] = f"amqp://me:{SECRET}@127.0.0.1:{free_port()}"


def no_database(host: Host) -> None:
    host.settings["allocator"]["database"] = f"postgresql://me:{SECRET}@127.0.0.1:{free_port()}/x"


def damaged_database(host: Host) -> None:
    (host.folder / "data" / "allocator.db").write_bytes(b"no database at all" * 100)


def damaged_fleet(host: Host) -> None:
    host.settings["fleet"] = {"data_dir": host.folder / "fleet", "listen": host.server.address}
    (host.folder / "fleet").mkdir()
    (host.folder / "fleet" / "fleet.db").write_bytes(b"no database at all" * 100)


@pytest.mark.parametrize(
    ("plant", "check", "subject", "state"),
    [
        (ended, "certificate", "allocator tls_cert_file", "FAIL"),
        (ends_soon, "certificate", "allocator tls_cert_file", "WARN"),
        (lives_shortly, "certificate", "allocator tls_cert_file", "OK"),
        (other_key, "certificate", "allocator tls_cert_file", "FAIL"),
        (other_authority, "certificate", "allocator tls_cert_file", "FAIL"),
        (
            sets("allocator", "advertise_address", "other.example:7073"),
            "certificate",
            "allocator tls_cert_file",
            "FAIL",
        ),
        (sets("allocator", "metrics_listen", "{free}"), "port", "allocator metrics_listen", "FAIL"),
        (sets("allocator", "data_dir", "{folder}/none"), "disk", "allocator data_dir", "FAIL"),
        (sets("allocator", "data_dri", "x"), "settings", "allocator", "FAIL"),
        (sets("gateway", "ca_file", "{folder}/none"), "certificate", "gateway ca_file", "FAIL"),
        (
            sets("allocator", "notify_ca_file", "{folder}/ca.crt"),
            "certificate",
            "allocator notify_ca_file",
            "OK",
        ),
        (open_token, "secret", "allocator token_file", "FAIL"),
        (sets("gateway", "fleet_address", "{free}"), "service", "gateway fleet_address", "FAIL"),
        (silent_upstream, "service", "gateway fleet_address", "FAIL"),
        (no_broker, "broker", "autoscaler brokers.default amqp_url", "FAIL"),
        (no_database, "database", "allocator database", "FAIL"),
        (damaged_database, "database", "allocator database", "FAIL"),
        (damaged_fleet, "database", "fleet database", "FAIL"),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(
    host: Host, plant: Callable[[Host], None], check: str, subject: str, state: str
) -> None:
    plant(host)
    # With ca_file it speaks TLS, which the server here does not; two services have the directory.
    also = {("service", "allocator fleet_address"), ("database", "autoscaler database")}
    found = host.findings("--only", "host")
    assert found[check, subject]["state"] == state, found
    assert "token rotate" not in found[check, subject]["advice"]
    wrong = {key for key, one in found.items() if one["state"] == "FAIL"}
    assert wrong - also <= {(check, subject)}


def test_who_only_passes_tokens_on_needs_none(host: Host) -> None:
    """As in deploy/systemd/services.toml, where services ask for tokens."""
    refused = UnauthenticatedError("a bearer token is required", reason="TOKEN_MISSING")
    host.server.fail("ListNodes", refused, 4)
    host.settings["dashboard"] = {
        "listen": host.server.address,
        "sign_in": "true",
        "gateway_address": host.server.address,
    }
    found = host.findings("--only", "host")
    wrong = {
        subject for (check, subject), one in found.items() if (check, one["state"]) == ("service", "FAIL")
    }
    assert wrong == {"allocator fleet_address", "autoscaler fleet_address"}


def test_up_is_examined_as_it_runs_and_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its parts would need of their own was missed; and a host without a file was called broken."""
    file, address = tmp_path / "up.toml", f"127.0.0.1:{free_port()}"
    file.write_text(f'[up]\nlisten = "{address}"\ndata_dir = "{tmp_path}"\n[allocator]\nmax_waiting = 9\n')
    ran = run_cli("doctor", "--only", "host", "--config", str(file), "-o", "json")
    wrong = [one["subject"] for one in json.loads(ran.out)["findings"] if one["state"] == "FAIL"]
    assert wrong == ["up listen"], "which does not run"
    monkeypatch.setattr(doctor, "USUAL", tmp_path / "none.toml")
    assert run_cli("doctor", "--only", "host").code == 0


def test_a_full_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=10**12, free=10**8)
    monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda _: usage)
    found = host.findings("--only", "host")
    states = [found["disk", f"{one} data_dir"]["state"] for one in ("allocator", "autoscaler")]
    assert states == ["FAIL", "FAIL"]


def test_clocks_and_versions_that_differ_and_hosts_that_are_away(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = monitor_api.NodeState.NODE_STATE_ONLINE

    def node(name: str, behind: float, agent_version: str, state: int = online) -> monitor_api.Node:
        one = monitor_api.Node(name=f"nodes/{name}", agent_version=agent_version)
        one.state = monitor_api.NodeState.ValueType(state)
        one.snapshot.sample_time.FromDatetime(datetime.now(UTC) - timedelta(seconds=behind + 1))
        one.snapshot.age.FromSeconds(1)
        return one

    own = version("gpuscale")
    nodes = [
        node("well", 0, own),
        node("late", 60, own),
        node("early", -5, own),
        node("old", 0, "0.0.9"),
        node("patched", 0, own.rpartition(".")[0] + ".99"),
        node("gone", 0, own, monitor_api.NodeState.NODE_STATE_OFFLINE),
    ]
    monkeypatch.setattr("gpuscale.cli.console.lookup.nodes", lambda *_: nodes)
    found = host.findings("--only", "fleet")
    clocks = {subject: one["state"] for (check, subject), one in found.items() if check == "clock"}
    right = dict.fromkeys(("nodes/well", "nodes/old", "nodes/patched"), "OK")
    assert clocks == right | {"nodes/late": "FAIL", "nodes/early": "WARN"}
    assert found["clock", "nodes/late"]["found"] == "is 60 s behind this host's"
    versions = {subject: one["state"] for (check, subject), one in found.items() if check == "version"}
    assert versions == {"nodes/old": "FAIL", "nodes/patched": "WARN"}
    assert found["node", "nodes/gone"]["state"] == "FAIL"
    assert not any(check in {"port", "certificate", "settings"} for check, _ in found)


def test_a_server_that_is_away() -> None:
    ran = run_cli("--address", f"127.0.0.1:{free_port()}", "doctor", "--only", "fleet", "-o", "json")
    [one] = json.loads(ran.out)["findings"]
    assert (one["check"], one["subject"], one["state"], ran.code) == ("service", "gateway", "FAIL", 1)


def test_adapters_and_brokers_that_are_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [
        api.Adapter(name="adapters/a", kind="process", state=api.Adapter.STATE_CONNECTED),
        api.Adapter(name="adapters/b", state=api.Adapter.STATE_DISCONNECTED),
    ]
    watcher = api.QueueWatcher(name="watchers/w", spec=api.QueueWatcherSpec(broker="default", queue="q"))
    watcher.status.state = api.QueueWatcherStatus.State.STATE_UNREACHABLE
    monkeypatch.setattr("gpuscale.cli.console.lookup.adapters", lambda *_: adapters)
    monkeypatch.setattr("gpuscale.cli.console.lookup.watchers", lambda *_: [watcher])
    found = host.findings("--only", "fleet")
    assert found["adapter", "adapters/a"]["state"] == "OK"
    assert found["adapter", "adapters/b"]["state"] == "FAIL"
    assert found["broker", "watchers/w"]["found"] == "UNREACHABLE: queue q"


def test_signals_that_show_nothing_are_told_with_why(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = api.Endpoint(status=api.EndpointStatus(latest_decision="endpoints/e/decisions/7"))
    decision = api.Decision(name=endpoint.status.latest_decision)
    decision.observations.add(signal="depth", status=api.Observation.STATUS_OK)
    silent = "Prometheus server main does not answer within 5 s"
    decision.observations.add(signal="load", status=api.Observation.STATUS_MISSING, detail=silent)
    monkeypatch.setattr("gpuscale.cli.console.lookup.endpoints", lambda *_: [endpoint, api.Endpoint()])
    asked = {(decision.name,): [decision]}
    monkeypatch.setattr("gpuscale.cli.console.lookup.decisions", lambda _, names: asked[tuple(names)])
    found = host.findings("--only", "fleet")
    signals = {
        subject: (one["state"], one["found"]) for (check, subject), one in found.items() if check == "signal"
    }
    assert signals == {"endpoints/e load": ("WARN", f"MISSING: {silent}")}


def test_the_driver_is_asked_in_a_process_of_its_own(
    tmp_path: Path, nvml_double: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("LD_LIBRARY_PATH", "NVML_DOUBLE_CONFIG"):
        monkeypatch.setitem(os.environ, key, env_with_double(nvml_double)[key])
    file = tmp_path / "gpuscale.toml"
    file.write_text('[agent]\nsource = "nvml"\n')

    def driver() -> tuple[str, str]:
        ran = run_cli("doctor", "--only", "host", "--config", str(file), "-o", "json")
        [one] = [one for one in json.loads(ran.out)["findings"] if one["check"] == "driver"]
        return one["state"], one["found"]

    assert driver() == ("OK", "driver 550.54.15 shows 2 GPUs")
    nvml_double.fail_start(NvmlReturn.DRIVER_NOT_LOADED)
    nvml_double.write()
    state, why = driver()
    assert (state, "Driver Not Loaded" in why) == ("FAIL", True)
