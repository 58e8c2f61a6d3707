"""Named points where a test makes the program fail (the idea is gofail's, which etcd is tested with).

The environment variable GPUSCALE_FAILPOINTS lists them: `name=kill,name2=sleep:2.5,name3=error`. `kill` ends the
process with SIGKILL, `sleep` waits that many seconds, `error` raises UnavailableError with reason FAILPOINT. Names are
`room.operation.point`, such as `allocator.store.before_commit`. Without the variable a point costs one look at an
empty dictionary.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from gpuscale.common.errors import UnavailableError

VARIABLE = "GPUSCALE_FAILPOINTS"


@dataclass(frozen=True, slots=True)
class _Action:
    kind: str
    seconds: float = 0.0


def parse(text: str) -> Mapping[str, _Action]:
    """The actions by point.

    Raises:
        ValueError: the text is not of the form above.
    """
    actions: dict[str, _Action] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        kind, _, argument = action.partition(":")
        if not name or kind not in {"kill", "sleep", "error"} or bool(argument) != (kind == "sleep"):
            raise ValueError(f"{VARIABLE}: {item!r} must be name=kill, name=sleep:SECONDS or name=error")
        actions[name] = _Action(kind, float(argument) if argument else 0.0)
    return actions


_points = parse(os.environ.get(VARIABLE, ""))


def hit(name: str) -> None:
    """Pass a point in a thread.

    Raises:
        UnavailableError: the point is set to `error`.
    """
    action = _points.get(name)
    if action is not None:
        if action.kind == "sleep":
            time.sleep(action.seconds)
        else:
            _fail(name, action)


async def hit_async(name: str) -> None:
    """Pass a point on the event loop.

    Raises:
        UnavailableError: the point is set to `error`.
    """
    action = _points.get(name)
    if action is not None:
        if action.kind == "sleep":
            await asyncio.sleep(action.seconds)
        else:
            _fail(name, action)


def _fail(name: str, action: _Action) -> NoReturn:
    if action.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise UnavailableError(f"failpoint {name}", reason="FAILPOINT")
