"""Who is signed in: the token that a visitor showed, by the secret in the visitor's cookie. Pure.

Tokens stay in memory: a restart signs everybody out.
"""

from __future__ import annotations

from dataclasses import dataclass

LENGTH = 12 * 3600.0
"""Seconds after which a visitor has to sign in again."""
MOST = 1_000
"""Sessions at a time; the oldest makes room."""


@dataclass(frozen=True, slots=True)
class Session:
    """A visitor that showed a token, until `end` (seconds of the same clock as `now`)."""

    token: str
    end: float


class Sessions:
    """All that are open."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def begin(self, secret: str, token: str, now: float) -> None:
        """Remember a token under a secret that nobody can guess."""
        self._open = {key: one for key, one in self._open.items() if one.end > now}
        while len(self._open) >= MOST:
            del self._open[next(iter(self._open))]
        self._open[secret] = Session(token, now + LENGTH)

    def token(self, secret: str, now: float) -> str | None:
        """The token of a session; None where there is none, or its time is over."""
        found = self._open.get(secret)
        return found.token if found is not None and found.end > now else None

    def tokens(self, now: float) -> set[str]:
        """The tokens of all that are open."""
        return {one.token for one in self._open.values() if one.end > now}

    def revoke(self, token: str) -> None:
        """Forget all sessions of a token."""
        self._open = {key: one for key, one in self._open.items() if one.token != token}

    def end(self, secret: str) -> None:
        """Forget it; harmless where there is none."""
        self._open.pop(secret, None)
