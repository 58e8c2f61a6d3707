"""When to renew a lease and when it counts as lost, by this host's clock. Pure: `now` is an argument.

The lease starts when the renewal is sent, so the server always holds the GPUs for longer than assumed here. It counts as lost
slightly before it ends, so that the holder can stop before someone else gets the GPUs.
"""

RENEWALS = 4
"""Renewals per length of the lease: the first comes before a third of it has passed."""
LONGEST_PAUSE = 10.0
"""Most seconds between renewals, which also report a drain or a lost GPU."""
RETRY = 1.0
"""Seconds before a failed renewal is retried; fewer for short leases."""
MARGIN = 0.1
"""Fraction of a lease by which it counts as lost early."""
LONGEST_MARGIN = 5.0
"""Most seconds of that."""
LOOK = 1.0
"""Most seconds between checks of the clock, which advances while the host sleeps, unlike waits."""


class LeaseTimer:
    """The timer of one lease of `ttl` seconds from each renewal, granted at `granted_at` at the latest.

    `renew_at_once`: whether that time is a guess.
    """

    def __init__(self, ttl: float, granted_at: float, *, renew_at_once: bool = False) -> None:
        self.lost: str = ""
        """Why it is lost; empty while it is held."""
        self.given_back: bool = False
        """Whether its holder released it."""
        self._ttl = ttl
        self._revoked = ""
        self._pause = min(LONGEST_PAUSE, ttl / RENEWALS)
        self._margin = min(LONGEST_MARGIN, ttl * MARGIN)
        self._ends = granted_at + ttl
        self._next = granted_at if renew_at_once else granted_at + self._pause

    def wait(self, now: float) -> float:
        """Seconds until a renewal is due or the lease is lost; 0 for now."""
        return max(0.0, min(self._next, self._ends - self._margin) - now)

    def patience(self, now: float) -> float:
        """Most seconds to wait for the answer to a renewal."""
        return max(0.05, min(self._pause, self._ends - self._margin - now))

    def is_over(self, now: float) -> bool:
        """Whether the lease is lost."""
        if not (self.lost or self.given_back) and now >= self._ends - self._margin:
            self.lost = self._revoked or "it was not renewed in time"
        return bool(self.lost)

    def renewed(self, sent: float, revoked_before_end: float = 0.0, why: str = "") -> None:
        """Record a renewal that was `sent` then and succeeded.

        The server will revoke the lease `revoked_before_end` seconds before its end, and says `why`, if it will.
        """
        self._revoked = why
        self._ends = sent + self._ttl - revoked_before_end
        self._next = sent + self._pause

    def unanswered(self, now: float) -> None:
        """Record a renewal without an answer."""
        self._next = now + min(RETRY, self._pause)

    def refused(self, why: str) -> None:
        """Record that the server refused to renew the lease; ignored after a release."""
        if not self.given_back:
            self.lost = why

    def give_back(self, now: float) -> None:
        """Record the release by the holder, after which the lease cannot be lost."""
        self.is_over(now)
        self.given_back = True

    def had_ended(self, why: str) -> None:
        """Record that the lease had ended before it was released."""
        self.lost = self.lost or why
