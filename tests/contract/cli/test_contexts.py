"""Servers by name: the file of contexts, and what counts when several things say where the server is."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuscale.client.connection import read_contexts
from gpuscale.common.errors import UnauthenticatedError
from gpuscale.testing import FakeServer
from tests.contract.cli import canned_gateway as canned
from tests.support.cli import Ran, run_cli
from tests.support.ports import free_port


@pytest.fixture
def gateway() -> Iterator[str]:
    with canned.canned_gateway() as (address, _):
        yield address


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "contexts.toml"


@pytest.fixture
def ctl(file: Path) -> Any:
    def run(*arguments: str, **environment: str) -> Ran:
        return run_cli(*arguments, environment={"GPUSCALE_CONTEXTS": str(file), **environment})

    return run


def test_contexts_are_kept_and_used(ctl: Any, gateway: str, file: Path, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    added = ctl("config", "set-context", "lab", "--address", gateway)
    assert added.out == "lab added; the current context is lab\n"
    assert ctl("config", "set-context", "other", "--address", nobody).code == 0
    assert ctl("get", "nodes", "-o", "name").out == "nodes/host-1\n"
    assert ctl("get", "nodes", "--context", "other").code == 7
    assert ctl("get", "nodes", GPUSCALE_CONTEXT="other").code == 7
    assert ctl("get", "nodes", "--address", nobody).code == 7
    assert ctl("get", "nodes", "--context", "lab", GPUSCALE_CONTEXT="other").code == 0
    assert ctl("config", "use-context", "other").out == "other is the current context\n"
    assert ctl("get", "nodes").code == 7
    assert ctl("config", "current-context").out == "other\n"
    assert oct(file.stat().st_mode & 0o777) == "0o600"


def test_a_dashboard_is_that_of_the_context(ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr("gpuscale.dashboard.main.main", told.append)
    ctl("config", "set-context", "lab", "--address", "h:1", "--ca-file", "/ca.pem", "--token-file", "/mine")
    for typed in ("--sign-in", "--address x:2 --token-file /t--address", "--config c.toml"):
        ctl("dashboard", *typed.split())
    lab = ["--gateway-address=h:1", "--ca-file=/ca.pem", "--sign-in"]
    assert told == [lab, ["--gateway-address=x:2", "--token-file=/t--address"], ["--config", "c.toml"]]


def test_a_code_is_not_spent_where_its_login_cannot_be_kept(ctl: Any, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.write_text("b84b89e7.Bn9lPfnkdMMUoO\n")
    code.chmod(0o600)
    words = ("login", f"127.0.0.1:{free_port()}", "--code-file", str(code))
    ran = ctl(*words, GPUSCALE_CONTEXTS="/proc/home/contexts.toml")  # as in a home that is read-only or full
    assert (ran.code, ran.err) == (4, "error: cannot write /proc/home: No such file or directory\n")


def test_a_login_that_expired_says_how_to_log_in_again(ctl: Any, file: Path) -> None:
    """Only where the token that was sent came from one."""
    file.parent.mkdir()
    kept, other = file.parent / "lab.token", file.parent.parent / "other"
    with FakeServer() as server:
        for token in (kept, other):
            token.write_text("secret")
            ctl("config", "set-context", token.stem, "--address", server.address, "--token-file", str(token))
        server.fail("ListNodes", UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED"), 4)
        mine = ctl("get", "nodes", "--context", "lab").err
        kept.with_suffix(".login").touch()
        at_provider = ctl("get", "nodes", "--context", "lab").err
        typed = (["--context", "other"], ["--token-file", str(kept)])
        others = [ctl("get", "nodes", *more).err for more in typed]
    again = f"gpuscalectl login {server.address}"
    assert mine.splitlines()[1:] == [f"to log in again, with a new code of an admin: {again} --as lab"]
    assert at_provider.splitlines()[1:] == [f"to log in again: {again} --oidc --as lab"]
    assert {len(one.splitlines()) for one in others} == {1}


def test_what_is_not_given_stays(ctl: Any, file: Path) -> None:
    ctl("config", "set-context", 'a"b', "--address", "h:1", "--ca-file", "/ca.pem")
    ctl("config", "set-context", 'a"b', "--token-file", "/token")
    [one] = read_contexts(file).by_name.values()
    assert (one.address, str(one.ca_file), str(one.token_file)) == ("h:1", "/ca.pem", "/token")
    [listed] = json.loads(ctl("config", "get-contexts", "-o", "json").out)["contexts"]
    files = {"token_file": "/token", "ca_file": "/ca.pem"}
    assert listed == {"name": 'a"b', "current": "*", "address": "h:1", **files}
    row = ctl("config", "get-contexts").out.splitlines()[1]
    assert row.split() == ["*", 'a"b', "h:1", "/ca.pem", "/token"]
    assert json.loads(ctl("config", "view", "-o", "json").out)["current_context"] == 'a"b'


def test_a_context_is_deleted(ctl: Any, file: Path) -> None:
    ctl("config", "set-context", "lab", "--address", "h:1")
    assert ctl("config", "delete-context", "lab").out == "lab deleted\n"
    assert read_contexts(file) == type(read_contexts(file))("", {})
    listed = ctl("config", "get-contexts")
    assert (listed.code, "gpuscalectl config set-context" in listed.err) == (0, True)
    assert ctl("config", "current-context").code == 3


def test_what_is_wrong_is_said(ctl: Any, file: Path) -> None:
    ctl("config", "set-context", "lab", "--address", "h:1")
    ran = ctl("config", "use-context", "lba")
    assert (ran.code, "did you mean lab?" in ran.err) == (3, True)
    assert ctl("config", "set-context", "new").code == 2
    assert ctl("get", "nodes", "--context", "lba").code == 2
    file.write_text("contexts = 1")
    assert ctl("config", "get-contexts").code == 2


def test_a_host_that_never_answers_is_given_up_on_in_time() -> None:
    """The connection is taken, and nothing ever comes back: that is no late answer to a call.

    The time that an attempt gets where nothing is said, 5 s, would be longer than the call may take, and the code another.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        limits = ("--dial-timeout", "200ms", "--request-timeout", "4s")
        ran = run_cli("--address", address, *limits, "get", "nodes")
    assert (ran.code, ran.out) == (7, "")
    assert "nothing answers at" in ran.err
