"""What a page says of a snapshot: only what is known, under the labels that dashboards ask for."""

from typing import Any

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.common.runtime.metrics_text import MetricsPage
from gpuscale.common.wire import to_duration
from gpuscale.monitor.exposition.snapshots import NOBODY, add_snapshot, with_pods
from gpuscale.monitor.model.prometheus import DCGM, Names, Style
from tests.support.monitor_values import GIB, snapshot
from tests.support.promtool import named, samples, value

Reading = types_api.GpuReading


def gpu(index: int = 0, **fields: Any) -> types_api.Gpu:
    """A GPU as an H100 host reports it."""
    made = types_api.Gpu(
        uuid=f"GPU-{index:08d}",
        index=index,
        model='H100 "80GB"',
        pci_bus_id=f"00000000:{0x1B + index:02X}:00.0",
        state=types_api.GpuState.GPU_STATE_OK,
        reading=Reading(utilization_percent=50, memory_used_bytes=2 * GIB, age=to_duration(0.5)),
    )
    made.MergeFrom(types_api.Gpu(**fields))
    return made


def page(*gpus: types_api.Gpu, style: Style | None = None, **fields: Any) -> str:
    made = MetricsPage()
    message = snapshot("alpha", gpus=gpus)
    message.host.hostname = "alpha.example"
    message.host.driver_version, message.host.cuda_version = "550.54.15", "12.4"
    fields = {"fresh": True, "elapsed": 0.0, "quarantined": (), "held": NOBODY} | fields
    add_snapshot(made, message, style or Style(), **fields)
    return b"".join(made.chunks()).decode()


def test_a_line_of_dcgm_has_the_labels_of_dcgm_exporter_in_its_order() -> None:
    lines = page(gpu(3), style=Style("all")).splitlines()
    assert (
        'DCGM_FI_DEV_GPU_UTIL{gpu="3",UUID="GPU-00000003",pci_bus_id="00000000:1E:00.0",device="nvidia3",'
        'modelName="H100 \\"80GB\\"",hostname="alpha.example",DCGM_FI_DRIVER_VERSION="550.54.15"} 50.0'
    ) in lines


def test_a_mig_instance_bears_its_profile_and_is_told_from_its_twin() -> None:
    part = {"mig_profile": "1g.10gb", "parent_uuid": "GPU-00000000"}
    twins = [gpu(0, uuid=f"MIG-{number}", gpu_instance_id=number, **part) for number in (1, 2)]
    found = named(page(*twins), "DCGM_FI_DEV_FB_USED", GPU_I_PROFILE="1g.10gb", gpu="0", device="nvidia0")
    assert {one.labels["UUID"] for one in found} == {"MIG-1", "MIG-2"}


def test_the_host_label_is_written_as_asked() -> None:
    [sample] = named(page(gpu(), style=Style(host_label="Hostname")), "DCGM_FI_DEV_GPU_UTIL")
    assert sample.labels["Hostname"] == "alpha.example"
    assert "hostname" not in sample.labels


def test_where_many_nodes_are_shown_each_series_names_its_own() -> None:
    one, many = page(gpu()), page(gpu(), style=Style(many_nodes=True))
    assert "node" not in named(one, "DCGM_FI_DEV_GPU_UTIL")[0].labels
    assert value(many, "DCGM_FI_DEV_GPU_UTIL", node="alpha") == 50


@pytest.mark.parametrize(
    ("names", "ours", "dcgm"),
    [("checked", True, True), ("all", True, True), ("dcgm", False, True), ("gpuscale", True, False)],
)
def test_only_the_names_asked_for_are_used(names: Names, ours: bool, dcgm: bool) -> None:
    text = page(gpu(), style=Style(names=names))
    assert bool(named(text, "gpuscale_gpu_utilization_ratio")) is ours
    assert bool(named(text, "DCGM_FI_DEV_GPU_UTIL")) is dcgm
    assert value(text, "gpuscale_gpu_state", state="OK") == 1


def test_of_dcgms_names_and_labels_only_what_breaks_promtools_rules_is_left_out() -> None:
    """The board of dcgm-exporter asks for none of it."""
    read = Reading(**{series.field: 1 for series in DCGM})
    whole, checked = (
        {
            (one.name.removesuffix("_total"), tuple(one.labels))
            for one in samples(page(gpu(reading=read), style=style))
        }
        for style in (Style("all"), Style())
    )
    assert {name for name, _ in whole} - {name for name, _ in checked} == {"DCGM_FI_DEV_PCIE_REPLAY_COUNTER"}
    asked = ("gpu", "UUID", "pci_bus_id", "device", "hostname", "DCGM_FI_DRIVER_VERSION")
    assert {had for name, had in checked if name.startswith("DCGM_")} == {asked}


@pytest.mark.parametrize(
    ("field", "read", "ours", "dcgm"),
    [
        ("fan_speed_percent", 37, ("fan_speed_ratio", 0.37), ("FAN_SPEED", 37)),
        ("sm_clock_max_mhz", 1981, ("sm_clock_max_hertz", 1.981e9), ("MAX_SM_CLOCK", 1981)),
        ("memory_clock_max_mhz", 2620, ("memory_clock_max_hertz", 2.62e9), ("MAX_MEM_CLOCK", 2620)),
        ("bar1_total_bytes", 9 * GIB, ("bar1_total_bytes", 9 * GIB), ("BAR1_TOTAL", 9216)),
        ("bar1_used_bytes", 2 * GIB, ("bar1_used_bytes", 2 * GIB), ("BAR1_USED", 2048)),
        ("bar1_free_bytes", 7 * GIB, ("bar1_free_bytes", 7 * GIB), ("BAR1_FREE", 7168)),
        ("compute_mode", 3, ("compute_mode", 3), ("COMPUTE_MODE", 3)),
        ("persistence_mode", True, ("persistence_mode", 1), ("PERSISTENCE_MODE", 1)),
        ("ecc_mode", False, ("ecc_mode", 0), ("ECC_CURRENT", 0)),
        ("ecc_mode_pending", True, ("ecc_mode_pending", 1), ("ECC_PENDING", 1)),
        ("vgpu_licensed", False, ("vgpu_licensed", 0), ("VGPU_LICENSE_STATUS", 0)),
        ("power_violation_seconds", 1.5, ("power_violation_seconds_total", 1.5), ("POWER_VIOLATION", 15e8)),
        ("thermal_violation_seconds", 2, ("thermal_violation_seconds_total", 2), ("THERMAL_VIOLATION", 2e9)),
        # of DCGM in MB/s, as it makes them of the driver's KiB
        ("nvlink_bytes_per_second", 5e9, ("nvlink_bytes_per_second", 5e9), ("NVLINK_BANDWIDTH_TOTAL", 4882)),
    ],
)
def test_what_nvidia_smi_shows_too_has_dcgms_name_and_unit(
    field: str, read: float, ours: tuple[str, float], dcgm: tuple[str, float]
) -> None:
    text = page(gpu(reading=Reading(**{field: read})))
    assert value(text, f"gpuscale_gpu_{ours[0]}") == ours[1]
    assert value(text, f"DCGM_FI_DEV_{dcgm[0]}") == dcgm[1]
    assert not named(page(gpu()), f"DCGM_FI_DEV_{dcgm[0]}")


def test_the_board_is_told_from_others_and_who_holds_it_is_on_each_series_where_that_is_asked_for() -> None:
    board = gpu(serial="1650", vbios_version="96.00.01")
    text = page(board)
    assert value(
        text, "DCGM_FI_DEV_GPU_UTIL", DCGM_FI_DEV_SERIAL="1650", DCGM_FI_DEV_VBIOS_VERSION="96.00.01"
    )
    assert value(text, "gpuscale_gpu_info", serial="1650", vbios_version="96.00.01", cuda_version="12.4")
    assert not [one for one in samples(text) if "holder" in one.labels]
    held = page(board, gpu(1), held={board.uuid: {"holder": "train", "tenant": "vision"}})
    for one in samples(held):
        if one.labels.get("gpu") == "0":
            assert (one.labels["holder"], one.labels["tenant"]) == ("train", "vision"), one
        else:
            assert "holder" not in one.labels


@pytest.mark.parametrize("state", ["HUNG", "LOST", "RESET_REQUIRED", "RELEASED"])
def test_a_gpu_that_does_not_answer_shows_no_readings(state: str) -> None:
    """Not even ones that its agent still keeps: frozen values would look alive."""
    text = page(gpu(state=types_api.GpuState.Value(f"GPU_STATE_{state}")), gpu(1))
    assert value(text, "gpuscale_gpu_state", gpu="0") == 1
    assert named(text, "gpuscale_gpu_state", gpu="0")[0].labels["state"] == state
    assert {one.labels["gpu"] for one in named(text, "DCGM_FI_DEV_GPU_UTIL")} == {"1"}
    assert {one.labels["gpu"] for one in named(text, "gpuscale_gpu_utilization_ratio")} == {"1"}
    assert value(text, "gpuscale_node_gpus") == 2
    assert value(text, "gpuscale_node_gpus_working") == 1
    assert value(text, "gpuscale_node_gpu_problem") == 1


def test_a_node_that_is_not_fresh_shows_states_and_no_readings() -> None:
    text = page(gpu(), fresh=False, elapsed=7.0)
    assert value(text, "gpuscale_gpu_state", state="STALE") == 1
    assert value(text, "gpuscale_gpu_reading_age_seconds") == 7.5
    assert value(text, "gpuscale_node_gpus_working") == 0
    assert not any(one.name.startswith(("DCGM_", "gpuscale_host_")) for one in samples(text))


def test_what_holds_a_gpu_back_is_named() -> None:
    text = page(
        gpu(
            reading=Reading(
                throttle_reasons=["sw_power_cap", "hw_thermal_slowdown"],
                recovery_action=types_api.RecoveryAction.RECOVERY_ACTION_GPU_RESET,
            )
        ),
        quarantined={"gpu-00000000"},
    )
    reasons = {one.labels["reason"] for one in named(text, "gpuscale_gpu_throttled")}
    assert reasons == {"sw_power_cap", "hw_thermal_slowdown"}
    assert value(text, "gpuscale_gpu_recovery_action", action="GPU_RESET") == 1
    assert value(text, "gpuscale_gpu_quarantined") == 1
    parts = page(gpu(parent_uuid="GPU-0"), quarantined={"gpu-0"})
    assert value(parts, "gpuscale_gpu_quarantined") == 1
    assert not named(page(gpu(), quarantined=None), "gpuscale_gpu_quarantined"), "nobody has said"


def test_processes_are_counted_and_an_empty_list_is_no_absent_one() -> None:
    busy = Reading(processes=[types_api.GpuProcess(pid=1), types_api.GpuProcess(pid=2)])
    unknown = Reading(absent_readings=[types_api.AbsentReading(field="processes")])
    text = page(gpu(0, reading=busy), gpu(1), gpu(2, reading=unknown))
    assert {one.labels["gpu"]: one.value for one in named(text, "gpuscale_gpu_processes")} == {"0": 2, "1": 0}


def test_processes_have_series_of_their_own_up_to_a_number() -> None:
    """Those that hold most; what nobody tells of one has no series."""
    told = types_api.GpuProcess(
        pid=7, memory_used_bytes=GIB, utilization_percent=25, encoder_utilization_percent=50, user="ann",
        program="python train.py",
    )  # fmt: skip
    told.reservation = "reservations/r1"
    others = [types_api.GpuProcess(pid=100 + number, memory_used_bytes=number) for number in range(20)]
    silent = types_api.GpuProcess(pid=8)
    text = page(
        gpu(0, reading=Reading(processes=[*others, told])), gpu(1, reading=Reading(processes=[silent]))
    )
    memory = {int(one.labels["pid"]): one for one in named(text, "gpuscale_gpu_process_memory_used_bytes")}
    assert set(memory) == {7, *range(105, 120)}
    whose = {name: memory[7].labels[name] for name in ("user", "program", "reservation", "gpu")}
    assert whose == {"user": "ann", "program": "python train.py", "reservation": "r1", "gpu": "0"}
    used = named(text, "gpuscale_gpu_process_utilization_ratio")
    assert [(one.labels["pid"], one.value) for one in used] == [("7", 0.25)]
    assert [one.value for one in named(text, "gpuscale_gpu_process_encoder_utilization_ratio")] == [0.5]
    assert not named(text, "gpuscale_gpu_process_decoder_utilization_ratio")


def test_a_gpu_bears_the_labels_of_its_pods_and_a_process_those_of_its_own() -> None:
    one = gpu(0, pods=["ml/a", "ml/b", "web/a"])
    one.reading.processes.add(pid=7, memory_used_bytes=1, pod="web/a")
    one.reading.processes.add(pid=8, memory_used_bytes=1, pod="0f8a6c52-1111-2222-3333-444455556666")
    two = gpu(1)
    text = page(one, two, held=with_pods({two.uuid: {"holder": "ann"}}, [one, two]))
    [of_pods] = named(text, "DCGM_FI_DEV_GPU_UTIL", UUID=one.uuid)
    assert (of_pods.labels["namespace"], of_pods.labels["pod"]) == ("ml,web", "a,b,a")
    [held] = named(text, "DCGM_FI_DEV_GPU_UTIL", UUID=two.uuid)
    assert (held.labels["holder"], "pod" in held.labels) == ("ann", False)
    of_processes = {
        one.labels["pid"]: (one.labels.get("namespace"), one.labels["pod"])
        for one in named(text, "gpuscale_gpu_process_memory_used_bytes")
    }
    assert of_processes == {"7": ("web", "a"), "8": (None, "0f8a6c52-1111-2222-3333-444455556666")}
