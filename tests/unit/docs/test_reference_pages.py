"""docs/reference says what the code and the contract say today."""

import subprocess
import sys

from gpuscale.cli.console.errors import ExitCode
from gpuscale.cli.tree import COMMANDS
from tests.unit.docs.pages import ROOT, read


def test_the_reference_is_what_would_be_written_now() -> None:
    program = str(ROOT / "tools" / "generate_docs.py")
    done = subprocess.run(
        [sys.executable, program, "--check"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_and_every_exit_code_is_there() -> None:
    text = read("reference/cli.md")
    assert [name for name in COMMANDS if f"\n## gpuscalectl {name}\n" not in text] == []
    assert [code for code in ExitCode if f"| {code.value} | {code.name} |" not in text] == []


def test_every_service_is_there_with_roles_and_bounds() -> None:
    index = read("reference/api.md")
    for service in (
        "AllocatorService",
        "FleetService",
        "EndpointService",
        "DecisionService",
        "AdapterService",
    ):
        assert f"[{service}]" in index
    assert "| DrainNode | admin |" in index
    assert "| `min_replicas` | int32 |" in read("reference/api-autoscaler.md")
