"""What of a node's snapshots a scheduler is told, and who reads some fields."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as internal
from gpuscale.monitor.fleet import nodes as index
from gpuscale.monitor.fleet.join_servicer import Joined
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import RELAXED, SETTLED, AgentStream, to_node
from gpuscale.monitor.fleet.servicer import FleetServicer
from gpuscale.monitor.wire import Picture
from tests.support.clock import ManualClock
from tests.support.monitor_values import GIB, gpu, hello, snapshot

FIELDS = types_api.GpuReading.DESCRIPTOR.fields_by_name
LEASED = types_api.GpuProcess(pid=7, reservation="reservations/r1")
OUTSIDER = types_api.GpuProcess(pid=8)


class Site(AsyncExitStack):
    """A fleet of some nodes with two GPUs, of which leases use the first alone, and one who schedules onto them."""

    def __init__(self, count: int = 1, *fields: str) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.nodes = Nodes(self.clock, 100)
        self.seq = 1
        self.streams = list[AgentStream]()
        servicer = FleetServicer(self.nodes, Joined(None), self.clock)
        no_call: Any = None
        request = api.WatchNodesRequest(placement_only=not fields, read_mask={"paths": fields})
        self.watch = servicer.WatchNodes(request, no_call)
        for number in range(count):
            name = f"n{number}"
            stream = self.enter_context(self.nodes.connected(hello(name), lambda: None))
            whole = snapshot(name, gpus=(gpu(f"{name}-0"), gpu(f"{name}-1")))
            whole.gpus[0].reading.processes.append(LEASED)
            self.nodes.take(stream, internal.StreamTelemetryRequest(snapshot=whole))
            self.streams.append(stream)
        self.push_async_callback(self.watch.aclose)

    def report(self, delta: internal.SnapshotDelta, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        self.seq += 1
        delta.seq, delta.base_seq = self.seq, self.seq - 1
        for stream in self.streams:
            assert self.nodes.take(stream, internal.StreamTelemetryRequest(delta=delta))

    async def told(self) -> str:
        found = api.WatchNodesResponse.FromString(await anext(self.watch))
        assert not (found.nodes and found.unchanged)
        return "whole" if found.nodes else "unchanged" if found.unchanged else ""


def numbers(place: int, **readings: float) -> internal.SnapshotDelta:
    table = internal.GpuNumbers(
        fields=[FIELDS[name].number for name in readings], places=[place], values=readings.values()
    )
    return internal.SnapshotDelta(numbers=table)


def single(
    place: int, reading: types_api.GpuReading, *cleared: str, state: int = 0
) -> internal.SnapshotDelta:
    one = internal.GpuDelta(
        place=place,
        reading=reading,
        cleared_fields=[FIELDS[name].number for name in cleared],
        state=types_api.GpuState.ValueType(state),
    )
    return internal.SnapshotDelta(gpus=[one])


R = types_api.GpuReading


@pytest.mark.parametrize(
    ("delta", "told"),
    [
        (internal.SnapshotDelta(), "unchanged"),
        (numbers(0, utilization_percent=99, power_watts=300), "unchanged"),
        (numbers(1, utilization_percent=14), "unchanged"),
        (numbers(1, utilization_percent=16), "whole"),
        (numbers(1, power_watts=300, temperature_celsius=80), "unchanged"),
        (numbers(0, memory_free_bytes=70 * GIB - 1), "unchanged"),
        (numbers(0, memory_free_bytes=68 * GIB), "whole"),
        (single(0, R(memory_free_bytes=68 * GIB)), "whole"),
        (single(1, R(utilization_percent=50)), "whole"),
        (single(0, R(processes=[LEASED], throttle_reason_mask=1), "processes"), "unchanged"),
        (single(0, R(processes=[LEASED, OUTSIDER]), "processes"), "whole"),
        (single(0, R(), "processes"), "whole"),
        (single(1, R(), "memory_free_bytes"), "whole"),
        (single(1, R(age=to_duration(0.4)), "age"), "unchanged"),
        (single(1, R(age=to_duration(0.6)), "age"), "whole"),
        (single(1, R(), state=types_api.GpuState.GPU_STATE_HUNG), "whole"),
        (internal.SnapshotDelta(host={"reading": {"cpu_percent": 90}}), "unchanged"),
        (internal.SnapshotDelta(host={"reading": {"cpu_count": 90}}), "whole"),
    ],
)
async def test_what_of_a_report_is_told(delta: internal.SnapshotDelta, told: str) -> None:
    async with Site() as site:
        assert await site.told() == "whole"
        site.report(delta)
        assert await site.told() == told


async def test_what_decides_nothing_is_told_now_and_then_and_what_is_old_or_ends_at_once() -> None:
    async with Site() as site:
        assert await site.told() == "whole"
        site.report(numbers(0, utilization_percent=99), RELAXED)
        assert await site.told() == "whole"
        site.report(internal.SnapshotDelta(age=to_duration(1.5)))
        assert await site.told() == "whole", "it says how old it is"
        site.clock.advance(9.0)
        site.nodes.sweep()
        assert await site.told() == "whole", "it is stale"


async def test_once_processes_came_or_went_it_is_told_again_when_their_use_shows() -> None:
    async with Site() as site:
        assert await site.told() == "whole"
        for told in ("whole", "unchanged", "whole", "unchanged", "unchanged"):
            begun = single(1, R(processes=[LEASED]), "processes")
            site.report(begun if told == "whole" else internal.SnapshotDelta(), SETTLED / 2)
            assert await site.told() == told


async def test_a_gpu_whose_processes_cannot_all_be_read_is_not_taken_as_leased() -> None:
    async with Site() as site:
        assert await site.told() == "whole"
        absent = types_api.AbsentReading(field="processes")
        site.report(single(0, R(absent_readings=[absent]), "absent_readings"))
        assert await site.told() == "whole"
        site.report(numbers(0, utilization_percent=99))
        assert await site.told() == "whole"


async def test_a_reading_is_compared_with_what_was_told_of_it_whichever_table_brought_that() -> None:
    async with Site() as site:
        assert await site.told() == "whole"
        used = FIELDS["utilization_percent"].number
        site.report(internal.SnapshotDelta(numbers={"fields": [used], "values": [50, 50]}))
        assert await site.told() == "whole"
        site.report(numbers(1, utilization_percent=90))
        assert await site.told() == "whole"


@pytest.mark.parametrize("places", [[], [1]])
async def test_a_busy_node_is_taken_in_without_its_snapshot(
    places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To put that together takes longer than all else: tables bring what decides."""
    written, write = list[Picture](), Picture.write
    monkeypatch.setattr(Picture, "write", lambda one, to: (written.append(one), write(one, to))[1])
    async with Site() as site:
        names = ("utilization_percent", "memory_free_bytes")
        for second in range(2 * int(RELAXED)):
            table = internal.GpuNumbers(fields=[FIELDS[name].number for name in names], places=places)
            table.values.extend([second * 5] * (len(places) or 2) + [second * GIB] * (len(places) or 2))
            site.report(internal.SnapshotDelta(numbers=table))
            if not second:
                written.clear()
    assert not written


async def test_a_report_that_is_refused_confirms_nothing() -> None:
    async with Site(2) as site:
        await site.told()
        bad = internal.SnapshotDelta(seq=9, base_seq=8)
        assert not site.nodes.take(site.streams.pop(0), internal.StreamTelemetryRequest(delta=bad))
        site.report(internal.SnapshotDelta())
        found = api.WatchNodesResponse.FromString(await anext(site.watch))
        assert (list(found.unchanged), list(found.nodes)) == (["nodes/n1"], [])


async def test_of_busy_nodes_as_much_is_encoded_as_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr(
        index, "to_node", lambda record, now: (made.append(record.node), to_node(record, now))[1]
    )
    counts = list[int]()
    for count in (4, 40):
        async with Site(count) as site:
            await site.told()
            made.clear()
            for second in range(5):
                site.report(numbers(0, utilization_percent=second * 25, power_watts=second))
                site.nodes.quarantine("n0", {f"{second}": internal.Quarantine(uuid=f"{second}")})
                found = api.WatchNodesResponse.FromString(await anext(site.watch))
                assert (len(found.nodes), len(found.unchanged)) == (1, count - 1)
            counts.append(len(made))
    assert counts == [5, 5]


READ = "snapshot.gpus.reading."


@pytest.mark.parametrize(
    ("delta", "told"),
    [
        (internal.SnapshotDelta(), False),
        (numbers(0, power_watts=300.4), False),
        (numbers(0, power_watts=300.6), True),
        (numbers(0, utilization_percent=99), False),
        (single(0, R(age=to_duration(0.9)), "age"), False),
        (single(0, R(age=to_duration(1.1)), "age"), True),
        (single(1, R(), state=types_api.GpuState.GPU_STATE_HUNG), True),
        (single(0, R(processes=[LEASED, LEASED]), "processes"), True),
    ],
)
async def test_a_reader_of_some_fields_is_told_of_them_where_a_table_would_show_it(
    delta: internal.SnapshotDelta, told: bool
) -> None:
    fields = ("power_watts", "age", "processes.pid")
    async with Site(2, "snapshot.gpus.state", *(READ + field for field in fields)) as site:
        site.report(numbers(0, power_watts=300.0, sm_clock_mhz=900), 0.1)
        found = api.WatchNodesResponse.FromString(await anext(site.watch))
        read = R(power_watts=300, age={}, processes=[{"pid": 7}])
        ok = types_api.GpuState.GPU_STATE_OK
        gpus = types_api.Gpu(state=ok, reading=read), types_api.Gpu(state=ok, reading=R(age={}))
        assert found.nodes[0] == api.Node(name="nodes/n0", snapshot={"gpus": gpus})
        site.report(internal.SnapshotDelta(), 0.1)
        other = site.streams.pop()
        site.report(delta, 0.1)
        shown = numbers(0, power_watts=1.0)
        shown.seq, shown.base_seq = site.seq, site.seq - 1
        assert site.nodes.take(other, internal.StreamTelemetryRequest(delta=shown))
        found = api.WatchNodesResponse.FromString(await anext(site.watch))
        assert [node.name for node in found.nodes] == ["nodes/n0"] * told + ["nodes/n1"]


async def test_a_mask_names_fields_of_nodes_and_a_whole_message_is_kept_whole() -> None:
    async with Site(
        1, "snapshot.gpus.uuid", "snapshot.host_reading.cpu_percent", "snapshot.host_reading"
    ) as site:
        found = api.WatchNodesResponse.FromString(await anext(site.watch))
        assert [gpu.ListFields()[0][1] for gpu in found.nodes[0].snapshot.gpus] == ["n0-0", "n0-1"]
        assert found.nodes[0].snapshot.host_reading == types_api.HostReading(cpu_percent=5, age={})
    for wrong in ("snapshot.gpu", "name.of"):
        async with Site(0, wrong) as site:
            with pytest.raises(InvalidArgumentError, match=f"a node has no field {wrong}"):
                await anext(site.watch)
