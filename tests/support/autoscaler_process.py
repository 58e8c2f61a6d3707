"""`gpuscale-autoscaler` as a process that a test kills and starts again on the same directory and address."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import FAILPOINTS
from gpuscale.common.secrets import SecretUrl
from tests.support.autoscaler_app import Autoscaler, FakeWatchers
from tests.support.ports import free_port
from tests.support.waiting import eventually


class AutoscalerProcess:
    """The lives of an autoscaler on one data directory.

    Args:
        data_dir: its state.
        allocator_address: the allocator it reserves with.
        database: where its state is, if not on the data directory.
    """

    def __init__(self, data_dir: Path, allocator_address: str, database: SecretUrl | None = None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._data_dir = data_dir
        self._allocator_address = allocator_address
        self._database = {} if database is None else {"GPUSCALE_AUTOSCALER_DATABASE": database.reveal()}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, failpoints: str = "") -> None:
        """Begin a life."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gpuscale.autoscaler.main"),
            *("--data-dir", str(self._data_dir)),
            *("--listen", self.address),
            *("--allocator-address", self._allocator_address),
            *("--log-level", "error"),
            env=environment | self._database | {FAILPOINTS: failpoints},
        )

    async def ended(self, timeout: float = 60.0) -> int:
        """Wait for the end of this life; negative: the signal that ended it."""
        assert self._process is not None
        async with asyncio.timeout(timeout):
            return await self._process.wait()

    async def kill(self) -> None:
        """kill -9, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        assert self._process is not None
        self._process.terminate()

    @asynccontextmanager
    async def channel(self) -> AsyncGenerator[Autoscaler]:
        """Call whichever life there is, if there is one."""
        async with open_channel(self.address) as channel:
            yield Autoscaler(self.address, channel, FakeWatchers.__new__(FakeWatchers))

    @asynccontextmanager
    async def called(self) -> AsyncGenerator[Autoscaler]:
        """Call this life, once it answers."""
        async with self.channel() as one:

            async def answers() -> bool:
                await one.endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=1, wait_for_ready=True)
                return True

            await eventually(answers, timeout=60.0, retry_on=(AssertionError, grpc.RpcError))
            yield one


@asynccontextmanager
async def autoscaler_process(
    data_dir: Path, allocator_address: str, database: SecretUrl | None = None
) -> AsyncGenerator[AutoscalerProcess]:
    """An autoscaler that is not started yet; leaving kills it."""
    process = AutoscalerProcess(data_dir, allocator_address, database)
    try:
        yield process
    finally:
        await process.kill()
