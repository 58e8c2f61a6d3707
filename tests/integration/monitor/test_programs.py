"""The agent as a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.ports import free_port

Started = list[subprocess.Popen[str]]
HEAVY = (
    "cryptography",
    "difflib",
    "gpuscale.common.filters",
    "httpx",
    "importlib.metadata",
    "multiprocessing",
    "numpy",
    "pydantic",
    "pydantic_core",
    "sqlalchemy",
)


@pytest.fixture
def started() -> Iterator[Started]:
    processes: Started = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: Started, *flags: str) -> subprocess.Popen[str]:
    code = "import sys; from gpuscale.monitor.app.agent import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(process)
    return process


def test_an_agent_has_nothing_in_its_memory_that_it_can_do_without(
    started: Started, tmp_path: Path, nvml_double: NvmlDouble
) -> None:
    """Each of these takes 1 to 16 MB on every host; what reads settings is the memory of another process."""
    code = "import sys; from gpuscale.monitor.app.agent import main; main()\n"
    code += f"print('pynvml' in sys.modules, [name for name in {HEAVY!r} if name in sys.modules])"
    flags = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    agent = subprocess.Popen(
        [sys.executable, "-c", code, *flags, "--fleet-address", f"127.0.0.1:{free_port()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env_with_double(nvml_double),
        text=True,
    )
    started.append(agent)
    assert agent.stderr is not None
    assert any("agent serves" in line for line in agent.stderr)
    agent.send_signal(signal.SIGTERM)
    assert agent.communicate(timeout=200)[0] == "True []\n"


def test_what_is_wrong_with_flags_is_said_once_and_help_is_no_failure(started: Started) -> None:
    wrong, asked = start(started, "--nod", "x"), start(started, "--help")
    out, err = wrong.communicate(timeout=200)
    assert (wrong.returncode, out, err.count("\n")) == (2, "", 1)
    assert "unknown flag --nod" in err
    out, err = asked.communicate(timeout=200)
    assert (asked.returncode, err) == (0, "")
    assert "--period-seconds" in out
