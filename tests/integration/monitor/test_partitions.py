"""MIG instances that gpuscale-power makes as a process of its own on the driver's double: what it leaves alone, and what is taken back."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuscale.monitor.partitioning import MigPartitions
from tests.support.nvml_double import DoubleProcess, NvmlDouble, NvmlReturn, divide
from tests.support.power import PowerHelper
from tests.support.waiting import eventually_sync

CREATE, FILL = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"
DESTROY, EMPTY = "nvmlGpuInstanceDestroy", "nvmlComputeInstanceDestroy"
BEFORE = [("1g.10gb", 4), ("3g.40gb", 0)]


@pytest.fixture
def double(tmp_path: Path) -> NvmlDouble:
    made = NvmlDouble(tmp_path)
    divide(made.gpus[0], "3g.40gb", "1g.10gb")
    made.write()
    return made


@pytest.fixture
def helper(double: NvmlDouble) -> Iterator[PowerHelper]:
    found = PowerHelper(double)
    found.start_to_partition()
    yield found
    double.release_all()
    found.kill()


def changes(double: NvmlDouble) -> list[int]:
    """How often each setter was called."""
    return [double.calls(one) for one in (EMPTY, DESTROY, CREATE, FILL)]


def order(helper: PowerHelper, *profiles: str) -> str:
    """The order `o1` for the first GPU."""
    found = {"uuid": helper.double.gpus[0].uuid, "profiles": profiles}
    return json.dumps({"caps": {}, "partitions": {"o1": found}})


def hold_order_at(helper: PowerHelper, step: str) -> Path:
    """Give the order `o1`, and return while the driver is in its first call of a step, which it leaves once the file is there."""
    held = helper.double.hold(helper.double.gpus[0].rules, step)
    helper.double.write()
    helper.say(order(helper, "7g.80gb"))
    eventually_sync(lambda: helper.double.calls(step) == 1)
    return held


def test_what_can_stay_stays_and_the_rest_is_made_anew_once(helper: PowerHelper) -> None:
    double = helper.double
    end = helper.partition(0, "2g.20gb", "3g.40gb", "1g.10gb")
    assert end["problem"] == ""
    assert double.instances() == [("1g.10gb", 6), ("2g.20gb", 4), ("3g.40gb", 0)]
    assert changes(double) == [1, 1, 2, 2], "the small one was in the way, the large one was not"
    assert len(end["instances"]) == 3
    assert "MIG-0-0" in end["instances"], "the one that stays"
    assert helper.partition(0, "1g.10gb", "2g.20gb", "3g.40gb", order="o2")["problem"] == ""
    assert changes(double) == [1, 1, 2, 2], "it has these"
    assert [*helper.ended()] == ["o2"], "what is ordered no more is forgotten"
    assert helper.partition(0, "7g.80gb", order="o3")["problem"] == ""
    assert (double.instances(), changes(double)) == ([("7g.80gb", 0)], [4, 4, 3, 3])
    assert json.loads(helper.partitions.read_text()) == {}


def test_without_its_file_it_partitions_nothing(helper: PowerHelper) -> None:
    helper.start()
    said = helper.say(order(helper, "7g.80gb"))
    helper.stop()
    assert (said["partitions"], changes(helper.double)) == (None, [0] * 4)


def test_what_is_not_to_be_changed_is_refused_before_anything_is(helper: PowerHelper) -> None:
    helper.double.gpus[0].mig_devices[1].processes.append(DoubleProcess(77))
    helper.double.write()
    for gpu, profiles, problem in (
        (0, ("7g.80gb",), "process 77 uses it"),
        (1, ("7g.80gb",), "its MIG mode is off"),
        (0, ("9g.90gb",), "no profile 9g.90gb"),
        (0, ("4g.40gb", "4g.40gb"), "no room for these instances together"),
        (0, ("3g.40gb",) * 3, "no room for these instances together"),
    ):
        end = helper.partition(gpu, *profiles, order=f"for {gpu}: {profiles}")
        assert problem in end["problem"]
        assert end["instances"] == (["MIG-0-0", "MIG-0-1"] if gpu == 0 else [])
    assert (changes(helper.double), helper.partitions.exists()) == ([0] * 4, False)


def test_instances_that_could_not_be_made_again_are_left_alone(helper: PowerHelper) -> None:
    held = hold_order_at(helper, FILL)
    helper.kill()
    helper.partitions.unlink()
    held.touch()
    helper.start_to_partition()
    assert "without a compute instance" in helper.partition(0, "3g.40gb")["problem"]
    assert helper.double.calls(DESTROY) == 2, "those of the first order"


@pytest.mark.parametrize("step", [EMPTY, DESTROY, CREATE, FILL])
def test_after_kill_9_at_any_step_it_its_original_instances_are_restored(
    helper: PowerHelper, step: str
) -> None:
    double = helper.double
    hold_order_at(helper, step)
    helper.kill()
    assert json.loads(helper.partitions.read_text())
    double.release_all()
    helper.start_to_partition()
    end = eventually_sync(lambda: helper.ended().get("o1", {}))
    assert end["problem"] == "the order was interrupted: its original instances are restored"
    assert len(end["instances"]) == 2
    assert double.instances() == ([] if step == EMPTY else BEFORE), (
        "none was destroyed yet: the double says nothing"
    )
    assert json.loads(helper.partitions.read_text()) == {}
    assert helper.partition(0, "7g.80gb", order="o2")["problem"] == ""
    assert double.instances() == [("7g.80gb", 0)]


def test_where_a_process_came_meanwhile_what_was_destroyed_is_made_again(helper: PowerHelper) -> None:
    double = helper.double
    hold_order_at(helper, EMPTY)
    double.gpus[0].mig_devices[0].processes.append(DoubleProcess(77))
    double.write()
    double.release_all()
    end = eventually_sync(lambda: helper.ended().get("o1", {}))
    assert end["problem"].startswith("the driver refuses: ")
    assert (double.instances(), "MIG-0-0" in end["instances"]) == (BEFORE, True)
    assert changes(double) == [2, 1, 1, 1], "the other one alone"


def test_what_cannot_be_taken_back_is_at_the_next_start(helper: PowerHelper) -> None:
    gpu = helper.double.gpus[0]
    gpu.fail(FILL, NvmlReturn.NO_PERMISSION)
    helper.double.write()
    end = helper.partition(0, "7g.80gb")
    assert (end["instances"], end["problem"] != "") == (None, True), "neither could be made"
    gpu.fail(FILL, NvmlReturn.SUCCESS)
    helper.double.write()
    helper.start_to_partition()
    end = eventually_sync(lambda: helper.ended().get("o1", {}))
    assert "original instances" in end["problem"]
    assert (helper.double.instances(), len(end["instances"])) == (BEFORE, 2)


def test_what_others_made_since_stays(helper: PowerHelper) -> None:
    double = helper.double
    hold_order_at(helper, CREATE)
    helper.kill()
    double.release_all()
    other = PowerHelper(double)
    other.partitions = double.folder / "others.json"
    other.start_to_partition()
    assert other.partition(0, "2g.20gb", order="by hand")["problem"] == ""
    other.kill()
    helper.start_to_partition()
    end = eventually_sync(lambda: helper.ended().get("o1", {}))
    assert "its instances were changed since" in end["problem"]
    assert double.instances() == [("2g.20gb", 0)]


def test_nothing_is_changed_before_what_it_had_is_on_disk(
    tmp_path: Path, nvml_double: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(nvml_double.gpus[0], "3g.40gb")
    nvml_double.write()
    partitions, written = MigPartitions(tmp_path / "partitions.json"), list[int]()

    def noted(descriptor: int) -> None:
        written.append(sum(changes(nvml_double)))
        os_fsync(descriptor)

    os_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", noted)
    uuid = nvml_double.gpus[0].uuid
    assert partitions.put("o1", uuid, ("7g.80gb",))["problem"] == ""
    assert written == [0, 0, 4, 4], "the file and its folder, before and after"
    full = MigPartitions(tmp_path / "none" / "partitions.json")
    end = full.put("o2", uuid, ("3g.40gb",))
    assert "No such file" in str(end["problem"])
    assert (len(end["instances"]), nvml_double.instances()) == (1, [("7g.80gb", 0)])
