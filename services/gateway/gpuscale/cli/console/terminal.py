"""What the person or the script at the other end wants: colour, plain ASCII, notes as JSON. One process, one terminal.

Standard output gets the payload and nothing else; notes and errors go to standard error. With `-o json` and `-o jsonl` each
line of standard error that the program writes is one JSON object, so that scripts can read both.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_GREEN, _YELLOW, _RED = "32", "33", "31"
_STATES: Mapping[str, str] = {
    _GREEN: "ONLINE OK ACTIVE READY CONNECTED",
    _YELLOW: "SIMULATED STALE SLOW DEGRADED PENDING STARTING DRAINING PAUSED NO_CAPACITY",
    _RED: "OFFLINE LOST HUNG FAILED UNKNOWN UNREACHABLE AUTH_FAILED NOT_FOUND TIMEOUT ERROR DISCONNECTED EXPIRED",
}
_COLOURS = {state: colour for colour, states in _STATES.items() for state in states.split()}
_WORD = r"[A-Z][A-Z_]+"
_IN_ASCII: Final = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)) | {"…": "...", "\u2013": "-", "\u2014": "-", "·": "."}
)


@dataclass
class Terminal:
    """How this run of the program talks; the global options say it."""

    ascii: bool = False
    """Nothing but ASCII in what is written for people."""
    json: bool = False
    """Notes are JSON objects."""
    verbose: bool = False

    def reset(self) -> None:
        """Forget what an earlier run in this process wanted."""
        self.ascii = self.json = self.verbose = False


TERMINAL: Final = Terminal()


def coloured() -> bool:
    """Whether standard output is a terminal that wants colour (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_lines(lines: Sequence[str]) -> None:
    """Write lines for a person, words of state in colour where the terminal wants it."""
    text = _readable("".join(f"{line}\n" for line in lines), sys.stdout.encoding)
    if coloured():
        text = re.sub(_WORD, lambda found: _paint(found[0]), text)
    sys.stdout.write(text)


def _paint(word: str) -> str:
    return f"\x1b[{_COLOURS[word]}m{word}\x1b[0m" if word in _COLOURS else word


def _readable(text: str, encoding: str | None) -> str:
    """The text as this terminal can show it."""
    if not TERMINAL.ascii and (encoding or "utf-8").lower().startswith("utf"):
        return text
    return text.translate(_IN_ASCII).encode("ascii", "replace").decode("ascii")


def note(text: str) -> None:
    """A line for the person at the terminal, beside the payload."""
    if TERMINAL.json:
        sys.stderr.write(json.dumps({"note": text}) + "\n")
    else:
        sys.stderr.write(_readable(f"{text}\n", sys.stderr.encoding))


def detail(text: str) -> None:
    """A note that only `-v` shows."""
    if TERMINAL.verbose:
        note(text)


def ask(question: str) -> bool:
    """Whether the person at the terminal says yes; the question stands on standard error, as all that is no payload.

    Raises:
        KeyboardInterrupt: the input ended without an answer.
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
