"""Screens over `gpuscalectl top`: what a command says, and whether one is meant."""

import asyncio
import os
import termios
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Footer, RichLog, Static

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
