"""The program `gpuscale-power`: sets power limits and, with a partitions file, MIG instances on behalf of the agent.

The agent never changes a GPU. Each order lists all caps, so orders are idempotent: listed GPUs are capped, the others get their
original limit back. Original limits are on disk before the first change, and are restored when the agent is silent, when the
program exits, and when it starts after a crash.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pynvml

from gpuscale.monitor.helper import helper_parser, keep, run_helper
from gpuscale.monitor.partitioning import MigPartitions, PartitionOrders

_MILLI = 1000
_log = logging.getLogger("gpuscale-power")


class PowerLimits:
    """Power limits of this host's GPUs. `file` keeps the original limits of capped GPUs, in mW by UUID."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, int] = json.loads(file.read_text("utf-8")) if file.exists() else {}

    def found_watts(self) -> dict[str, float]:
        """The original limits of capped GPUs, by UUID."""
        return {uuid: limit / _MILLI for uuid, limit in self._found.items()}

    def put(self, caps: Mapping[str, float]) -> dict[str, str]:
        """Set these caps, in watts, and restore all other GPUs; returns problems by UUID. OSError if `file` fails."""
        back = dict.fromkeys(uuid for uuid in self._found if uuid not in caps)
        problems: dict[str, str] = {}
        if not (caps or back):
            return problems
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            return dict.fromkeys({**caps, **back}, str(error))
        try:
            for uuid, watts in {**caps, **back}.items():
                try:
                    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                    if watts is None:
                        self._set(uuid, handle, self._found[uuid])
                        continue
                    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                    limit = round(watts * _MILLI)
                    if not low <= limit <= high:
                        problems[uuid] = f"{watts:g} W is not within {low / _MILLI:g} and {high / _MILLI:g} W"
                        continue
                    if uuid not in self._found:
                        self._write(self._found | {uuid: pynvml.nvmlDeviceGetPowerManagementLimit(handle)})
                    self._set(uuid, handle, min(limit, self._found[uuid]))
                except (pynvml.NVMLError, ValueError) as error:
                    gone = getattr(error, "value", None) == pynvml.NVML_ERROR_NOT_FOUND
                    if watts is not None or not gone:  # one that was replaced has no limit to restore
                        problems[uuid] = str(error)
        finally:
            pynvml.nvmlShutdown()
        if done := set(back) - set(problems):
            self._write({uuid: limit for uuid, limit in self._found.items() if uuid not in done})
        return problems

    @staticmethod
    def _set(uuid: str, handle: pynvml.c_nvmlDevice_t, limit: int) -> None:
        if (before := pynvml.nvmlDeviceGetPowerManagementLimit(handle)) != limit:
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, limit)
            _log.warning("%s: %g W instead of %g W", uuid, limit / _MILLI, before / _MILLI)

    def _write(self, found: dict[str, int]) -> None:
        keep(self._file, found)
        self._found = found


class PowerOrders:
    """Carries out the agent's orders, one at a time, and drops all caps after `silence` seconds without one."""

    def __init__(self, limits: PowerLimits, silence: float, partitions: PartitionOrders | None) -> None:
        self._limits = limits
        self._silence = silence
        self._partitions = partitions
        self._heard = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "driver")
        self._caps: dict[str, float] = {}
        self._problems: dict[str, str] = {}

    async def take(self, found: Any, _agent: int) -> Mapping[str, object]:
        """Apply caps and partitions, and report the state; null caps only ask for it."""
        caps = found["caps"]
        self._heard.set()
        if caps is not None:
            self._caps = {str(uuid): float(watts) for uuid, watts in caps.items()}
            self._problems = await self._put(self._caps)
        orders = found.get("partitions")
        return {
            "caps": self._caps,
            "problems": self._problems,
            "found": self._limits.found_watts(),
            "partitions": None if self._partitions is None else self._partitions.take(orders),
        }

    async def watch(self) -> None:
        """Restore limits whenever the agent is silent, until cancelled."""
        while True:
            self._heard.clear()
            try:
                async with asyncio.timeout(self._silence):
                    await self._heard.wait()
            except TimeoutError:
                await self.put_back("the agent is silent")

    async def put_back(self, why: str) -> None:
        """Restore all original limits."""
        self._caps = {}
        for uuid, problem in (await self._put({})).items():
            _log.error("%s: %s, but its limit cannot be restored: %s", uuid, why, problem)

    async def _put(self, caps: Mapping[str, float]) -> dict[str, str]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._limits.put, caps)
        except OSError as error:
            return dict.fromkeys(caps, f"{error.filename}: {error.strerror}")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = helper_parser("gpuscale-power", "Caps the power of GPUs for budgets and reservations.")
    made.add_argument(
        "--found-file", type=Path, required=True, help="file that keeps the original limits of capped GPUs"
    )
    silence = "restore limits after this many seconds without the agent (%(default)g)"
    made.add_argument("--silence", type=float, default=60.0, help=silence)
    partitions = (
        "partition idle GPUs when the agent asks; file that keeps their original MIG instances meanwhile"
    )
    made.add_argument("--partitions-file", type=Path, help=partitions)
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    given = parser().parse_args(argv)
    file: Path | None = given.partitions_file
    try:
        limits, partitions = PowerLimits(given.found_file), MigPartitions(file) if file else None
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read --found-file or --partitions-file: {error}")

    @asynccontextmanager
    async def opened(group: asyncio.TaskGroup) -> AsyncGenerator[Any]:
        orders = PowerOrders(limits, given.silence, PartitionOrders(partitions) if partitions else None)
        await orders.put_back("the last run crashed")
        watching = group.create_task(orders.watch(), name="silence")
        try:
            yield orders.take
        finally:
            watching.cancel()
            await orders.put_back("the program exits")

    return run_helper(given, opened)


if __name__ == "__main__":
    sys.exit(main())
