"""Commands for a row of `gpuscalectl top`, and the screens that confirm them and show their output."""

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
"""Most lines of output kept; older ones are dropped."""
LINE = 1 << 20
"""Most bytes of a line."""
MARGIN = 4
"""Columns beside the output."""


class Answer(ModalScreen[None]):
    """Runs a gpuscalectl command and shows its output live. Closing the screen ends the command."""

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
        """Lay out the command, its output and the keys."""
        yield Static(f"$ gpuscalectl {' '.join(self._words)}", id="typed", markup=False)
        yield RichLog(max_lines=LINES, wrap=True, min_width=0, auto_scroll="--follow" in self._words)
        yield Footer()

    def on_mount(self) -> None:
        """Start the command."""
        self.run_worker(self._run())

    def action_to(self, where: str) -> None:
        """Scroll to the top or the bottom."""
        log = self.query_one(RichLog)
        (log.scroll_home if where == "home" else log.scroll_end)(animate=False)

    async def _run(self) -> None:
        log = self.query_one(RichLog)
        ours, its = os.openpty()  # a terminal, so that it uses colours and tables that fit
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
            with suppress(OSError):  # EIO: the writing end is closed
                async for line in reader:
                    log.write(Text.from_ansi(line.decode(errors="replace").rstrip("\r\n")))
            if code := await process.wait():
                log.write(Text(f"(exit code {code})", "dim"))
        finally:
            transport.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Box(ModalScreen[bool]):
    """A framed text over the screen, until a key is pressed."""

    CSS = """
    Box { align: center middle; }
    #text { width: auto; max-width: 100%; height: auto; padding: 1 2; border: thick $primary; background: $surface; }
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
    """Asks to confirm a command; `about` is what it affects."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n", "dismiss(False)", "no"),
        Binding("enter", "wait", "neither", show=False),
    ]

    def __init__(self, words: Sequence[str], about: str) -> None:
        super().__init__(f"gpuscalectl {' '.join(words)}\n\n{about}\n\ny: yes, n: no")

    def action_wait(self) -> None:
        """Ignore Enter: it is too easily pressed by habit."""


Words: TypeAlias = tuple[str, ...]
"""Arguments of gpuscalectl; empty where no command fits."""


def why(table: str, row: Row, held: allocator_api.Reservation | None) -> Words:
    """The command that explains a row; `held` is the row's reservation, or the one that holds its GPU."""
    if table in {"endpoints", "decisions"}:
        return ("explain", table.removesuffix("s"), _short(str(row["name"])))
    if held is not None:
        return ("explain", "reservation", _short(held.name))
    if table == "health":
        kind, name = ("gpu", row["uuid"]) if row["uuid"] else ("node", row["where"])
        return ("describe", kind, str(name))
    if "gpu" not in row:  # its reservation has ended meanwhile
        return ()
    name = str(row.get("uuid") or row["gpu"])
    return ("describe", "gpu" if "uuid" in row or "/" in name else "node", name)


def logs(table: str, row: Row, held: allocator_api.Reservation | None) -> Words:
    """The command that follows the logs of a row's endpoint, replica or job."""
    if table in {"endpoints", "decisions"}:
        return ("logs", _short(str(row["name"])).partition("/")[0], "--follow")
    if held is not None and held.HasField("job"):
        return ("logs", _short(held.name), "--follow")
    if held is not None and names.match(names.REPLICA, held.holder):
        return ("logs", names.short_holder(held.holder), "--follow")
    return ()


def end(held: allocator_api.Reservation) -> Words:
    """The command that stops its job, or releases its GPUs."""
    verb = ("stop", "job") if held.HasField("job") else ("release",)
    return (*verb, _short(held.name))


def of_row(
    table: str, row: Row, reservations: Iterable[allocator_api.Reservation]
) -> allocator_api.Reservation | None:
    """The reservation a row belongs to; for a GPU, the first that holds it."""
    if table == "gpus":
        uuid = row.get("uuid")
        return next((one for one in reservations if any(gpu.uuid == uuid for gpu in one.gpus)), None)
    named = {"reservations": row.get("name"), "processes": row.get("reservation")}.get(table)
    return next((one for one in reservations if _short(one.name) == named), None)


def _short(name: str) -> str:
    """`jobs/d1` of endpoints/jobs/decisions/d1."""
    return "/".join(name.split("/")[1::2]) or name
