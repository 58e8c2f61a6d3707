"""Who joined by join tokens, in a file: nobody else gets their names while they are not forgotten."""

import asyncio
from pathlib import Path

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.tasks import uninterrupted
from gpuscale.common.secrets import write_private


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
