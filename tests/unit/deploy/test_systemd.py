"""The units of deploy/systemd start programs that there are, with flags that they take, and systemd accepts them."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpuscale.cli.commands.units import STATE, unit_files
from gpuscale.common.config.sources import load_table
from gpuscale.common.rpc.channel import AGENT_SOCKET
from gpuscale.monitor import killer, power
from tests.unit.docs.pages import ROOT, programs, scripts

KILLER, POWER = "gpuscale-killer", "gpuscale-power"
"""Have no settings but their flags."""
UNITS = sorted([*(ROOT / "deploy" / "systemd").glob("*.service"), *ROOT.glob("addons/*/*.service")])


def command(unit: Path) -> list[str]:
    [line] = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return line.removeprefix("ExecStart=").split()


def test_every_service_has_a_unit() -> None:
    assert {unit.stem for unit in UNITS} == scripts() - {"gpuscalectl"}


@pytest.mark.parametrize(
    "unit", [one for one in UNITS if one.stem not in {KILLER, POWER}], ids=lambda unit: unit.stem
)
def test_it_starts_the_program_of_its_name_with_settings_of_that_program(unit: Path) -> None:
    program, *flags = command(unit)
    assert Path(program).name == unit.stem
    [settings] = [one for one in programs() if f"gpuscale-{one.section.replace('_', '-')}" == unit.stem]
    names = [flag.removeprefix("--").partition("=")[0].replace("-", "_") for flag in flags]
    assert set(names) <= set(settings.model_fields)
    required = {name for name, field in settings.model_fields.items() if field.is_required()}
    assert required <= set(names), "it starts without a file of settings"


@pytest.mark.parametrize(
    ("program", "helper", "user", "stop"),
    [
        (
            KILLER,
            killer,
            "DynamicUser=yes",
            killer.MOST_GRACE + 10,
        ),  # what has its SIGTERM is seen to the end
        (POWER, power, "StateDirectory=gpuscale-power", 30.0),
    ],
)
def test_a_helper_hears_the_agents_user_where_the_agent_looks_for_it(
    program: str, helper: Any, user: str, stop: float
) -> None:
    unit, agent = (ROOT / "deploy" / "systemd" / f"{name}.service" for name in (program, "gpuscale-agent"))
    started, *flags = command(unit)
    given = helper.parser().parse_args(flags)
    assert (Path(started).name, f"User={given.agent_user}") == (program, "User=gpuscale")
    assert f"--{program.removeprefix('gpuscale-')}-socket={given.socket}" in command(agent)
    lines = set(unit.read_text().splitlines())
    assert lines >= {user, f"RuntimeDirectory={program}", f"TimeoutStopSec={stop:g}"}
    assert "found_file" not in given or str(given.found_file) == f"%S/{program}/found.json"


@pytest.mark.parametrize(
    ("program", "flag", "directory"),
    [
        # Without a directory a restart forgets fences, and work with an older one would be admitted.
        ("agent", "--state-dir=%S/gpuscale/agent", "StateDirectory=gpuscale gpuscale/agent"),
        (
            "gateway",
            "--audit-file=%L/gpuscale/gateway/audit.jsonl",
            "LogsDirectory=gpuscale gpuscale/gateway",
        ),
    ],
)
def test_the_agent_keeps_the_fences_of_its_work_and_the_gateway_can_write_its_audit_log(
    program: str, flag: str, directory: str
) -> None:
    unit = ROOT / "deploy" / "systemd" / f"gpuscale-{program}.service"
    assert flag in command(unit)
    assert directory in unit.read_text().splitlines()


def test_work_is_admitted_on_the_agents_socket() -> None:
    """Where adapters and clients look for it, in a directory of the agent's."""
    lines = (ROOT / "deploy" / "systemd" / "gpuscale-agent.service").read_text().splitlines()
    [flag] = [one for one in " ".join(lines).split() if one.startswith("--work-socket=")]
    assert flag.removeprefix("--work-socket=").replace("%t", "/run") == str(AGENT_SOCKET)
    assert {"User=gpuscale", "RuntimeDirectory=gpuscale", "RuntimeDirectoryMode=0755"} <= set(lines)
    host = tomllib.loads((ROOT / "deploy" / "systemd" / "gpu-host.toml").read_text())
    assert host["adapter"]["agent_address"] == f"unix:{AGENT_SOCKET}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_has_no_rights_beyond_those_of_a_service(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert {
        "NoNewPrivileges=yes", "SystemCallFilter=@system-service", "SystemCallArchitectures=native",
        "LimitCORE=0", "LimitNOFILE=65536",
    } <= set(lines)  # fmt: skip
    rights = [line for line in lines if line.startswith(("CapabilityBoundingSet=", "AmbientCapabilities="))]
    if unit.stem == "gpuscale-adapter":
        needed = "CAP_SETUID CAP_SETGID CAP_KILL CAP_SYS_PTRACE"
        assert rights == [f"CapabilityBoundingSet={needed}", f"AmbientCapabilities={needed}"]
    elif unit.stem == KILLER:
        assert rights == ["AmbientCapabilities=CAP_KILL", "CapabilityBoundingSet=CAP_KILL"]
    elif unit.stem == POWER:
        assert rights == ["CapabilityBoundingSet=CAP_SYS_ADMIN"]
    else:
        assert rights == ["CapabilityBoundingSet="]


def test_workers_are_another_user_than_the_programs_whose_files_they_must_not_read() -> None:
    """The user is made, and no file of a token or key is given to it, where docs/deploy.md says how to install."""
    unit = ROOT / "deploy" / "systemd" / "gpuscale-adapter.service"
    assert "--worker-user=gpuscale-worker" in command(unit)
    assert "User=gpuscale" in unit.read_text().splitlines()
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert "useradd --system --no-create-home --shell /usr/sbin/nologin gpuscale-worker" in page
    installed = [line for line in page.splitlines() if "/etc/gpuscale" in line and "install" in line]
    assert all("-m 0640 -g gpuscale " in line or "-m 0750 -g gpuscale " in line for line in installed)


@pytest.mark.parametrize("name", ["gpuscale-adapter", "gpuscale-ray-adapter"])
def test_what_starts_programs_of_others_leaves_them_a_place_for_temporary_files(name: str) -> None:
    """`ProtectSystem=strict` makes /tmp read-only as well; one of its own would be removed under workers that live on."""
    [unit] = [unit for unit in UNITS if unit.stem == name]
    lines = unit.read_text().splitlines()
    assert "ProtectSystem=strict" in lines
    assert any(line.startswith("ReadWritePaths=/tmp") for line in lines)


@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("services.toml", {"fleet", "allocator", "autoscaler", "gateway", "dashboard"}),
        ("gpu-host.toml", {"agent", "adapter"}),
    ],
)
def test_the_files_of_settings_hold_what_their_programs_take(file: str, sections: set[str]) -> None:
    table = tomllib.loads((ROOT / "deploy" / "systemd" / file).read_text())
    kinds = {one.section: one for one in programs()}
    assert set(table) - {"templates"} == sections
    for section in sections:
        required = {name for name, field in kinds[section].model_fields.items() if field.is_required()}
        load_table(kinds[section], table, dict.fromkeys(required, "/var/lib/gpuscale"), {})
    remote = [one for one in sections if str(table[one].get("listen", "")).startswith("0.0.0.0")]
    assert all("tls_cert_file" in table[one] for one in remote)


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd); the tests above have to do")
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_systemd_accepts_them(tmp_path: Path) -> None:
    for unit in UNITS:
        # The program is not installed where the unit looks for it.
        text = unit.read_text().replace(command(unit)[0], "/bin/true").replace("User=gpuscale", "User=root")
        (tmp_path / unit.name).write_text(text)
    done = analyze("verify", "--man=no", *sorted(tmp_path.iterdir()))
    assert [line for line in done.stderr.splitlines() if "gpuscale-" in line] == []


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize("state", [Path("/var/lib/gpuscale"), Path("/srv/gpus/state")])
def test_systemd_accepts_those_that_init_and_join_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, state: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    names = ["agent", "adapter", "fleet", "allocator", "autoscaler", "gateway"]
    written = unit_files([f"gpuscale-{name}" for name in names], Path("/srv/gpus/gpuscale.toml"), state)
    assert {file.parent.parts[-2:] for file in written} == {
        ("systemd", "user") if user else ("systemd", "system")
    }
    for file, text in written.items():
        (tmp_path / file.name).write_text(text.replace("User=gpuscale", "User=root"))
        if file.stem == "gpuscale-certificates":
            assert "/etc/gpuscale" not in text
            continue
        assert "Environment=GPUSCALE_CONFIG=/srv/gpus/gpuscale.toml" in text.splitlines()
        assert ("User=gpuscale" in text, "%S" in text) == (
            not user,
            not user and state == STATE and "%S" in (ROOT / "deploy/systemd" / file.name).read_text(),
        )
        assert (f"ReadWritePaths={state}" in text) == (not user and state != STATE)
    done = analyze(*(["--user"] if user else []), "verify", "--man=no", *sorted(tmp_path.iterdir()))
    assert [line for line in done.stderr.splitlines() if "gpuscale-" in line] == []


EXPOSED = 3.0
"""Most that systemd may call a unit exposed, of 10."""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_is_no_more_exposed_than_it_has_to_be(unit: Path) -> None:
    done = analyze("security", "--offline=yes", f"--threshold={round(10 * EXPOSED)}", unit)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert f"for {unit.name}: " in done.stdout
