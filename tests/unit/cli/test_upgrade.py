"""Which versions work together."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpuscale.allocator.state import schema as of_allocator
from gpuscale.autoscaler.state import store as of_autoscaler
from gpuscale.cli.commands import doctor, upgrade
from gpuscale.cli.commands.upgrade import fits, judged
from gpuscale.cli.console.command import Session
from gpuscale.monitor.state import store as of_fleet


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("0.1.0", "0.1.9", True),
        ("0.2.0", "0.1.0", True),
        ("0.1.0rc1", "0.2.0.dev3", True),
        ("0.3.0", "0.1.0", False),
        ("1.1.0", "0.1.0", False),
        ("1.10.0", "1.9.2", True),
        ("1.10.0", "1.1.0", False),
        ("", "0.1.0", False),
        ("unknown", "unknown", False),
    ],
)
def test_minor_versions_are_one_apart_at_most(one: str, other: str, expected: bool) -> None:
    assert (fits(one, other), fits(other, one)) == (expected, expected)


@pytest.mark.parametrize(
    ("program", "theirs", "expected"),
    [
        ("agent", "0.1.0", "WARN"),
        ("agent", "0.2.0", "OK"),
        ("gateway", "0.1.0", "OK"),
        ("adapter", "0.4.0", "FAIL"),
    ],
)
def test_agents_and_adapters_of_the_first_release_are_told(program: str, theirs: str, expected: str) -> None:
    """Services of now answer them `Method not found!`; a FAIL would keep the services from being upgraded first."""
    assert judged(program, theirs, "0.2.0")[0] == expected


@pytest.mark.parametrize(
    ("name", "newest"),
    [("fleet", of_fleet.VERSION), ("allocator", of_allocator.VERSION), ("autoscaler", of_autoscaler.VERSION)],
)
@pytest.mark.parametrize(("more", "state"), [(0, "OK"), (-1, "OK"), (1, "FAIL")])
def test_the_state_of_each_service_is_looked_at(
    tmp_path: Path, name: str, newest: int, more: int, state: str
) -> None:
    config = tmp_path / "gpuscale.toml"
    config.write_text(f'[{name}]\ndata_dir = "{tmp_path}"\n')
    with closing(sqlite3.connect(tmp_path / f"{name}.db")) as store:
        store.execute(f"PRAGMA user_version={newest + more}")
    [row] = upgrade._states(config)
    assert (row["what"], row["state"]) == (name, state), row


def test_a_gpu_host_asks_the_server_that_it_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else names one: not 127.0.0.1:7070, where no GPU host has a server."""
    for name in ("GPUSCALE_ADDRESS", "GPUSCALE_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = tmp_path / "gpuscale.toml"
    config.write_text('[agent]\nnode = "n"\nfleet_address = "first.example:7070,second.example:7070"\n')
    assert doctor.of_host(Session(), config).address == "first.example:7070,second.example:7070"
    assert doctor.of_host(Session(address="typed:1"), config).address == "typed:1"
    joined = config.read_text().replace(":7070", ":7072") + 'allocator_address = "first.example:7073"\n'
    config.write_text(joined)
    assert doctor.of_host(Session(), config) == Session(), "nothing here says where the autoscaler is"
    config.write_text(f'{joined}[adapter]\ndata_dir = "/x"\nautoscaler_address = "first.example:7074"\n')
    found = doctor.of_host(Session(), config)
    assert found.address == "first.example:7072,second.example:7072"
    autoscaler = dict.fromkeys(("endpoints", "adapters", "queue_watchers"), "first.example:7074")
    assert found.apart == {"allocator": "first.example:7073"} | autoscaler
    config.write_text(f"{config.read_text()}[gateway]\n")
    assert doctor.of_host(Session(), config).address is None, "it has a server itself"
    config.write_text("no = [toml")
    assert doctor.of_host(Session(), config) == Session()
