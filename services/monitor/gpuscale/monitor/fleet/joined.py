"""What is kept of joins: who joined, in a file, so that nobody else gets a name; and answers that hold a secret, for who repeats a call."""

import asyncio
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from gpuscale.common.errors import AlreadyExistsError, FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.tasks import Clock, uninterrupted
from gpuscale.common.secrets import write_private
from gpuscale.common.security.auth import current_principal
from gpuscale.common.wire import fingerprint


class Joined:
    """Names of those who joined and what they are, lines of `what/name` in a file; none without a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = asyncio.Lock()
        try:
            lines = [] if file is None or not file.exists() else file.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            message = f"the names of hosts that joined cannot be read from {file}: {error}"
            raise FailedPreconditionError(message, reason="AUTHORITY") from error
        self._lines = {line.rpartition("/")[2]: line for line in lines}

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def what(self, name: str) -> str:
        """What joined with that name; empty where nothing did."""
        return self._lines.get(name, "").partition("/")[0]

    def add(self, what: str, name: str) -> None:
        """Add a name; `save` makes it last."""
        self._lines[name] = f"{what}/{name}"

    def forget(self, name: str) -> None:
        """Free a name; `save` makes it last."""
        self._lines.pop(name, None)

    @uninterrupted
    async def save(self) -> None:
        """Write what is here now. Raises UnavailableError: it cannot be written."""
        if self._file is None:
            return
        async with self._lock:  # the newest is written last
            content = "".join(f"{line}\n" for line in self._lines.values()).encode()
            try:
                await asyncio.to_thread(write_private, self._file, content)
            except OSError as error:
                raise UnavailableError(f"cannot write {self._file}: {error.strerror}") from error


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
