"""What helpers with one right share: each hears the agent's user on a unix socket, one order a connection, in a line of JSON.

The standard library alone: a helper is small, and so is what may go wrong in it.
"""

import argparse
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
from typing import Any

PATIENCE = 5.0
"""Seconds in which an order must have come and be answered."""
_LONGEST = 1 << 20
_log = logging.getLogger("gpuscale-helper")

Take = Callable[[Any, int], Awaitable[Mapping[str, object]]]
"""Takes an order of the agent with that pid, and answers. Raises ValueError, KeyError, TypeError, AttributeError: it is none."""
Opened = Callable[[asyncio.TaskGroup], AbstractAsyncContextManager[Take]]
"""Begins to take orders; what it closes is done before the program ends, and so are the tasks of the group."""


async def ask_helper(place: Path, order: Mapping[str, object], patience: float) -> dict[str, Any] | None:
    """What the helper at a socket answers; None where it took the order, and what became of it is not known. Raises OSError."""
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
    """Write JSON in place of what a file holds, on disk once this returns. Raises OSError."""
    draft = file.with_suffix(".new")
    with draft.open("w", encoding="utf-8") as out:
        json.dump(value, out)
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
            connected: socket.socket = writer.get_extra_info("socket")
            size = struct.calcsize("3i")
            pid, user, _ = struct.unpack(
                "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
            async with asyncio.timeout(PATIENCE):
                line = await reader.readline()
                answer = await _answer(agent_user, take, line, pid, user)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            writer.close()


async def _answer(agent_user: int, take: Take, line: bytes, pid: int, user: int) -> Mapping[str, object]:
    if user not in {0, agent_user}:
        _log.warning("refused: user %d, process %d, is not the agent", user, pid)
        return {"problem": "only the agent may ask for that"}
    try:
        return await take(json.loads(line), pid)
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"problem": "that is no order"}


async def _serve(listening: socket.socket, place: Path, agent_user: int, opened: Opened) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as group, opened(group) as take:
        hear = partial(_hear, agent_user, take)
        async with await asyncio.start_unix_server(hear, sock=listening, limit=_LONGEST):
            await stop.wait()
            os.unlink(place)  # noqa: PTH108 - at once


def helper_parser(program: str, description: str) -> argparse.ArgumentParser:
    """What each helper is told."""
    made = argparse.ArgumentParser(program, description=description)
    made.add_argument("--socket", type=Path, required=True, help="unix socket at which the agent asks")
    made.add_argument("--agent-user", default="gpuscale", help="Unix user of the agent (%(default)s)")
    return made


def run_helper(given: argparse.Namespace, opened: Opened) -> int:
    """Run a helper that is told these flags, and return its exit code."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        user = (
            int(given.agent_user) if given.agent_user.isdecimal() else pwd.getpwnam(given.agent_user).pw_uid
        )
    except KeyError:
        sys.exit(f"--agent-user: this host has no user {given.agent_user}")
    place: Path = given.socket
    draft = place.with_suffix(".new")
    with socket.socket(socket.AF_UNIX) as listening:
        draft.unlink(missing_ok=True)
        listening.bind(str(draft))
        draft.chmod(0o666)  # whoever connects is asked by the kernel for their user
        listening.listen()
        draft.replace(place)  # that it is there means that it hears
        _log.warning("hears user %d at %s", user, place)
        asyncio.run(_serve(listening, place, user, opened))
    return 0
