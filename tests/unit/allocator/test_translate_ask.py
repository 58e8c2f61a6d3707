"""What an ask leaves open is filled in, and what contradicts itself is refused by name."""

from pathlib import Path

import pytest

from gpuscale.allocator.domain.model import WHOLE
from gpuscale.allocator.servicers import servicer
from gpuscale.allocator.servicers.servicer import to_ask
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import InvalidArgumentError

MIB = 1024 * 1024
SETTINGS = AllocatorSettings(data_dir=Path("unused"))


@pytest.mark.parametrize(
    ("ask", "least"),
    [
        (api.Ask(gpu_count=1), 8000 * MIB),
        (api.Ask(gpu_count=1, min_memory_bytes=0), 0),
        (api.Ask(gpu_count=1, gpu_milli=WHOLE), 8000 * MIB),
        (api.Ask(gpu_count=1, mig_profile="1g.5gb"), 4_500_000_000),
        (api.Ask(gpu_count=1, mig_profile="1g.10gb+me"), 8000 * MIB),
        (api.Ask(gpu_count=1, gpu_milli=250), 0),
        (api.Ask(gpu_count=1, gpu_memory_bytes=5 * MIB), 5 * MIB),
        (api.Ask(gpu_count=1, gpu_milli=250, gpu_memory_bytes=5 * MIB), 5 * MIB),
        (api.Ask(gpu_count=1, gpu_milli=250, min_memory_bytes=7 * MIB), 7 * MIB),
    ],
)
def test_the_least_free_memory(ask: api.Ask, least: int) -> None:
    """Of a share what goes with it has to be free, and no more: small shares fit on GPUs that are nearly full."""
    assert to_ask(ask, SETTINGS).min_memory_bytes == least


@pytest.mark.parametrize(
    ("ask", "admitted"),
    [
        (api.Ask(gpu_count=1), False),
        (api.Ask(gpu_count=1, mig_profile="1g.10gb"), True),
        (api.Ask(gpu_count=1, mig_profile="1g.10gb", allow_unknown_utilization=False), False),
        (api.Ask(gpu_count=1, allow_unknown_utilization=True), True),
    ],
)
def test_unknown_utilization_is_admitted_of_mig_instances(ask: api.Ask, admitted: bool) -> None:
    assert to_ask(ask, SETTINGS).allow_unknown_utilization is admitted


def test_a_whole_gpu_with_a_part_of_its_memory_is_a_contradiction() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        to_ask(api.Ask(gpu_count=1, gpu_milli=WHOLE, gpu_memory_bytes=1), SETTINGS)
    assert refused.value.violations[0].field.startswith("ask.")


def test_as_many_asks_are_kept_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_ASKS_KEPT", 2)
    before = len(servicer._asks)
    for count in range(1, before + 10):
        to_ask(api.Ask(gpu_count=count), SETTINGS)
    assert len(servicer._asks) <= max(before, 2)
