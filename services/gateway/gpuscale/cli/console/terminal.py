"""Standard output and standard error: colour, ASCII, notes as JSON, questions, and the progress of a wait.

Standard output has only the payload; notes and errors go to standard error. With `-o json` and `-o jsonl` each line of
standard error is a JSON object, so that scripts can read both.
"""

import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, TextIO
from unicodedata import category, east_asian_width

_GREEN, _YELLOW, _RED = "32", "33", "31"
_STATES: Mapping[str, str] = {
    _GREEN: "ONLINE OK ACTIVE READY CONNECTED",
    _YELLOW: "SIMULATED STALE SLOW DEGRADED PENDING STARTING DRAINING PAUSED NO_CAPACITY",
    _RED: "OFFLINE LOST HUNG FAILED UNKNOWN UNREACHABLE AUTH_FAILED NOT_FOUND TIMEOUT ERROR DISCONNECTED EXPIRED",
}
_COLOURED = {
    state: f"\x1b[{colour}m{state}\x1b[0m" for colour, states in _STATES.items() for state in states.split()
}
_VERBOSITY = "GRPC_VERBOSITY"
_WORD = r"[A-Z][A-Z_]+"
TYPED: Final = " \\"
"""Ends a line of a command that continues on the next."""
_IN_ASCII: Final = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)) | {"…": "...", "\u2013": "-", "\u2014": "-", "·": "."}
)


@dataclass
class Terminal:
    """How this run of the program writes.

    Attributes:
        ascii: text for people is ASCII.
        json: notes are JSON objects.
        folds: long lines on standard output are wrapped to the terminal.
        verbose: details are written too.
        options: those of the command that have a value, by their words and the names of their parameters.
        login: returns the command that renews the login whose token is sent; empty without one.
        noted: notes that are written once.
        grpc_silenced: this process sets gRPC's verbosity, which its caller did not.
    """

    ascii: bool = False
    json: bool = False
    folds: bool = False
    verbose: bool = False
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    login: Callable[[], str] = str
    noted: set[str] = field(default_factory=set[str])
    grpc_silenced: bool = False

    def reset(self) -> None:
        """Forget the options of an earlier run in this process."""
        self.ascii = self.json = self.folds = self.verbose = False
        self.options, self.login, self.noted = {}, str, set()

    def silence_grpc(self) -> None:
        """Keep gRPC's core from writing to stderr, unless the caller set its verbosity: our errors are clearer.

        Call it before gRPC is imported, which reads the variable.
        """
        if _VERBOSITY not in os.environ:
            os.environ[_VERBOSITY] = "NONE"
            self.grpc_silenced = True

    def callers_environment(self) -> dict[str, str]:
        """The environment that the caller of this program set."""
        ours = {_VERBOSITY} if self.grpc_silenced else set[str]()
        return {name: value for name, value in os.environ.items() if name not in ours}


TERMINAL: Final = Terminal()


def coloured() -> bool:
    """Whether standard output is a terminal with colour (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Columns of the terminal; None if standard output is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def width_of(text: str) -> int:
    """The columns that a text takes on a terminal: two for each wide character, none for those that combine."""
    if text.isascii():
        return len(text)
    shown = _readable(text, sys.stdout.encoding)
    return sum(
        0 if category(one) in {"Cf", "Me", "Mn"} else 1 + (east_asian_width(one) in "FW") for one in shown
    )


def printable(text: str) -> str:
    """The text with `?` for all that controls a terminal."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", text)


def write_lines(lines: Sequence[str]) -> None:
    """Write lines for a person, with coloured states on a terminal."""
    shown = list(map(printable, lines))
    shown = [folded(line, sys.stdout) for line in shown] if TERMINAL.folds else shown
    text = _readable("".join(f"{line}\n" for line in shown), sys.stdout.encoding)
    if coloured():
        colour = partial(re.sub, _WORD, lambda found: _COLOURED.get(found[0], found[0]))
        # Not headings: UNKNOWN is a column of reports.
        text = "\n".join(line if line.isupper() else colour(line) for line in text.split("\n"))
    sys.stdout.write(text)


def _readable(text: str, encoding: str | None) -> str:
    """The text in characters that the encoding has."""
    if not TERMINAL.ascii and (encoding or "utf-8").lower().startswith("utf"):
        return text
    return text.translate(_IN_ASCII).encode("ascii", "replace").decode("ascii")


def folded(text: str, stream: TextIO, end: str = "") -> str:
    """The text wrapped to the terminal, with `end` where a line is broken: a backslash in commands."""
    if not stream.isatty():
        return text
    from textwrap import wrap

    width = shutil.get_terminal_size().columns - len(end)
    fit = partial(wrap, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(
        f"{end}\n".join(fit(line, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2)))
        if len(line) > width
        else line
        for line in text.splitlines()
    )


def note(text: str, end: str = "") -> None:
    """Write a line to standard error, wrapped on a terminal; who does not take it stops nothing."""
    shown = _readable(folded(text, sys.stderr, end), sys.stderr.encoding)
    try:
        sys.stderr.write(f"{json.dumps({'note': text}) if TERMINAL.json else shown}\n")
        sys.stderr.flush()
    except OSError:  # its reader is gone, or its disk is full
        sys.stderr = _nowhere()


def note_of_run(text: str) -> None:
    """Write a note of `run`, whose command writes to standard error too."""
    note(f"gpuscalectl run: {text}")


def detail(text: str) -> None:
    """Write a note if `-v` was given."""
    if TERMINAL.verbose:
        note(text)


def ask(question: str) -> bool:
    """Ask a yes-or-no question on standard error. Raises KeyboardInterrupt: the input ends without an answer."""
    while True:
        sys.stderr.write(_readable(f"{question} [y/N]: ", sys.stderr.encoding))
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer:
            raise KeyboardInterrupt
        word = answer.strip().lower()
        if word in {"y", "yes"}:
            return True
        if word in {"", "n", "no"}:
            return False


def flush_output() -> None:
    """Flush standard output; after a failure the interpreter does not try again, with a message of its own.

    Raises OSError: the disk is full, or the pipe is closed.
    """
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = _nowhere()
        raise


def _nowhere() -> io.TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


def pause(seconds: float) -> None:
    """Wait for the next poll."""
    time.sleep(seconds)


REPEAT, REDRAW = 10.0, 1.0
"""Seconds after which an unchanged reason is repeated, and those after which a terminal shows the time anew."""
_AGAIN = "\r\x1b[K"


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came while a command waits."""


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise TerminatedError


class Progress:
    """Shows how long and why a command waits, on standard error: one line on a terminal, else each change.

    In the main thread SIGTERM ends the wait meanwhile, as Ctrl-C does: it raises TerminatedError.
    """

    def __init__(self) -> None:
        self._began = self._since = self._told_at = time.monotonic()
        self._said_at = float("-inf")
        self._last = self._reason = ""
        self._moving: Callable[[float], str] | None = None
        self._drawing: threading.Thread | None = None
        self._ended = threading.Event()
        self._turn = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    def tell(
        self, reason: str, moving: Callable[[float], str] | None = None, waited: float | None = None
    ) -> None:
        """Show the reason for waiting; a terminal goes on to show the time.

        The `reason` is written when more of it changes than figures, and every `REPEAT` seconds; `moving` is a detail whose
        change alone is not worth a line, as it is so many seconds after this call.
        """
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminated)
        with self._turn:
            now = self._told_at = time.monotonic()
            self._since = self._began if waited is None else now - waited
            self._reason, self._moving = f", {reason}", moving
            still = re.sub(r"[\d.]+", "", reason)  # without its figures
            if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not TERMINAL.json:
                if len(self._line()) >= shutil.get_terminal_size().columns:
                    # A wrapped line cannot be overwritten: the reason is written once, in full.
                    if still != self._last:
                        sys.stderr.write(_AGAIN)
                        note(reason)
                    self._last, self._reason = still, ""
                self._draw()
                if self._drawing is None:
                    self._drawing = threading.Thread(target=self._draw_on, daemon=True)
                    self._drawing.start()
            elif still != self._last or now - self._said_at >= REPEAT:
                self._last, self._said_at = still, now
                note(self._line())

    def end(self) -> None:
        """Finish the line."""
        if signal.getsignal(signal.SIGTERM) is _terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._drawing is not None:
            self._ended.set()
            self._drawing.join()
            self._ended.clear()
            self._drawing = None
            sys.stderr.write("\n")

    def _line(self) -> str:
        from gpuscale.cli.grammar.parameters import format_duration

        now = time.monotonic()
        detail = self._moving(now - self._told_at) if self._moving else ""
        return f"waiting {format_duration(now - self._since)}{self._reason}{detail}"

    def _draw(self) -> None:
        sys.stderr.write(f"{_AGAIN}{self._line()[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()

    def _draw_on(self) -> None:
        while not self._ended.wait(REDRAW):
            with self._turn:
                self._draw()
