"""Answers that hold a secret, for whoever repeats the call that made it."""

from typing import Any, Final, Generic, TypeVar

from gpuscale.common.errors import AlreadyExistsError
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import current_principal
from gpuscale.common.wire import fingerprint

MOST_SECRETS: Final = 1000
"""As many of a kind may be used at once."""

A = TypeVar("A")


class Repeats(Generic[A]):
    """Answers by caller and request id, each until the secret in it ends, and only in memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[tuple[str, str], tuple[str, A, float]] = {}

    def find(self, request: Any) -> A | None:
        """The answer to the same request of the same caller, if any; AlreadyExistsError if its arguments differ."""
        now = self._clock.now()
        self._all = {key: one for key, one in self._all.items() if one[2] > now}
        found = self._all.get(_key(request))
        if found is None:
            return None
        if found[0] != fingerprint(request):
            raise AlreadyExistsError("request_id was used with other arguments", reason="REQUEST_ID_REUSED")
        return found[1]

    def keep(self, request: Any, answer: A, expires: float) -> None:
        """Keep an answer until `expires`, where the request has an id; the oldest of too many makes room."""
        if request.request_id:
            if len(self._all) >= MOST_SECRETS:
                del self._all[next(iter(self._all))]
            self._all[_key(request)] = fingerprint(request), answer, expires


def _key(request: Any) -> tuple[str, str]:
    return current_principal().name, request.request_id.lower()
