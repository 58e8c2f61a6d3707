"""What is remembered of a driver that did not answer at all and was interrupted. Pure: times are arguments, in seconds."""

# A driver that had to be interrupted is tried again soon: it may just have got over it.
LONGEST_PAUSE_SECONDS = 5.0


class Interruptions:
    """Since when the driver is silent, from the interruption until it is known how it goes on.

    A GPU that was HUNG before goes on being so until it was read again: that the source was closed and opened meanwhile
    is no news of it.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._since: float | None = None
        self._at = 0.0

    def note(self, since: float, now: float) -> None:
        """The driver was interrupted, having been silent since a time."""
        self.count += 1
        self._since = since if self._since is None else min(self._since, since)
        self._at = now

    def silent_since(self, read_at: float) -> float | None:
        """Since when a GPU is silent that was read last at that time; None where it was read after the interruption."""
        return self._since if read_at < self._at else None

    def pause(self, usual: float) -> float:
        """How long to wait until the source is opened again."""
        return usual if self._since is None else min(usual, LONGEST_PAUSE_SECONDS)

    def refused(self, asked_at: float) -> None:
        """An opening failed that began at that time: unless it was interrupted itself, the driver answers again."""
        if asked_at > self._at:
            self._since = None
