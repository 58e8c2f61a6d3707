"""The agent as a process of its own."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.forked import Forked
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.ports import free_port
from tests.support.up import ctl_environment

HEAVY = (
    "argparse",
    "cryptography",
    "difflib",
    "gpuscale.common.filters",
    "gpuscale.monitor.agent.helpers",
    "httpx",
    "importlib.metadata",
    "importlib.resources",
    "multiprocessing",
    "numpy",
    "pydantic",
    "pydantic_core",
    "sqlalchemy",
    "statistics",
    "tomllib",
)


def test_an_agent_has_nothing_in_its_memory_that_it_can_do_without(
    tmp_path: Path, nvml_double: NvmlDouble
) -> None:
    """Each of these takes 0.1 to 16 MB on every host; what reads settings is the memory of another process."""
    code = "import sys; from gpuscale.monitor.app.agent import main; main()\n"
    code += f"print('pynvml' in sys.modules, [name for name in {HEAVY!r} if name in sys.modules])"
    flags = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code, *flags, "--fleet-address", f"127.0.0.1:{free_port()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env_with_double(nvml_double),
        text=True,
    ) as agent:
        try:
            assert agent.stderr is not None
            assert any("agent serves" in line for line in agent.stderr)
            agent.send_signal(signal.SIGTERM)
            assert agent.communicate(timeout=200)[0] == "True []\n"
        finally:
            agent.kill()


def test_what_is_wrong_with_flags_is_said_once_and_help_is_no_failure(tmp_path: Path) -> None:
    files = err, out = tmp_path / "err", tmp_path / "out"
    wrong = Forked("gpuscale.monitor.app.agent", ["--nod", "x"], ctl_environment(), *files)
    assert (wrong.wait(200), out.read_text(), err.read_text().count("\n")) == (2, "", 1)
    assert "unknown flag --nod" in err.read_text()
    err.unlink()
    asked = Forked("gpuscale.monitor.app.agent", ["--help"], ctl_environment(), *files)
    assert (asked.wait(200), err.read_text()) == (0, "")
    assert "--period-seconds" in out.read_text()
