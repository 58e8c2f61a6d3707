"""Commands about a row of `gpuscalectl top`: what one would type, and the screens for what it says and whether it is meant."""

import asyncio
import os
import termios
from asyncio.subprocess import DEVNULL
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import ClassVar, TypeAlias

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Footer, RichLog, Static

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common import names
from gpuscale.dashboard.rows import Row

LINES = 10_000
"""The last lines of an answer that are kept."""
LINE = 1 << 20
"""Most bytes of one."""
MARGIN = 4
"""Columns beside an answer."""


class Answer(ModalScreen[None]):
    """What a command of gpuscalectl writes, as it writes it. The command ends with the screen.

    Args:
        program: the program, and options before the words.
        words: the command.
    """

    CSS = """
    #typed { height: 1; padding: 0 1; background: $primary-background; }
    RichLog { height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,backspace", "app.pop_screen", "back"),
        Binding("home,g", "to('home')", "top"),
        Binding("end,G", "to('end')", "bottom"),
    ]

    def __init__(self, program: Sequence[str], words: Sequence[str]) -> None:
        super().__init__()
        self._program = program
        self._words = words

    def compose(self) -> ComposeResult:
        """The command, what it writes, and the keys."""
        yield Static(f"$ gpuscalectl {' '.join(self._words)}", id="typed", markup=False)
        yield RichLog(max_lines=LINES, wrap=True, min_width=0, auto_scroll="--follow" in self._words)
        yield Footer()

    def on_mount(self) -> None:
        """Begin."""
        self.run_worker(self._run())

    def action_to(self, where: str) -> None:
        """Scroll to an end of it."""
        log = self.query_one(RichLog)
        (log.scroll_home if where == "home" else log.scroll_end)(animate=False)

    async def _run(self) -> None:
        log = self.query_one(RichLog)
        ours, its = os.openpty()  # so that it writes as to a person: in colours, and tables that fit
        termios.tcsetwinsize(its, (self.size.height, self.size.width - MARGIN))
        reader = asyncio.StreamReader(LINE)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program, *self._words, stdin=DEVNULL, stdout=its, stderr=its
            )
        finally:
            os.close(its)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
        )
        try:
            with suppress(OSError):  # EIO: nobody writes there any more
                async for line in reader:
                    log.write(Text.from_ansi(line.decode(errors="replace").rstrip("\r\n")))
            if code := await process.wait():
                log.write(Text(f"(it ended with exit code {code})", "dim"))
        finally:
            transport.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Box(ModalScreen[bool]):
    """A text in a frame over what was there, until a key is pressed."""

    CSS = """
    Box { align: center middle; }
    #text { width: auto; max-width: 76; height: auto; padding: 1 2; border: thick $primary; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "dismiss(False)", "back")
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The text."""
        yield Static(self._text, id="text", markup=False)


class Confirm(Box):
    """Asks whether a command is meant.

    Args:
        words: the command.
        about: what it is about.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n", "dismiss(False)", "no"),
        Binding("enter", "wait", "neither", show=False),
    ]

    def __init__(self, words: Sequence[str], about: str) -> None:
        super().__init__(f"gpuscalectl {' '.join(words)}\n\n{about}\n\ny does it, n does not")

    def action_wait(self) -> None:
        """Enter is pressed for many things: it does none here."""


Words: TypeAlias = tuple[str, ...]
"""Arguments of gpuscalectl; none where there is nothing to type."""


def why(table: str, row: Row, held: allocator_api.Reservation | None) -> Words:
    """What tells most of it; `held` is the reservation that the row is of, or that holds its GPU."""
    if table in {"endpoints", "decisions"}:
        return ("explain", table.removesuffix("s"), _short(str(row["name"])))
    if held is not None:
        return ("explain", "reservation", _short(held.name))
    if table == "health":
        node, _, uuid = str(row["where"]).partition(" ")
        return ("describe", "gpu", uuid) if uuid else ("describe", "node", node)
    if "gpu" not in row:  # of a reservation that ended meanwhile
        return ()
    name = str(row.get("uuid") or row["gpu"])
    return ("describe", "gpu" if "uuid" in row or "/" in name else "node", name)


def logs(table: str, row: Row, held: allocator_api.Reservation | None) -> Words:
    """What shows what the endpoint, replica or job has written, and goes on."""
    if table in {"endpoints", "decisions"}:
        return ("logs", _short(str(row["name"])).partition("/")[0], "--follow")
    if held is None or not (held.HasField("job") or names.match(names.REPLICA, held.holder)):
        return ()
    return (
        "logs",
        _short(held.name) if held.HasField("job") else names.short_holder(held.holder),
        "--follow",
    )


def end(held: allocator_api.Reservation) -> Words:
    """What stops its job, or gives its GPUs back."""
    return (*(("stop", "job") if held.HasField("job") else ("release",)), _short(held.name))


def of_row(
    table: str, row: Row, reservations: Iterable[allocator_api.Reservation]
) -> allocator_api.Reservation | None:
    """The reservation that a row is of; of a GPU, the first that holds it."""
    if table == "gpus":
        return next(
            (one for one in reservations if any(gpu.uuid == row.get("uuid") for gpu in one.gpus)), None
        )
    named = {"reservations": row.get("name"), "processes": row.get("reservation")}.get(table)
    return next((one for one in reservations if _short(one.name) == named), None)


def _short(name: str) -> str:
    """`jobs/d1` of endpoints/jobs/decisions/d1."""
    return "/".join(name.split("/")[1::2]) or name
