"""What the queues of each endpoint were like, as its evaluations saw them: for backtests on an endpoint's own history."""

from __future__ import annotations

from collections.abc import Callable

from gpuscale.autoscaler.backtest.history import UNKNOWN, History, NoWorkloadError, Reading, workload
from gpuscale.autoscaler.backtest.trace import Request
from gpuscale.autoscaler.model import EndpointSpec
from gpuscale.autoscaler.queues.model import QueueReading
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.names import endpoint_name


class Histories:
    """The history of every endpoint that reads queues; gone with the program.

    Args:
        reading: what a queue watcher (by id) read last.
    """

    def __init__(self, reading: Callable[[str], QueueReading | None]) -> None:
        self._reading = reading
        self._histories: dict[str, History] = {}

    def note(self, endpoint: str, spec: EndpointSpec, now: float) -> None:
        """Keep what its queues are like now; nothing where one of them cannot be had."""
        found = [self._reading(watcher) for watcher in sorted(spec.watchers)]
        seen = [one for one in found if one is not None and one.total is not None]
        if seen and len(seen) == len(found):
            self._histories.setdefault(endpoint, History()).note(_reading(seen, now))

    def forget(self, endpoint: str) -> None:
        """Drop the history of an endpoint that is gone."""
        self._histories.pop(endpoint, None)

    def workload(self, endpoint: str, service: float | None) -> list[Request]:
        """The workload that an endpoint had; `service`: seconds that a request takes, learnt where it is None.

        Raises:
            FailedPreconditionError: none follows from what was seen of it.
        """
        history = self._histories.get(endpoint)
        try:
            return workload([] if history is None else history.readings(), service)
        except NoWorkloadError as error:
            text = f"{endpoint_name(endpoint)} has no history to run: {error}"
            raise FailedPreconditionError(text, reason="NO_HISTORY") from error


def _reading(seen: list[QueueReading], now: float) -> Reading:
    rates = [one.rates for one in seen if one.rates is not None]
    told = len(rates) == len(seen)
    return Reading(
        now,
        sum(one.ready or 0 for one in seen),
        sum(one.unacked or 0 for one in seen),
        sum(one.published for one in rates) if told else UNKNOWN,
        sum(one.delivered for one in rates) if told else UNKNOWN,
    )
