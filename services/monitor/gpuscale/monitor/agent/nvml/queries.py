"""How one tick of a GPU asks NVML: what is worth asking, what becomes of an answer, and what its result codes mean.

What a GPU does not support is asked once. A GPU that is gone is asked nothing more in the same tick. Expensive readings
are kept for a while. Every field that stays empty is noted with its reason.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import pynvml

from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import EXCUSED, Absent, GpuState, ReadingStatus

T = TypeVar("T")

# A tick comes a little early now and then; what is due in that moment is not to wait for another whole one.
_SLACK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a question got no answer; `gone` where the answer means that the GPU cannot be read at all."""

    status: ReadingStatus
    detail: str
    gone: GpuState | None = None


@dataclass(frozen=True, slots=True)
class KeptAnswer(Generic[T]):
    """An answer that is reused until a time."""

    value: T | None
    absent: tuple[Absent, ...]
    until: float


class Queries:
    """The questions of one tick at `now`, in seconds, with how many `calls` and `refusals` there were.

    `unsupported` has what this GPU does not answer, with what the driver said; it is kept between ticks.
    """

    def __init__(self, unsupported: dict[str, str], now: float) -> None:
        self._unsupported = unsupported
        self.now = now
        self.calls = 0
        self.refusals = 0
        self._absent: list[Absent] = []
        self._gone: Failure | None = None
        self._answered = False
        self._refused: Failure | None = None

    @property
    def absent(self) -> tuple[Absent, ...]:
        """The fields that stayed empty so far."""
        return tuple(self._absent)

    def state(self) -> GpuState:
        """What the answers so far say about the GPU."""
        if self._gone is not None and self._gone.gone is not None:
            return self._gone.gone
        failed = any(absent.status not in EXCUSED for absent in self._absent)
        return GpuState.DEGRADED if failed else GpuState.OK

    def silence(self) -> Failure | None:
        """Why nothing was answered in this tick; None where something was.

        What was kept from earlier ticks must then not be shown: it would make a dead GPU look alive.
        """
        return None if self._answered else self._refused

    def unsupported(self, question: str) -> Failure | None:
        """Why a question is not worth asking; None if it is."""
        detail = self._unsupported.get(question)
        return None if detail is None else Failure(ReadingStatus.NOT_SUPPORTED, detail)

    def attempt(self, question: str, call: Callable[[], T | Failure], *, counted: bool = True) -> T | Failure:
        """Ask, if it is worth asking; `counted` is False for an answer that came with others."""
        if self._gone is not None:
            return self._gone
        if question in self._unsupported:
            return Failure(ReadingStatus.NOT_SUPPORTED, self._unsupported[question])
        self.calls += counted
        try:
            answer = call()
        except pynvml.NVMLError as error:
            self.refusals += counted
            answer = explain(error)
        if not isinstance(answer, Failure):
            self._answered = True
        elif answer.status is ReadingStatus.NOT_SUPPORTED:
            self._unsupported[question] = answer.detail
        else:
            self._refused = self._refused or answer
            self._gone = answer if answer.gone else None
        return answer

    def note(self, fields: Iterable[str], failure: Failure) -> None:
        """These fields stay empty."""
        self._absent.extend(Absent(name, failure.status, failure.detail) for name in fields)

    def number(
        self, name: str, call: Callable[[], int | Failure], *, high: float, scale: float = 1.0
    ) -> float | None:
        """The answer divided by `scale`, for the field of that name."""
        answer = self.value((name,), self.attempt(name, call))
        return None if answer is None else self.within(name, answer / scale, high=high)

    def value(self, fields: Iterable[str], answer: T | Failure) -> T | None:
        """The answer; where it is a failure, these fields stay empty."""
        if not isinstance(answer, Failure):
            return answer
        self.note(fields, answer)
        return None

    def within(self, name: str, value: float, *, high: float) -> float | None:
        """The value, unless it is impossible, such as the all-ones some drivers give for "unknown"."""
        if 0.0 <= value <= high:
            return value
        self.note((name,), Failure(ReadingStatus.ERROR, f"the driver said {value:g}"))
        return None

    def kept(
        self,
        kept: KeptAnswer[T] | None,
        every: float,
        ask: Callable[[], T | None],
        *,
        first: float | None = None,
    ) -> KeptAnswer[T]:
        """The kept answer, or a new one when due; a failed one is asked again at the next tick.

        The very first answer serves for `first` seconds, so that expensive questions do not always fall due in the same tick.
        """
        if kept is not None and self.now < kept.until - _SLACK_SECONDS:
            self._absent.extend(kept.absent)
            return kept
        before = len(self._absent)
        value = ask()
        absent = tuple(self._absent[before:])
        settled = all(reading.status in EXCUSED for reading in absent)
        serves = every if kept is not None or first is None else first
        return KeptAnswer(value, absent, self.now + serves if settled else self.now)


_NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
# Errors that no single GPU causes: NVML itself has to be started again.
_DRIVER_GONE = _NO_DRIVER | {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
_GPU_GONE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuState.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: GpuState.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuState.RESET_REQUIRED,
}
_STATUS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: ReadingStatus.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: ReadingStatus.TIMEOUT,
    pynvml.NVML_ERROR_GPU_IS_LOST: ReadingStatus.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: ReadingStatus.LOST,
}


def explain(error: pynvml.NVMLError) -> Failure:
    """What an error says about the GPU that was asked; GpuSourceError if NVML itself is gone."""
    raise_if_driver_gone(error)
    status = _STATUS.get(error.value, ReadingStatus.ERROR)
    return Failure(status, str(error), _GPU_GONE.get(error.value))


def raise_if_driver_gone(error: pynvml.NVMLError) -> None:
    """GpuSourceError if the error says that NVML is gone; else it is about one GPU."""
    if error.value in _DRIVER_GONE:
        raise source_error(error) from error


def source_error(error: pynvml.NVMLError) -> GpuSourceError:
    """An error as the source tells it."""
    return GpuSourceError(f"NVML: {error}", no_driver=error.value in _NO_DRIVER)
