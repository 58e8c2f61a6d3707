"""Standard output and standard error: colour, plain ASCII, notes as JSON, questions, and the progress of a wait.

Standard output gets the payload and nothing else; notes and errors go to standard error. With `-o json` and `-o jsonl` each
line on standard error is one JSON object, so that scripts can read both.
"""

import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TextIO, runtime_checkable

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
"""At the end of a line that goes on in the next, of a command."""
_IN_ASCII: Final = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)) | {"…": "...", "\u2013": "-", "\u2014": "-", "·": "."}
)


@dataclass
class Terminal:
    """How this run of the program writes, as its options say."""

    ascii: bool = False
    """Whether text for people is ASCII only."""
    json: bool = False
    """Whether notes are JSON objects."""
    folds: bool = False
    """Whether lines on standard output are broken where the terminal ends."""
    verbose: bool = False
    grpc_silenced: bool = False
    """Whether this process has a variable that its caller did not set."""

    def reset(self) -> None:
        """Forget the options of an earlier run in this process."""
        self.ascii = self.json = self.folds = self.verbose = False

    def silence_grpc(self) -> None:
        """Keep gRPC's core from writing to stderr, unless the caller says otherwise: our errors are clearer.

        To be called before gRPC is imported, which is when the variable is read.
        """
        if _VERBOSITY not in os.environ:
            os.environ[_VERBOSITY] = "NONE"
            self.grpc_silenced = True

    def callers_environment(self) -> dict[str, str]:
        """The environment as the caller of this program gave it."""
        ours = {_VERBOSITY} if self.grpc_silenced else set[str]()
        return {name: value for name, value in os.environ.items() if name not in ours}


TERMINAL: Final = Terminal()


def coloured() -> bool:
    """Whether standard output is a terminal with colour (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_lines(lines: Sequence[str]) -> None:
    """Write lines for a person, states in colour on a terminal that has it."""
    shown = [folded(line, sys.stdout) for line in lines] if TERMINAL.folds else lines
    text = _readable("".join(f"{line}\n" for line in shown), sys.stdout.encoding)
    if coloured():
        text = re.sub(_WORD, lambda found: _COLOURED.get(found[0], found[0]), text)
    sys.stdout.write(text)


def _readable(text: str, encoding: str | None) -> str:
    """The text in characters that this terminal can show."""
    if not TERMINAL.ascii and (encoding or "utf-8").lower().startswith("utf"):
        return text
    return text.translate(_IN_ASCII).encode("ascii", "replace").decode("ascii")


def folded(text: str, stream: TextIO, end: str = "") -> str:
    """The text in lines that fit the terminal, broken between words after `end`: a backslash in what is to be typed."""
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
    """Write a line to standard error; `folded` on a terminal."""
    if TERMINAL.json:
        sys.stderr.write(json.dumps({"note": text}) + "\n")
    else:
        sys.stderr.write(_readable(f"{folded(text, sys.stderr, end)}\n", sys.stderr.encoding))


def detail(text: str) -> None:
    """Write a note that only `-v` shows."""
    if TERMINAL.verbose:
        note(text)


def ask(question: str) -> bool:
    """Ask the person at the terminal, on standard error; whether the answer is yes.

    Raises:
        KeyboardInterrupt: the input ends without an answer.
    """
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


@runtime_checkable
class _Encoding(Protocol):
    """A stream of bytes underneath."""

    def reconfigure(self, *, encoding: str) -> None:
        """Take another encoding."""


def prepare_streams(*, data: bool) -> None:
    """Make both streams writable: closed ones (`>&-`) swallow output, and `data` is UTF-8 whatever the locale says."""
    if sys.__stdout__ is None:
        sys.stdout = _nowhere()
    if sys.__stderr__ is None:
        sys.stderr = _nowhere()
    if data and isinstance(sys.stdout, _Encoding):
        sys.stdout.reconfigure(encoding="utf-8")


def flush_output() -> None:
    """Write the rest of the payload; if that fails, the interpreter does not try again with a message of its own.

    Raises:
        OSError: the disk is full, or the pipe is closed.
    """
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = _nowhere()
        raise


def _nowhere() -> io.TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


def pause(seconds: float) -> None:
    """Wait until it is time to look again."""
    time.sleep(seconds)


REPEAT = 10.0
"""Seconds after which an unchanged reason for waiting is repeated."""
_AGAIN = "\r\x1b[K"


class Progress:
    """Shows on standard error how long a wait takes and why it goes on: one line on a terminal, else each change."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._said_at = float("-inf")
        self._last = ""
        self._open = False

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def tell(self, reason: str, moving: str = "", waited: float | None = None) -> None:
        """Say why the wait goes on.

        Args:
            reason: repeated when it changes, and now and then.
            moving: more about it whose change alone is not worth a line.
            waited: seconds so far, where another clock counts them.
        """
        from gpuscale.cli.grammar.parameters import format_duration

        took = f"waiting {format_duration(self.elapsed if waited is None else waited)}"
        line = f"{took}, {reason}{moving}"
        if sys.stderr.isatty() and not TERMINAL.json:
            most = shutil.get_terminal_size().columns - 1
            if len(line) > most:  # told once, whole: a line that goes on in the next cannot be written over
                still = re.sub(r"[\d.]+", "", reason)  # of which only times go on
                if still != self._last:
                    sys.stderr.write(_AGAIN)
                    note(reason)
                self._last, line = still, f"{took}{moving}"[:most]
            sys.stderr.write(f"{_AGAIN}{line}")
            sys.stderr.flush()
            self._open = True
            return
        if reason == self._last and time.monotonic() - self._said_at < REPEAT:
            return
        self._last, self._said_at = reason, time.monotonic()
        note(line)

    def end(self) -> None:
        """Finish the line."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False
