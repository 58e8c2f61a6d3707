"""When a lease is renewed and when it counts as lost, by this host's own clock. Pure: `now` is an argument.

The lease is counted from before the call that renewed it: whatever the answer took, the server holds the GPUs for longer
than is assumed here. It counts as lost a little before it ends, so that its holder can stop before the GPUs are another's.
"""

RENEWALS = 4
"""Renewals in the time of one lease: the first comes before a third of it has passed."""
LONGEST_PAUSE = 10.0
"""Most seconds between two renewals: a drain, or a lost GPU, is noticed no later."""
RETRY = 1.0
"""Seconds after which a renewal that had no answer is tried again; sooner where leases are short."""
MARGIN = 0.1
"""The part of a lease by which it counts as lost early."""
LONGEST_MARGIN = 5.0
"""Most seconds of that part."""
LOOK = 1.0
"""Most seconds between two looks at the clock: it goes on while the host sleeps, and waiting does not."""


class LeaseTimer:
    """One lease.

    Args:
        ttl: length of the lease from each renewal, in seconds.
        granted_at: when it was granted, at the latest.
        renew_at_once: whether `granted_at` is a guess that a renewal should replace.
    """

    def __init__(self, ttl: float, granted_at: float, *, renew_at_once: bool = False) -> None:
        self.lost: str = ""
        """Why it is lost; empty while it is held."""
        self.given_back: bool = False
        """Whether its holder gave it back."""
        self._ttl = ttl
        self._revoked = ""
        self._pause = min(LONGEST_PAUSE, ttl / RENEWALS)
        self._margin = min(LONGEST_MARGIN, ttl * MARGIN)
        self._ends = granted_at + ttl
        self._next = granted_at if renew_at_once else granted_at + self._pause

    def wait(self, now: float) -> float:
        """Seconds until it is to be renewed, or is lost; 0 where that is now."""
        return max(0.0, min(self._next, self._ends - self._margin) - now)

    def patience(self, now: float) -> float:
        """Seconds that the answer to a renewal may take."""
        return max(0.05, min(self._pause, self._ends - self._margin - now))

    def is_over(self, now: float) -> bool:
        """Whether it is lost by now."""
        if not (self.lost or self.given_back) and now >= self._ends - self._margin:
            self.lost = self._revoked or "it was not renewed in time"
        return bool(self.lost)

    def renewed(self, sent: float, revoked_before_end: float = 0.0, why: str = "") -> None:
        """A renewal that was sent then succeeded.

        Args:
            sent: when it was sent.
            revoked_before_end: seconds before its end at which the server will take it away all the same.
            why: why it will; empty where it will not.
        """
        self._revoked = why
        self._ends = sent + self._ttl - revoked_before_end
        self._next = sent + self._pause

    def unanswered(self, now: float) -> None:
        """A renewal had no answer."""
        self._next = now + min(RETRY, self._pause)

    def refused(self, why: str) -> None:
        """The server says that the lease cannot be renewed any more; no news where it was given back."""
        if not self.given_back:
            self.lost = why

    def give_back(self, now: float) -> None:
        """Its holder releases it: if it is not lost by now, it cannot be lost any more."""
        self.is_over(now)
        self.given_back = True

    def had_ended(self, why: str) -> None:
        """The server says that it was over before it was given back."""
        self.lost = self.lost or why
