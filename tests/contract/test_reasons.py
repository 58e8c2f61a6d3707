"""Reasons that programs switch on: the enums of the contract and those of the code have the same words."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.refusal import RefusalKind
from gpuscale.allocator.queueing.model import Reason
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import Code


@pytest.mark.parametrize(
    ("enum", "prefix", "raised"),
    [
        (allocator_api.Obstacle, "OBSTACLE_", Obstacle),
        (
            allocator_api.NoRoomReason,
            "NO_ROOM_REASON_",
            {*Reason, *set(RefusalKind) - {RefusalKind.NOT_FOUND}},
        ),
        (api.DecisionCode, "DECISION_CODE_", Code),
    ],
)
def test_the_contract_has_each_reason_of_the_code_and_no_other(
    enum: EnumTypeWrapper[int], prefix: str, raised: Iterable[str]
) -> None:
    first, *others = enum.keys()
    assert (first, enum.Value(first)) == (f"{prefix}UNSPECIFIED", 0)
    assert sorted(others) == sorted(f"{prefix}{one}" for one in raised)
