"""The agent changes nothing on a GPU: no call of the driver's library that sets, resets or clears is in the code."""

import re
from pathlib import Path

SERVICES = Path(__file__).parents[3] / "services"
# Event sets are told apart from setters by what follows: nvmlEventSetWait waits, nvmlDeviceSetPowerLimit sets.
CHANGES = re.compile(
    r"\bnvml(?!EventSet(?:Create|Wait_v2|Free)\b)\w*?(?:Set|Reset|Clear|Create|Destroy|Modify)[A-Z_]?\w*"
)


def test_no_call_that_changes_a_gpu_is_in_the_code() -> None:
    sources = list(SERVICES.rglob("*.py"))
    assert len(sources) > 100
    found = {name for path in sources for name in CHANGES.findall(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_the_pattern_knows_a_setter_when_it_sees_one() -> None:
    for name in (
        "nvmlDeviceSetPowerManagementLimit",
        "nvmlDeviceResetGpuLockedClocks",
        "nvmlDeviceSetMigMode",
    ):
        assert CHANGES.search(name)
    for name in ("nvmlDeviceGetPowerUsage", "nvmlEventSetWait_v2", "nvmlEventSetCreate"):
        assert not CHANGES.search(name)
