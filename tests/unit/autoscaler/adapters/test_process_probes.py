"""What the answers to a probe make of a replica, and which probes a template may have."""

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessTemplate
from gpuscale.autoscaler.adapters.engines.process.replica import (
    Health,
    Probe,
    ProbeKind,
    Timing,
    Verdict,
    probe_environment,
)
from gpuscale.autoscaler.adapters.templates import fill_arguments

WELL, ILL = "", "no answer"
READY, GOES_ON, UNHEALTHY = Verdict.READY, Verdict.GOES_ON, Verdict.UNHEALTHY


def verdicts(answers: Sequence[str], *, ready: bool = False, step: float = 5.0) -> list[Verdict]:
    """What each answer makes of it, one every `step` seconds from its start; it may take 12 s to start."""
    health = Health(Timing(failures=2, start_timeout=12.0), 100.0, ready=ready)
    return [health.answered(answer, 100.0 + step * index) for index, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "ready", "expected"),
    [
        ([WELL, WELL], False, [READY, GOES_ON]),
        ([ILL, ILL, WELL], False, [GOES_ON, GOES_ON, READY]),
        ([ILL, ILL, ILL, ILL, ILL], False, [GOES_ON, GOES_ON, GOES_ON, GOES_ON, UNHEALTHY]),
        ([WELL, ILL, ILL], False, [READY, GOES_ON, UNHEALTHY]),
        ([WELL, ILL, WELL, ILL, ILL], False, [READY, GOES_ON, GOES_ON, GOES_ON, UNHEALTHY]),
        ([ILL, ILL], True, [GOES_ON, UNHEALTHY]),
    ],
    ids=["first success", "slow start", "never starts", "hangs", "a row is broken", "was ready before"],
)
def test_success_makes_ready_and_failures_in_a_row_make_unhealthy(
    answers: list[str], ready: bool, expected: list[Verdict]
) -> None:
    assert verdicts(answers, ready=ready) == expected


def template(**probe: Any) -> ProcessTemplate:
    return ProcessTemplate.model_validate({"command": ["/bin/worker", "{port:int}"], "probe": probe})


def order(**parameters: str) -> ReplicaOrder:
    return ReplicaOrder("endpoints/e/replicas/r", "endpoints/e", parameters)


def filled(made: ProcessTemplate, **parameters: str) -> Probe:
    assert made.probe
    target = fill_arguments("w", made.probe.target, order(**parameters), "/python", also=made.command)
    return made.probe.filled(target)


def test_a_probe_is_filled_in_as_the_command_is() -> None:
    table = template(http="http://127.0.0.1:{port:int}/healthz", period=2, failures=1)
    assert filled(table, port="8000") == Probe(
        ProbeKind.HTTP, ("http://127.0.0.1:8000/healthz",), Timing(period=2.0, failures=1)
    )
    program = template(exec=["{python}", "-c", "pass"])
    assert filled(program, port="1") == Probe(ProbeKind.EXEC, ("/python", "-c", "pass"), Timing())
    with pytest.raises(LaunchRefusedError, match="whole number"):
        filled(table, port="80/../")


def test_the_environment_of_a_probe_holds_nothing_of_the_template() -> None:
    found = probe_environment("endpoints/e/replicas/r", {"PATH": "/bin", "AMQP_PASSWORD": "canary"})
    assert found == {"PATH": "/bin", "GPUSCALE_REPLICA": "endpoints/e/replicas/r"}


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ({}, "set one of exec, tcp and http"),
        ({"tcp": "h:1", "http": "http://h"}, "set one of exec, tcp and http"),
        ({"http": "https://h/"}, "must begin with http://"),
        ({"tcp": "8000"}, "must be HOST:PORT"),
        ({"http": "http://h/ x"}, "printable characters and no space"),
        ({"exec": ["worker"]}, "must begin with an absolute path"),
        ({"exec": []}, "needs at least a program"),
        ({"tcp": "h:1", "period": 0}, "greater than or equal to 0.1"),
        ({"tcp": "h:1", "failures": 0}, "greater than or equal to 1"),
        ({"tcp": "h:1", "retries": 3}, "Extra inputs"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused(probe: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        template(**probe)
