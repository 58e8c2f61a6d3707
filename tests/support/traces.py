"""The files of services/ that a call runs through: one request or one tick in one process, under a profiler."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from tests.support import autoscaler_app
from tests.support.allocator import Client, allocator
from tests.support.allocator_values import reserve_request
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator
from tests.support.fake_allocator import serving as serving_allocator
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.fake_fleet import serving as serving_fleet
from tests.support.waiting import eventually

SERVICES = str(Path(__file__).resolve().parents[2] / "services") + "/"


class Trace:
    """Collects the files whose functions run, in every thread that starts while it is installed."""

    def __init__(self) -> None:
        self._files: set[str] | None = None
        self.found: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """As `sys.setprofile` wants it."""
        if self._files is not None and event == "call":
            name = frame.f_code.co_filename
            if name.startswith(SERVICES):
                self._files.add(name.removeprefix(SERVICES))

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        """Collect for as long as the block lasts; of several blocks of a name, what runs in each of them."""
        self._files = files = set[str]()
        try:
            yield
        finally:
            self._files = None
            self.found[name] = self.found.get(name, files) & files

    @contextmanager
    def installed(self) -> Generator[None]:
        """Watch this thread and those that start."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


async def traces() -> dict[str, set[str]]:
    """The files of a Reserve, a Renew, a quiet tick and one that scales out."""
    trace = Trace()
    with trace.installed(), TemporaryDirectory() as folder:
        await _leases(trace, Path(folder) / "allocator")
        await _ticks(trace, Path(folder) / "autoscaler")
    return trace.found


@asynccontextmanager
async def _calling(address: str) -> AsyncGenerator[Client]:
    """A client without a line of ours."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield Client(allocator_api.AllocatorServiceStub(channel))


async def _leases(trace: Trace, folder: Path) -> None:
    async with (
        serving_fleet(FakeFleet(node_message("alpha", count=2))) as fleet,
        allocator(folder, fleet) as address,
        _calling(address) as client,
    ):
        await client.ready()
        stub: Any = client.stub
        await client.release(await client.reserve())
        for _ in range(3):  # a tick in the background may fall into one of them
            request = reserve_request()
            with trace.of("Reserve"):
                granted = (await stub.Reserve(request, timeout=60)).reservation
            renewal = allocator_api.RenewReservationRequest(name=granted.name, fence=granted.fence)
            with trace.of("Renew"):
                await stub.RenewReservation(renewal, timeout=60)
            await client.release(granted)


async def _ticks(trace: Trace, folder: Path) -> None:
    fake = FakeAdapter()
    async with (
        serving_allocator(FakeAllocator({"n": ["GPU-0", "GPU-1"]})) as address,
        autoscaler_app.running(folder, address) as autoscaler,
        fake.connected(autoscaler.address),
    ):
        await autoscaler.create(autoscaler_app.scaling(gpus=1))
        await asyncio.sleep(1)
        fake.silent = True
        await asyncio.sleep(0.5)
        with trace.of("quiet tick"):
            await asyncio.sleep(0.5)
        fake.silent = False
        with trace.of("scale-out tick"):
            autoscaler.watchers.queues["jobs"] = (50, 0)
            await eventually(lambda: fake.alive)
