"""Programs of gpuscale as processes that a test kills and starts again on the same directory and address."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import FAILPOINTS
from gpuscale.common.secrets import SecretUrl
from tests.support.autoscaler_app import Autoscaler, FakeWatchers
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.waiting import eventually


class Program:
    """The lives of a program; the block that it is entered for begins before the first, and kills the last.

    Args:
        words: its module and arguments.
        environment: variables beside those of this process; the GPUSCALE_ ones of this process are left out.
    """

    def __init__(self, *words: str, environment: Mapping[str, str]) -> None:
        self._words = words
        own = {name: value for name, value in os.environ.items() if not name.startswith("GPUSCALE")}
        self._environment = {**own, **environment}
        self._process: Forked | None = None

    async def start(self, failpoints: str = "") -> None:
        module, *arguments = self._words
        environment = {**self._environment, FAILPOINTS: failpoints}
        self._process = await asyncio.to_thread(Forked, module, arguments, environment)

    async def ended(self, timeout: float = 120.0) -> int:
        """Wait for the end of this life; negative: the signal that ended it."""
        return await asyncio.to_thread(self._process.wait, timeout)

    async def kill(self) -> None:
        """kill -9, if it still runs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            await self.ended()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()


def engine_program(engine: str, config: Path, environment: Mapping[str, str]) -> Program:
    """`gpuscale-adapter ENGINE --config FILE`: the autoscaler, the data directory and the templates are in the file."""
    return Program(
        "gpuscale.autoscaler.adapters.main", engine, "--config", str(config), environment=environment
    )


class AutoscalerProcess(Program):
    """`gpuscale-autoscaler` on a data directory, or with its state in a database."""

    def __init__(self, data_dir: Path, allocator_address: str, database: SecretUrl | None = None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        super().__init__(
            *("gpuscale.autoscaler.app", "--data-dir", str(data_dir), "--listen", self.address),
            *("--allocator-address", allocator_address, "--log-level", "error"),
            environment={} if database is None else {"GPUSCALE_AUTOSCALER_DATABASE": database.reveal()},
        )

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
