"""What goes from one process of an agent to the other arrives as it was."""

from gpuscale.monitor.agent.isolated import (
    decode,
    encode,
    event_in,
    event_out,
    inventory_in,
    inventory_out,
    sample_in,
    sample_out,
)
from gpuscale.monitor.model.readings import (
    Absent,
    DriverEvent,
    GpuEventKind,
    GpuIdentity,
    GpuProcess,
    GpuReading,
    GpuSample,
    GpuState,
    Inventory,
    MissingGpu,
    ProcessKey,
    ReadingStatus,
    RecoveryAction,
)


def test_an_inventory_arrives_with_every_field() -> None:
    whole = GpuIdentity("GPU-1", 3, "Model", "0:1", numa_node=1, divided=True, nvlinks=(("GPU-2", 4),))
    part = GpuIdentity("MIG-1", 3, "Model", mig_profile="1g.10gb", parent_uuid="GPU-1", gpu_instance_id=7)
    missing = (MissingGpu(2, "0000:1d:00.0", "GPU is lost"),)
    inventory = Inventory([whole, part], "550.1", "one is amiss", has_events=True, missing=missing)
    assert inventory_in(decode(encode(inventory_out(inventory)))) == inventory


def test_a_sample_arrives_with_what_is_absent_and_what_is_empty() -> None:
    reading = GpuReading(
        utilization_percent=0.1,
        pcie_sent_bytes=2**62 + 1,
        retired_pages_pending=False,
        recovery_action=RecoveryAction.DRAIN_PEERS,
        processes=(GpuProcess(1, None, "a\nb", 5, (ProcessKey(1, 2), ProcessKey(3, 4))), GpuProcess(2)),
        absent=(Absent("power_watts", ReadingStatus.LOST, "gone"),),
    )
    sample = GpuSample(GpuState.DEGRADED, reading, ("GPU-2", None), 10, 2)
    assert sample_in(decode(encode(sample_out(sample)))) == sample
    nothing = GpuSample(GpuState.OK, GpuReading(processes=()))
    assert sample_in(decode(encode(sample_out(nothing)))) == nothing


def test_an_event_arrives_and_so_does_none() -> None:
    event = DriverEvent("GPU-1", GpuEventKind.XID, 79)
    assert event_in(decode(encode(event_out(event)))) == event
    assert event_in(decode(encode(event_out(None)))) is None
