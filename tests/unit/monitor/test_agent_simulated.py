"""Simulated GPUs: the same at every start, idle, and always said to be simulated."""

from gpuscale.monitor.agent.sources import MEMORY_TOTAL_BYTES, SimulatedSource, simulated_uuid
from gpuscale.monitor.model.readings import GPU_FIELDS, GpuState


def source(node: str = "alpha", count: int = 3, now: float = 50.0) -> SimulatedSource:
    return SimulatedSource(node, count, lambda: now)


def test_their_uuids_are_the_same_at_every_start_and_differ_between_nodes() -> None:
    first, second, other = (source(node).open() for node in ("alpha", "alpha", "beta"))
    assert first == second
    uuids = [gpu.uuid for gpu in (*first.gpus, *other.gpus)]
    assert len(set(uuids)) == 6
    assert all(uuid.startswith("SIM-") for uuid in uuids)
    assert simulated_uuid("alpha", 0) == first.gpus[0].uuid == "SIM-6afcb721-67c0-5d87-a657-b17ffccbb12a"


def test_each_says_that_it_is_simulated() -> None:
    one = source()
    assert one.simulated
    assert all(gpu.simulated for gpu in one.open().gpus)


def test_every_reading_is_there_and_plausible_at_any_time() -> None:
    for now in range(0, 1000, 7):
        one = source(now=float(now))
        for gpu in one.open().gpus:
            read = one.read(gpu.uuid)
            reading = read.reading
            assert read.state is GpuState.OK
            assert all(getattr(reading, name) is not None for name in GPU_FIELDS)
            assert reading.utilization_percent is not None
            assert 0.0 <= reading.utilization_percent <= 5.0
            assert reading.memory_total_bytes == MEMORY_TOTAL_BYTES
            parts = (reading.memory_free_bytes, reading.memory_used_bytes, reading.memory_reserved_bytes)
            assert sum(part or 0 for part in parts) == MEMORY_TOTAL_BYTES


def test_the_figures_depend_on_node_index_and_time_only() -> None:
    uuid = simulated_uuid("alpha", 1)
    assert source(now=9.0).read(uuid) == source(now=9.0).read(uuid)
    assert source(now=9.0).read(uuid) != source(now=40.0).read(uuid)
    assert source(now=9.0).read(uuid) != source(now=9.0).read(simulated_uuid("alpha", 2))


def test_none_can_be_simulated() -> None:
    assert list(source(count=0).open().gpus) == []
