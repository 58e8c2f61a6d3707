"""What is worth asking a driver in one tick, and what becomes of its answers; nothing is ever set."""

import re
from pathlib import Path

import pynvml

from gpuscale.monitor.agent.nvml.calls import Failure, KeptAnswer, Queries
from gpuscale.monitor.model.readings import Absent, GpuState, ReadingStatus

NOT_SUPPORTED = Failure(ReadingStatus.NOT_SUPPORTED, "Not Supported")
NO_PERMISSION = Failure(ReadingStatus.NO_PERMISSION, "Insufficient Permissions")
UNKNOWN = Failure(ReadingStatus.ERROR, "Unknown Error")
LOST = Failure(ReadingStatus.LOST, "GPU is lost", GpuState.LOST)


CODES = {
    NOT_SUPPORTED: pynvml.NVML_ERROR_NOT_SUPPORTED,
    NO_PERMISSION: pynvml.NVML_ERROR_NO_PERMISSION,
    UNKNOWN: pynvml.NVML_ERROR_UNKNOWN,
    LOST: pynvml.NVML_ERROR_GPU_IS_LOST,
}


class Question:
    """A question that counts how often it is asked."""

    def __init__(self, *answers: int | Failure) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Failure):
            raise pynvml.NVMLError(CODES[answer])
        return answer


def asking(unsupported: dict[str, str] | None = None, now: float = 0.0) -> Queries:
    return Queries({} if unsupported is None else unsupported, now)


def test_what_is_not_permitted_is_asked_again_and_says_nothing_against_the_gpu() -> None:
    unsupported, question = dict[str, str](), Question(NO_PERMISSION)
    for _ in range(2):
        one = asking(unsupported)
        one.number("power_watts", question, high=1000)
        assert one.state() is GpuState.OK
    assert question.asked == 2


def keep(kept: KeptAnswer[float] | None, question: Question, now: float) -> tuple[KeptAnswer[float], Queries]:
    one = asking(now=now)
    return one.kept(kept, 30.0, lambda: one.number("power_limit_watts", question, high=1000)), one


def test_a_dear_reading_that_is_not_supported_stays_absent_while_it_is_kept() -> None:
    question = Question(NOT_SUPPORTED)
    kept, _ = keep(None, question, now=0.0)
    _, later = keep(kept, question, now=10.0)
    assert later.absent == (Absent("power_limit_watts", ReadingStatus.NOT_SUPPORTED, "Not Supported"),)
    assert question.asked == 1


def test_a_dear_reading_that_failed_is_asked_again_at_once() -> None:
    question = Question(UNKNOWN, 300)
    kept, failed = keep(None, question, now=0.0)
    assert failed.state() is GpuState.DEGRADED
    kept, well = keep(kept, question, now=1.0)
    assert (kept.value, well.state()) == (300.0, GpuState.OK)


def test_a_tick_without_any_answer_is_known_as_such() -> None:
    one = asking()
    assert one.silence() is None
    one.number("power_watts", Question(UNKNOWN), high=1000)
    one.number("temperature_celsius", Question(NOT_SUPPORTED), high=300)
    assert one.silence() == UNKNOWN
    one.number("sm_clock_mhz", Question(0), high=3000)
    assert one.silence() is None


def test_a_gpu_that_supports_little_is_not_silent() -> None:
    one = asking()
    one.number("power_watts", Question(NOT_SUPPORTED), high=1000)
    assert one.silence() is None


def test_an_answer_that_is_not_believed_counts_as_none() -> None:
    one, unsupported = asking(), dict[str, str]()
    assert asking(unsupported).attempt("processes", lambda: NOT_SUPPORTED) == NOT_SUPPORTED
    assert asking(unsupported).attempt("processes", lambda: 5) == NOT_SUPPORTED
    assert one.attempt("processes", lambda: 5) == 5


def test_calls_that_are_made_are_counted_and_those_that_are_not_are_not() -> None:
    one, unsupported = asking(), dict[str, str]()
    assert (one.calls, one.refusals) == (0, 0)
    one.number("power_watts", Question(300), high=1000)
    one.number("sm_clock_mhz", Question(UNKNOWN), high=1000)
    one.attempt("of another call", lambda: 5, counted=False)
    assert (one.calls, one.refusals) == (2, 1)
    first = asking(unsupported)
    first.number("power_watts", Question(NOT_SUPPORTED), high=1000)
    assert (first.calls, first.refusals) == (1, 1)
    second = asking(unsupported)
    second.number("power_watts", Question(NOT_SUPPORTED), high=1000)
    assert (second.calls, second.refusals) == (0, 0), "it is not asked again"


SERVICES = Path(__file__).parents[3] / "services"
# Event sets are told apart from setters by what follows: nvmlEventSetWait waits, nvmlDeviceSetPowerLimit sets.
CHANGES = re.compile(
    r"\bnvml(?!EventSet(?:Create|Wait_v2|Free)\b)\w*?(?:Set|Reset|Clear|Create|Destroy|Modify)[A-Z_]?\w*"
)


def test_no_call_that_changes_a_gpu_is_in_the_code_but_those_of_the_helper_once_each() -> None:
    sources = list(SERVICES.rglob("*.py"))
    assert len(sources) > 100
    room = SERVICES / "monitor" / "gpuscale" / "monitor"
    found = sorted(
        (path.relative_to(room).as_posix() if path.is_relative_to(room) else str(path), one)
        for path in sources
        for one in CHANGES.findall(path.read_text(encoding="utf-8"))
    )
    assert found == [
        ("partitioning.py", "nvmlComputeInstanceDestroy"),
        ("partitioning.py", "nvmlDeviceCreateGpuInstanceWithPlacement"),
        ("partitioning.py", "nvmlGpuInstanceCreateComputeInstance"),
        ("partitioning.py", "nvmlGpuInstanceDestroy"),
        ("power.py", "nvmlDeviceSetPowerManagementLimit"),
    ]
