"""Tab completes commands, options, values and live names, in a real bash too; nothing is said where nobody answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.cli import canned_gateway as canned
from tests.support.cli import run_cli
from tests.support.fixtures import need
from tests.support.ports import silent_port


@pytest.fixture
def address() -> Iterator[str]:
    with canned.canned_gateway() as (address, _):
        yield address


def completed(typed: str, shell: str = "bash", **environment: str) -> list[str]:
    """What a shell is told may stand in place of the last word."""
    words = f"gpuscalectl {typed}"
    ran = run_cli(
        environment={
            "_GPUSCALECTL_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": words if shell != "fish" else words.rpartition(" ")[0],
            "COMP_CWORD": str(words.count(" ")) if shell != "fish" else words.rpartition(" ")[2],
            **environment,
        }
    )
    assert (ran.code, ran.err) == (0, "")
    return ran.out.splitlines()


@pytest.fixture
def complete(address: str) -> Any:
    def run(typed: str, shell: str = "bash") -> list[str]:
        found = completed(typed, shell, GPUSCALE_ADDRESS=address)
        return [one.removeprefix("plain,") for one in found] if shell == "bash" else found

    return run


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("ge", ["get"]),
        ("get no", ["nodes", "notifications"]),
        ("get -l a=b no", ["nodes", "notifications"]),
        ("get nodes h", ["host-1"]),
        ("get no ", ["host-1"]),
        ("get ep -o json -w ", ["jobs"]),
        ("get gpu GPU-", list(canned.UUIDS)),
        ("get decisions ", ["jobs/d1"]),
        ("get quotas ", ["vision"]),
        ("delete endpoint j", ["jobs"]),
        ("delete rule ", ["jobs/up"]),
        ("scale ep --replicas 3 ", ["jobs"]),
        ("explain reservation ", ["r1"]),
        ("renew ", ["r1"]),
        ("drain ", ["host-1"]),
        ("get replicas -e ", ["jobs"]),
        ("wait ep ", ["jobs"]),
        ("describe node ", ["host-1"]),
        ("describe bud", ["budgets"]),
        ("logs ", ["jobs", "r1"]),
        ("wait ep jobs --for ", ["ready", "deleted"]),
        ("wait ep jobs --for = d", ["deleted"]),
        ("get replicas --endpoint j", ["jobs"]),
        ("get nodes -o js", ["json", "jsonl", "jsonpath="]),
        ("get nodes --output = yam", ["yaml"]),
        ("--context = [ :: 1] : 7070 get no", ["nodes", "notifications"]),
        ("get nodes --sor", ["--sort-by"]),
        ("get nodes --no-h", ["--no-headers"]),
        ("reserve --gpus 1 --policy p", ["pack"]),
        ("reserve --req", ["--request-id", "--request-timeout"]),
        ("preset show ", ["keda"]),
        ("run --gpus 1 -- l", []),
        ("completion z", ["zsh"]),
        ("apply -f ", ["file,"]),
        ("", None),
    ],
)
def test_what_may_stand_next(complete: Any, typed: str, found: list[str] | None) -> None:
    got = complete(typed)
    assert got == found if found is not None else {"get", "apply", "explain"} < set(got)


def test_other_shells_get_words_with_their_meaning(complete: Any) -> None:
    help_of_nodes = "List hosts with an agent: state, CPU, memory, load."
    assert complete("get nod", "zsh") == ["plain", "nodes", help_of_nodes]
    assert complete("get nodes -o yam", "zsh") == ["plain", "yaml", "_"]
    assert "nodes" in complete("get nod", "fish")[0]
    assert complete("get nodes --output=yam", "zsh") == ["plain", "--output=yaml", "_"], "the whole word"
    assert complete("get nodes --output=yam", "fish") == ["plain,--output=yaml"]


def test_contexts_are_completed(tmp_path: Path) -> None:
    environment = {"GPUSCALE_CONTEXTS": str(tmp_path / "contexts.toml")}
    run_cli("config", "set-context", "lab", "--address", "h:1", environment=environment)
    for typed in ("config use-context ", "get nodes --context "):
        assert completed(typed, **environment) == ["plain,lab"]


def test_without_a_server_there_are_no_names_and_no_noise() -> None:
    with silent_port() as port:
        assert completed(f"--address 127.0.0.1:{port} get nodes ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    assert f"_GPUSCALECTL_COMPLETE={shell}_complete" in run_cli("completion", shell).out


def test_fish_cuts_no_meaning_at_its_comma() -> None:
    assert 'string split --max 1 ","' in run_cli("completion", "fish").out


def test_a_real_bash_completes(address: str, tmp_path: Path) -> None:
    """The script as it is written, sourced by bash, with the program on its path."""
    if (bash := shutil.which("bash")) is None:
        need("bash is not installed")
    program = tmp_path / "gpuscalectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuscale.cli.main "$@"\n')
    program.chmod(0o700)
    script = """
        source <(gpuscalectl completion bash)
        ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _gpuscalectl_completion gpuscalectl; echo "${COMPREPLY[*]}"; }
        ask gpuscalectl get no
        ask gpuscalectl get endpoints ''
        ask gpuscalectl get nodes --output = wid
        complete -p gpuscalectl
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUSCALE_ADDRESS": address}
    words = str(bash), "--norc", "-c", script
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    installed = "complete -o nosort -F _gpuscalectl_completion gpuscalectl"
    assert ran.stdout.splitlines() == ["nodes notifications", "jobs", "wide", installed]
