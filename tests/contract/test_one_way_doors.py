"""Each import rule is seen broken once: a rule that cannot fail holds nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("common", "monitor", "allocator", "autoscaler", "gateway")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources and rules, to break."""
    left_out = shutil.ignore_patterns("__pycache__")
    for folder in ("protos", *(f"services/{room}" for room in ROOMS)):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on a tree."""
    roots = [str(tree / "protos"), *(str(tree / "services" / room) for room in ROOMS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        (
            "services/autoscaler/gpuscale/autoscaler/domain/engine.py",
            "import gpuscale.allocator.placing.policies",
            "One-way doors",
        ),
        ("services/common/gpuscale/common/names.py", "import gpuscale.client", "One-way doors"),
        (
            "services/gateway/gpuscale/cli/main.py",
            "import gpuscale.allocator.placing.policies",
            "The CLI speaks gRPC",
        ),
        ("services/allocator/gpuscale/allocator/domain/ledger.py", "import time", "Pure cores"),
        (
            "services/autoscaler/gpuscale/autoscaler/domain/rules/rule.py",
            "import gpuscale.api.types.v1",
            "Pure cores",
        ),
        ("services/monitor/gpuscale/monitor/fleet/nodes.py", "import pynvml", "Only monitor/agent/nvml/"),
        (
            "services/autoscaler/gpuscale/autoscaler/loop/reconciler.py",
            "import aio_pika",
            "Only autoscaler/signals/rabbitmq.py",
        ),
        ("services/allocator/gpuscale/allocator/usecases/endings.py", "import sqlmodel", "Only stores"),
    ],
)
def test_a_forbidden_import_breaks_its_rule(copy: Path, module: str, line: str, rule: str) -> None:
    source = copy / module
    source.write_text(source.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    result = lint(copy)
    assert result.returncode != 0
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(rule) for text in broken), result.stdout + result.stderr
