"""What an adapter reports is taken by the autoscaler, whatever an engine said."""

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.connection import one_line, to_wire
from gpuscale.autoscaler.domain.replicas import ReplicaReport, ReplicaState
from gpuscale.common.rpc.validation import violations
from gpuscale.internal.autoscaler import v1 as autoscaler_internal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unschedulable: no GPU", "Unschedulable: no GPU"),
        ("two\nlines\tand a tab ", "two lines and a tab"),
        ("a bell \x07", "a bell ?"),
        ("x" * 5000, "x" * 1023 + "…"),
    ],
)
def test_a_reason_in_the_words_of_an_engine_never_has_a_whole_report_refused(
    text: str, expected: str
) -> None:
    reported = autoscaler_internal.ReplicaReport(
        replica="endpoints/e/replicas/r", state=api.Replica.STATE_STARTING, reason=one_line(text)
    )
    assert reported.reason == expected
    assert (
        violations(autoscaler_internal.ConnectRequest(report=autoscaler_internal.Report(replicas=[reported])))
        == []
    )


@pytest.mark.parametrize(
    ("code", "told"), [(None, None), (-9, -9), (3_221_225_786, None), (2**31 - 1, 2**31 - 1)]
)
def test_an_exit_code_that_the_contract_cannot_hold_is_not_known(code: int | None, told: int | None) -> None:
    wire = to_wire("endpoints/e/replicas/r", ReplicaReport(ReplicaState.FAILED, -1, code))
    assert (wire.exit_code if wire.HasField("exit_code") else None, wire.pid) == (told, 0)
    assert (
        violations(autoscaler_internal.ConnectRequest(report=autoscaler_internal.Report(replicas=[wire])))
        == []
    )
