"""Shared code of the privileged helpers: they serve the agent on a unix socket, one JSON order per connection.

Helpers import the standard library only, and NVML where needed, to keep privileged code small.
"""

import asyncio
import json
import logging
import os
import pwd
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

PATIENCE = 5.0
"""Timeout of one order, in seconds."""
_LONGEST = 1 << 20
_log = logging.getLogger("gpuscale-helper")

Take = Callable[[Any, int], Awaitable[Mapping[str, object]]]
"""Handles an order from the process with that pid. ValueError, KeyError, TypeError or AttributeError if it is malformed."""
Opened = Callable[[asyncio.TaskGroup], AbstractAsyncContextManager[Take]]
"""Starts handling orders. Its cleanup and the tasks of the group finish before the program exits."""


async def ask_helper(place: Path, order: Mapping[str, object], patience: float) -> dict[str, Any] | None:
    """Send an order; returns the helper's answer, None if it may have acted without one. OSError if it is unreachable."""
    reader, writer = await asyncio.open_unix_connection(place)
    try:
        async with asyncio.timeout(patience):
            writer.write(json.dumps(order).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
            return answer
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        writer.close()


def keep(file: Path, value: object) -> None:
    """Atomically replace a private file with JSON and sync it, in the room of `FILE.new` if that is there. Raises OSError."""
    draft = file.with_suffix(".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as out:
        json.dump(value, out)
        out.truncate()
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


async def _hear(
    agent_user: int, take: Take, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with suppress(OSError, TimeoutError):
        try:
            peer: socket.socket = writer.get_extra_info("socket")
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, user, _ = struct.unpack("3i", credentials)
            async with asyncio.timeout(PATIENCE):
                line = await reader.readline()
                if user in {0, agent_user}:
                    try:
                        answer = await take(json.loads(line), pid)
                    except (ValueError, KeyError, TypeError, AttributeError):
                        answer = {"problem": "invalid order"}
                else:
                    _log.warning("refused process %d of user %d: not the agent", pid, user)
                    answer = {"problem": "only the agent may do that"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            writer.close()


async def _serve(listening: socket.socket, place: Path, agent_user: int, opened: Opened) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as group, opened(group) as take:
        hear = partial(_hear, agent_user, take)
        async with await asyncio.start_unix_server(hear, sock=listening, limit=_LONGEST):
            await stop.wait()
            os.unlink(place)  # noqa: PTH108 - does not block


def helper_parser(program: str, description: str) -> "argparse.ArgumentParser":
    """A parser with the flags that all helpers have."""
    import argparse  # the agent, which needs `keep` only, goes without

    made = argparse.ArgumentParser(program, description=description)
    made.add_argument("--socket", type=Path, required=True, help="unix socket to serve the agent on")
    made.add_argument("--agent-user", default="gpuscale", help="Unix user of the agent (%(default)s)")
    return made


def run_helper(given: "argparse.Namespace", opened: Opened) -> int:
    """Run a helper until SIGTERM or SIGINT and return its exit code."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        user = (
            int(given.agent_user) if given.agent_user.isdecimal() else pwd.getpwnam(given.agent_user).pw_uid
        )
    except KeyError:
        sys.exit(f"--agent-user: no such user: {given.agent_user}")
    place: Path = given.socket
    draft = place.with_suffix(".new")
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            draft.unlink(missing_ok=True)
            listening.bind(str(draft))
            draft.chmod(0o666)  # access is checked by SO_PEERCRED
            listening.listen()
            draft.replace(place)  # the socket appears only once it accepts connections
        except OSError as error:
            sys.exit(f"--socket: cannot listen on {place}: {error.strerror or error}")
        _log.warning("serving user %d on %s", user, place)
        asyncio.run(_serve(listening, place, user, opened))
    return 0
