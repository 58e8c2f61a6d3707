"""What a table of adapters shows of what they can do."""

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.views.autoscaler import ADAPTERS


@pytest.mark.parametrize(
    ("capabilities", "shown"),
    [
        (api.AdapterCapabilities(gives_gpus=True, drains=True), "gives gpus, drains"),
        (api.AdapterCapabilities(), "-"),
    ],
    ids=["some", "none"],
)
def test_only_the_wide_table_says_what_an_adapter_can_do(
    capabilities: api.AdapterCapabilities, shown: str
) -> None:
    [column] = [one for one in ADAPTERS.columns if one.heading == "CAN"]
    assert column.wide
    assert column.cell(api.Adapter(name="adapters/ray", capabilities=capabilities)) == shown
