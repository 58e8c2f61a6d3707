"""The NVML calls of one tick of a GPU, and the meaning of NVML's result codes.

Unsupported readings are asked for once. After an answer that the GPU is gone, the tick makes no further calls. Expensive
readings are kept for a while. Every absent field is noted with its reason.
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple

import pynvml

from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import EXCUSED, Absent, GpuState, ReadingStatus

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A tick may come slightly early; what is due then must not wait for the next one.
_SLACK_SECONDS = 0.05


class Failure(NamedTuple):
    """Why a call failed; `gone` is set if the GPU cannot be read at all."""

    status: ReadingStatus
    detail: str
    gone: GpuState | None = None


class KeptAnswer(NamedTuple, Generic[T]):
    """An answer that is reused until `until`."""

    value: T | None
    absent: tuple[Absent, ...]
    until: float


class Queries:
    """The calls of one tick at `now`, in seconds; counts `calls` and `refusals`.

    `unsupported`: the questions this GPU does not support and what the driver said, kept between ticks.
    """

    def __init__(self, unsupported: dict[str, str], now: float) -> None:
        self._unsupported = unsupported
        self.now = now
        self.soon = now + _SLACK_SECONDS
        self.calls = 0
        self.refusals = 0
        self._absent: list[Absent] = []
        self._gone: Failure | None = None
        self._answered = False
        self._refused: Failure | None = None

    @property
    def absent(self) -> tuple[Absent, ...]:
        """The absent fields so far."""
        return tuple(self._absent)

    def state(self) -> GpuState:
        """The state of the GPU by the answers so far."""
        if self._gone is not None and self._gone.gone is not None:
            return self._gone.gone
        failed = any(absent.status not in EXCUSED for absent in self._absent)
        return GpuState.DEGRADED if failed else GpuState.OK

    def silence(self) -> Failure | None:
        """Why nothing was answered in this tick, so that kept answers must not be shown; None if something was."""
        return None if self._answered else self._refused

    def unsupported(self, question: str) -> Failure | None:
        """The failure of an unsupported question; None for others."""
        detail = self._unsupported.get(question)
        return None if detail is None else Failure(ReadingStatus.NOT_SUPPORTED, detail)

    def attempt(
        self, question: str, call: Callable[[*Ts], T | Failure], *given: *Ts, counted: bool = True
    ) -> T | Failure:
        """Make a call unless it is unsupported or the GPU is gone; `counted` is False for an answer that came with others."""
        if self._gone is not None:
            return self._gone
        if question in self._unsupported:
            return Failure(ReadingStatus.NOT_SUPPORTED, self._unsupported[question])
        self.calls += counted
        try:
            answer = call(*given)
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
        """Note these fields as absent."""
        self._absent.extend(Absent(name, failure.status, failure.detail) for name in fields)

    def number(
        self, name: str, call: Callable[[*Ts], int | Failure], *given: *Ts, high: float, scale: float = 1.0
    ) -> float | None:
        """Make a call for the field of that name; the answer is divided by `scale`."""
        answer = self.attempt(name, call, *given)
        if isinstance(answer, Failure):
            self.note((name,), answer)
            return None
        return self.within(name, answer / scale, high=high)

    def value(self, fields: Iterable[str], answer: T | Failure) -> T | None:
        """The answer; a failure makes these fields absent."""
        if not isinstance(answer, Failure):
            return answer
        self.note(fields, answer)
        return None

    def within(self, name: str, value: float, *, high: float) -> float | None:
        """The value unless it is out of range, such as the all-ones that some drivers return for "unknown"."""
        if 0.0 <= value <= high:
            return value
        self.note((name,), Failure(ReadingStatus.ERROR, f"the driver said {value:g}"))
        return None

    def serves(self, kept: KeptAnswer[Any]) -> bool:
        """Whether a kept answer is not due yet, and may be shown again, as its absent fields then are."""
        if kept.until <= self.soon:
            return False
        self._absent.extend(kept.absent)
        return True

    def kept(
        self,
        kept: KeptAnswer[T] | None,
        every: float,
        ask: Callable[[], T | None],
        *,
        first: float | None = None,
    ) -> KeptAnswer[T]:
        """The kept answer, or a new one if due; after a failure it is due at the next tick.

        The very first answer serves for `first` seconds, to spread expensive calls over ticks.
        """
        if kept is not None and self.serves(kept):
            return kept
        before = len(self._absent)
        value = ask()
        absent = tuple(self._absent[before:])
        settled = all(reading.status in EXCUSED for reading in absent)
        serves = every if kept is not None or first is None else first
        return KeptAnswer(value, absent, self.now + serves if settled else self.now)


_NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
# Errors of NVML as a whole, which must be restarted.
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
    """The failure of an error. GpuSourceError if NVML is gone."""
    raise_if_driver_gone(error)
    return Failure(_STATUS.get(error.value, ReadingStatus.ERROR), str(error), _GPU_GONE.get(error.value))


def raise_if_driver_gone(error: pynvml.NVMLError) -> None:
    """Raise GpuSourceError if the error means that NVML is gone."""
    if error.value in _DRIVER_GONE:
        raise source_error(error) from error


def source_error(error: pynvml.NVMLError) -> GpuSourceError:
    """An error as the source raises it."""
    return GpuSourceError(f"NVML: {error}", no_driver=error.value in _NO_DRIVER)
