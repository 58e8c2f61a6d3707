"""What gRPC for Python alone costs an agent: its services, which answer nothing, and its stream to a fleet, which reads nothing.

python bench/_telemetry_floor.py FLEET

Once a second it sends what changes of 8 busy GPUs, as the agent does. Nothing of gpuscale but the contract is loaded.
"""

from __future__ import annotations

import asyncio
import sys
import time
from uuid import uuid4

import grpc

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.internal.monitor import v1 as internal

GPUS = 8
NODE, EPOCH = "floor", str(uuid4())
MOVING = ("utilization_percent", "temperature_celsius", "power_watts", "sm_clock_mhz")
OF_READING = types_api.GpuReading.DESCRIPTOR.fields_by_name


def whole() -> internal.StreamTelemetryRequest:
    """A first snapshot, in which every number is there."""
    snapshot = types_api.Snapshot(node=NODE, epoch=EPOCH, seq=1)
    snapshot.period.seconds = 1
    for index in range(GPUS):
        gpu = snapshot.gpus.add(uuid=f"FLOOR-{index}", index=index, state=types_api.GpuState.GPU_STATE_OK)
        gpu.reading.memory_total_bytes = gpu.reading.memory_free_bytes = 1 << 36
    return internal.StreamTelemetryRequest(snapshot=snapshot)


def change(seq: int) -> internal.StreamTelemetryRequest:
    """What is other than in the snapshot before."""
    numbers = internal.GpuNumbers(
        fields=[OF_READING[name].number for name in MOVING],
        values=[seq % 90 + place / 10 for place in range(GPUS * len(MOVING))],
    )
    return internal.StreamTelemetryRequest(
        delta=internal.SnapshotDelta(seq=seq, base_seq=seq - 1, numbers=numbers)
    )


async def main(fleet: str) -> None:
    """Serve and stream for ever."""
    server = grpc.aio.server()
    for add, servicer in (
        (api.add_AgentServiceServicer_to_server, type("Agent", (api.AgentServiceServicer,), {})),
        (api.add_DriverServiceServicer_to_server, type("Driver", (api.DriverServiceServicer,), {})),
        (api.add_WorkServiceServicer_to_server, type("Work", (api.WorkServiceServicer,), {})),
    ):
        add(servicer(), server)
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(fleet) as channel:
        call = internal.TelemetryServiceStub(channel).StreamTelemetry(wait_for_ready=True)
        hello = internal.Hello(node=NODE, epoch=EPOCH, agent_version="0")
        hello.start_time.GetCurrentTime()
        await call.write(internal.StreamTelemetryRequest(hello=hello))
        await call.read()
        await call.write(whole())
        due, seq = time.monotonic(), 1
        while True:
            due, seq = due + 1.0, seq + 1
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await call.write(change(seq))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
