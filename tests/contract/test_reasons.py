"""Reasons that programs switch on: the enums of the contract and those of the code have the same words."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.refusal import RefusalKind
from gpuscale.allocator.queueing.model import Reason
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.state.decision_log import StoredDecision, to_wire


@pytest.mark.parametrize(
    ("enum", "prefix", "raised"),
    [
        (allocator_api.Obstacle, "OBSTACLE_", Obstacle),
        (allocator_api.NoRoomReason, "NO_ROOM_REASON_", {*Reason, *RefusalKind} - {RefusalKind.NOT_FOUND}),
        (api.DecisionCode, "DECISION_CODE_", Code),
    ],
)
def test_the_contract_has_each_reason_of_the_code_and_no_other(
    enum: EnumTypeWrapper[int], prefix: str, raised: Iterable[str]
) -> None:
    first, *others = enum.keys()
    assert (first, enum.Value(first)) == (f"{prefix}UNSPECIFIED", 0)
    assert sorted(others) == sorted(f"{prefix}{one}" for one in raised)


def test_a_decision_that_was_stored_with_codes_as_texts_can_be_read() -> None:
    # As 0.x wrote it: Decision.limited_by was the text 10, DecisionStep.code the text 5.
    step = b"\x18\x02" + b"\x2a\x05FIRED"
    body = b"\x32" + bytes([len(step)]) + step + b"\x52\x0eCLAMPED_TO_MAX" + b"\x40\x03"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    found = to_wire(StoredDecision(1, "jobs", body, 1, now, now))
    assert (found.wanted, found.limited_by) == (3, api.DecisionCode.Value("DECISION_CODE_CLAMPED_TO_MAX"))
    assert [(one.before, one.code) for one in found.steps] == [
        (2, api.DecisionCode.Value("DECISION_CODE_FIRED"))
    ]
