"""Each import rule is seen broken once: a rule that cannot fail holds nothing."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.support.cli import python

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("common", "monitor", "allocator", "autoscaler", "gateway")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
FORBIDDEN = {
    "autoscaler.domain.engine": ("gpuscale.allocator.placing.policies", "One-way doors"),
    "common.names": ("gpuscale.client", "One-way doors"),
    "cli.main": ("gpuscale.allocator.placing.policies", "The CLI speaks gRPC"),
    "allocator.domain.ledger": ("time", "Pure cores"),
    "autoscaler.domain.rules.rule": ("gpuscale.api.types.v1", "Pure cores"),
    "monitor.fleet.nodes": ("pynvml", "Only monitor/agent/nvml/"),
    "autoscaler.loop.reconciler": ("aio_pika", "Only autoscaler/signals/rabbitmq.py"),
    "allocator.usecases.endings": ("sqlmodel", "Only stores"),
}
"""What each module must not import, and the rule that says so."""


def test_a_forbidden_import_breaks_its_rule(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__")
    for folder in ("protos", *(f"services/{room}" for room in ROOMS)):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    for module, (imported, _) in FORBIDDEN.items():
        [source] = tmp_path.glob(f"services/*/gpuscale/{module.replace('.', '/')}.py")
        source.write_text(f"{source.read_text(encoding='utf-8')}\nimport {imported}\n", encoding="utf-8")
    roots = [str(tmp_path / "protos"), *(str(tmp_path / "services" / room) for room in ROOMS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    result = python(LINT, "--no-cache", environment=environment, folder=tmp_path)
    assert result.code != 0
    _, *parts = re.split(r"^(.+)\n-{5,}$", result.out, flags=re.MULTILINE)
    told = [(title, " ".join(body.split())) for title, body in zip(parts[::2], parts[1::2], strict=True)]
    for module, (imported, rule) in FORBIDDEN.items():
        edge = f"gpuscale.{module} -> {imported}"
        assert any(title.startswith(rule) and edge in body for title, body in told), result.out
