"""What tests of the monitor's room share."""

import importlib.util
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.monitor import RunningFleet, running_fleet


@pytest.fixture(scope="session")
def gpu_check() -> ModuleType:
    """`tools/gpu_check.py`, which is no package."""
    script = Path(__file__).resolve().parents[3] / "tools/gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def fleet() -> AsyncGenerator[RunningFleet, None]:
    async with running_fleet() as one:
        yield one
