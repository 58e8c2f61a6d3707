"""`gpuscalectl --help` is there at once: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contract.cli.canned_gateway import World
from tests.support.cli import python

ROOT = Path(__file__).parents[3]
HEAVY = {
    *("grpc", "google.protobuf", "ruamel", "rich", "pydantic", "structlog", "sqlmodel", "numpy", "nicegui"),
    *("ssl", "asyncio.events"),
}
FOR_CALLS = {"grpc", "google.protobuf"}
LIST = """
import sys
from gpuscale.cli import main
sys.argv = ["gpuscalectl", *{arguments!r}]
try:
    main.main()
except SystemExit as ended:
    whole = {{name for name, module in sys.modules.items() if type(module).__name__ != "_Deferred"}}
    print("loaded:", ended.code, *whole.intersection({heavy!r}))
"""


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("--help", set[str]()),
        ("get --help", set[str]()),
        ("get gpus", FOR_CALLS),
        ("up --help", {"pydantic"}),
        ("dashboard --help", {"pydantic"}),
    ],
)
def test_a_command_loads_nothing_heavy_that_it_does_not_need(
    arguments: str, needed: set[str], gateway: tuple[str, World]
) -> None:
    heavy = sorted(HEAVY - needed)
    words = [*arguments.split(), "--address", gateway[0]]
    program = LIST.format(arguments=words, heavy=heavy)
    ran = python(program)
    assert ran.out.splitlines()[-1:] == ["loaded: 0"], ran


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
import {module}
{module}.{function}()
"""


def test_ctrl_c_while_the_program_is_imported_shows_no_traceback() -> None:
    """By the entry that is installed; the shell says 130 of a process that a SIGINT ended."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["gpuscalectl"]
    module, _, function = entry.partition(":")
    program = INTERRUPTED.format(module=module, function=function)
    ran = python(program)
    assert (ran.code, ran.err) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [("apply -f -", "nothing to apply"), ("delete endpoint x", "standard input is not a terminal")],
)
def test_a_closed_standard_input_is_an_empty_one(words: str, problem: str) -> None:
    """As of some schedulers of jobs; a socket of gRPC took its number."""
    program = f"import sys, gpuscale.cli as cli; sys.argv = ['gpuscalectl', *{words.split()}]; cli.start()"
    shell = ("sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", program)
    ran = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode in {0, 2}, ran.stderr
    assert problem in ran.stderr


WITHOUT_PACKAGES = """
import importlib, os, sys
importlib.import_module("gpuscale.common.programs").import_grpc()  # once for all
for one in ("click", "pydantic", "structlog"):
    sys.modules[one] = None
for name, entry in {entries!r}.items():
    if pid := os.fork():
        print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=sys.stderr)
        continue
    sys.argv = [name, "--version"]
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)())
"""


def test_a_program_whose_packages_are_missing_says_what_to_install() -> None:
    """As where the client alone was installed: pip makes the scripts of all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["scripts"]
    for helper in ("gpuscale-killer", "gpuscale-power"):
        del entries[helper]  # needs no package, or that of the driver alone
    program = WITHOUT_PACKAGES.format(entries=entries)
    ran = python(program)
    lines = iter(ran.err.splitlines())
    for name in entries:
        line, code = next(lines), next(lines)
        said = re.fullmatch(
            rf"{name}: the Python package \w+ is missing: pip install 'gpuscale\[(\w+)\]'", line
        )
        assert said is not None, (name, ran.err)
        assert code == f"{name} 1"
        assert said[1] in project["optional-dependencies"], name


FORKS = """
import asyncio, os
from gpuscale.common.programs import import_grpc
if {ours}:
    import_grpc()
import grpc.aio, uvloop
async def main():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    await server.stop(None)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
print("GRPC_ENABLE_FORK_SUPPORT" in os.environ)
"""


@pytest.mark.parametrize("ours", [True, False])
def test_no_handler_of_grpc_runs_in_a_child_of_a_program(ours: bool) -> None:
    """It may crash a probe before it runs. gRPC's own default does run them, and says so when threads are in calls."""
    ran = python(FORKS.format(ours=ours), environment=os.environ | {"GRPC_VERBOSITY": "INFO"})
    assert (ran.out, "fork() handlers" in ran.err) == ("False\n", not ours), ran


def test_a_program_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """By the scripts that pip makes, under their own names alone."""
    script = Path(sys.executable).with_name("gpuscale-adapter")
    ran = subprocess.run([script, "nosuch"], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "nosuch" in ran.stderr) == (2, True)
    other = tmp_path / "gpuscale-other"
    other.symlink_to(script)
    ran = subprocess.run([other], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "is no program of gpuscale" in ran.stderr) == (1, True)
