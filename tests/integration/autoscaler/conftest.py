"""An autoscaler beside a node of two GPUs, as most tests of it need."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.support.asking_autoscaler import Asking, asking
from tests.support.autoscaler_app import Autoscaler, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0", "GPU-1"]})


@pytest.fixture
async def autoscaler(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[Autoscaler]:
    async with serving(allocator) as address, running(tmp_path, address) as one:
        yield one


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncGenerator[Asking]:
    async with asking(tmp_path) as one:
        yield one


@pytest.fixture
async def adapter(autoscaler: Autoscaler) -> AsyncGenerator[FakeAdapter]:
    one = FakeAdapter()
    async with one.connected(autoscaler.address):
        yield one
