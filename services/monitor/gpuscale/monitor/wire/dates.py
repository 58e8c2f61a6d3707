"""Between seconds of the clock and dates.

What the fleet keeps is dated in seconds of its own clock, which steps of the wall clock do not touch. For display they
become dates by the wall clock as it is when they are asked for.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.common.runtime.clock import Clock
from gpuscale.common.wire import to_datetime, to_timestamp


@dataclass(frozen=True, slots=True)
class Dates:
    """One moment on both clocks."""

    now: float
    wall: datetime

    @classmethod
    def of(cls, clock: Clock) -> Self:
        """This moment."""
        return cls(clock.now(), clock.wall())

    def timestamp(self, at: float) -> Timestamp:
        """The date of a moment in seconds of the clock."""
        return to_timestamp(self.wall - timedelta(seconds=self.now - at))

    def seconds(self, timestamp: Timestamp) -> float:
        """A date in seconds of the clock."""
        return self.now - (self.wall - to_datetime(timestamp)).total_seconds()
