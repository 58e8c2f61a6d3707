"""Recordings as text and back."""

import pytest

from gpuscale.monitor.model.metrics import ABSENT
from gpuscale.monitor.model.recordings import Order, RecordingState, Target
from gpuscale.monitor.recording.recordings import Recordings
from gpuscale.monitor.state.encoding import recording_from_text
from tests.support.monitor_values import recorded_text

TARGETS = tuple(Target(f"nodes/a/gpus/gpu-{one}", f"GPU-{one}", one, "H100", 1.0) for one in (1, 2))
ORDER = Order("r1", "id", "print", 1.0, 600.0, TARGETS)
SAMPLE = (10.0, ABSENT, 5.0, 50.0, 40.0, 300.0, 900.0)


def test_a_recording_that_runs_goes_on_and_ends_with_the_same_figures() -> None:
    never, before, after = Recordings(), Recordings(), Recordings()
    for one in (never, before):
        one.start(ORDER, 100.0)
        for second in range(5):
            one.add("gpu-1", 101.0 + second, SAMPLE)
    text = recorded_text(before.get("r1", 106.0), 5_000.0)
    after.restore(recording_from_text(text, 5_000.0))
    assert after.nodes == {"a"}
    for one in (never, after):
        one.add("gpu-1", 105.1, SAMPLE)  # too early after the last one: the interval holds over the restart
        one.add("gpu-1", 110.0, tuple(2 * value for value in SAMPLE))
    assert recorded_text(after.get("r1", 111.0), 0.0) == recorded_text(never.get("r1", 111.0), 0.0)
    assert after.stop("r1", 112.0).gpus[0].sample_count == 6


def test_an_ended_recording_takes_in_nothing_more_and_its_times_are_of_this_boot() -> None:
    before, after = Recordings(), Recordings()
    before.start(ORDER, 100.0)
    before.add("gpu-1", 101.0, SAMPLE)
    before.stop("r1", 110.0)
    after.restore(recording_from_text(recorded_text(before.get("r1", 120.0), 1_000.0), 3_000.0))
    found = after.get("r1", 20.0)
    assert (found.state, found.started_at, found.ended_at) == (RecordingState.STOPPED, -1_900.0, -1_890.0)
    after.add("gpu-1", 21.0, SAMPLE)
    assert (found.sample_count, found.duration(25.0), after.nodes) == (1, 10.0, frozenset())


def test_a_request_that_is_repeated_after_a_restart_begins_nothing_new() -> None:
    before, after = Recordings(), Recordings()
    before.start(ORDER, 100.0)
    after.restore(recording_from_text(recorded_text(before.get("r1", 100.0), 0.0), 0.0))
    assert after.start(ORDER, 130.0).started_at == 100.0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"order": {}}', "7"])
def test_what_is_no_recording_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        recording_from_text(text, 0.0)
