"""gpuscale-power as a process of its own on the driver's double: what it sets, and when it sets that back. Whom it hears is said in test_killer.py."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuscale.monitor import power
from tests.support.nvml_double import NvmlDouble, NvmlReturn
from tests.support.power import PowerHelper
from tests.support.waiting import eventually_sync

SETTER = "nvmlDeviceSetPowerManagementLimit"


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[PowerHelper]:
    found = PowerHelper(NvmlDouble(tmp_path))
    found.start()
    yield found
    found.kill()


def test_a_cap_is_set_once_and_what_was_found_is_set_back_where_an_order_names_it_no_more(
    helper: PowerHelper,
) -> None:
    helper.double.gpus[1].power_limit_watts = 650.0
    helper.double.write()
    assert helper.put(gpu0=300, gpu1=400) == {}
    assert helper.put(gpu0=300, gpu1=400) == {}
    assert helper.limits() == [300, 400]
    assert helper.double.calls(SETTER) == 2, "the same order sets nothing"
    assert sorted(json.loads(helper.found.read_text()).values()) == [650_000, 700_000]
    state = helper.say('{"caps": null}')
    assert list(state["caps"].values()) == [300, 400]
    assert helper.put(gpu0=350) == {}
    assert helper.limits() == [350, 650], "what an admin had set before"
    assert helper.put(gpu1=690) == {}
    assert helper.limits() == [700, 650], "a cap is never above what was found"
    assert helper.put() == {}
    assert helper.limits() == [700, 650]
    assert json.loads(helper.found.read_text()) == {}
    assert helper.double.calls(SETTER) == 5
    started = helper.double.calls("nvmlInit_v2")
    helper.put()
    assert helper.double.calls("nvmlInit_v2") == started, "without caps the driver is let be"


def test_what_a_device_does_not_admit_is_refused_and_the_rest_of_the_order_done(helper: PowerHelper) -> None:
    assert helper.put(gpu0=199, gpu1=500) == {"gpu0": "199 W is not within 200 and 700 W"}
    assert helper.put(gpu0=701, gpu1=500) == {"gpu0": "701 W is not within 200 and 700 W"}
    assert helper.limits() == [None, 500]
    helper.double.gpus[0].fail(SETTER, NvmlReturn.NO_PERMISSION)
    helper.double.write()
    assert "gpu0" in helper.put(gpu0=300, gpu1=500)
    assert helper.say(json.dumps({"caps": {"GPU-none": 300}}))["problems"], "there is no such GPU"
    for line in ("", "{}", "5", '{"caps": 5}', '{"caps": {"a": "b"}}'):
        assert helper.say(line) == {"problem": "invalid order"}


def test_limits_are_back_at_its_end_and_after_an_end_that_it_did_not_see(helper: PowerHelper) -> None:
    helper.put(gpu0=300)
    helper.stop()
    assert (helper.limits(), helper.socket.exists()) == ([700, None], False)
    helper.start()
    helper.put(gpu0=300, gpu1=400)
    helper.kill()
    assert helper.limits() == [300, 400]
    helper.start()
    assert helper.limits() == [700, 700], "from the file, before anybody is heard"


def test_a_boot_leaves_the_file_and_no_caps_and_sets_nothing(helper: PowerHelper) -> None:
    helper.put(gpu0=300)
    helper.kill()
    helper.socket.unlink()
    helper.double.boot()
    sets = helper.double.calls(SETTER)
    helper.start()
    assert (helper.limits(), helper.double.calls(SETTER)) == ([None, None], sets)
    assert json.loads(helper.found.read_text()) == {}


def test_while_the_agent_is_silent_there_are_no_caps(helper: PowerHelper) -> None:
    helper.kill()
    helper.start("--silence", "0.5")
    helper.put(gpu0=300)
    eventually_sync(lambda: helper.limits() == [700, None])
    before = helper.double.calls(SETTER)
    assert helper.put(gpu0=300) == {}
    assert helper.double.calls(SETTER) > before, "it sets one again"


def test_a_limit_that_cannot_be_set_back_stays_in_the_file(helper: PowerHelper) -> None:
    helper.put(gpu0=300)
    helper.double.gpus[0].fail("*", NvmlReturn.GPU_IS_LOST)
    helper.double.write()
    helper.stop()
    assert "its limit cannot be restored" in helper.log.read_text()
    helper.double.gpus[0].fail("*", NvmlReturn.SUCCESS)
    helper.double.write()
    helper.start()
    assert helper.limits() == [700, None]


def test_a_gpu_that_was_replaced_is_forgotten(helper: PowerHelper) -> None:
    """Its limit could never be restored: each order opened the driver for it, and each start told of it."""
    helper.put(gpu0=300)
    helper.kill()
    helper.double.gpus[0].uuid = "GPU-new"
    helper.double.write()
    helper.start()
    assert json.loads(helper.found.read_text()) == {}
    assert "cannot be restored" not in helper.log.read_text()


def test_nothing_is_set_before_what_was_found_is_on_disk(
    tmp_path: Path, nvml_double: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, written = power.PowerLimits(tmp_path / "found.json"), list[int]()

    def noted(descriptor: int) -> None:
        written.append(nvml_double.calls(SETTER))
        os_fsync(descriptor)

    os_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", noted)
    limits.put({nvml_double.gpus[0].uuid: 300.0})
    assert (written, nvml_double.calls(SETTER)) == ([0, 0], 1), "the file and its folder"
    full = power.PowerLimits(tmp_path / "none" / "found.json")
    with pytest.raises(OSError, match="found"):
        full.put({nvml_double.gpus[1].uuid: 300.0})
    assert nvml_double.power_limit(1) is None
