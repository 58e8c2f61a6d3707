"""A shell in which `gpuscalectl` is typed again and again: one process that stays, so that a command costs no start of Python.

Words come as a line of JSON, and what a run left behind goes back as one.
"""

import json
import os
import sys
from pathlib import Path

from tests.support.cli import run_cli

CONTEXTS = Path.home() / ".config" / "gpuscale" / "contexts.toml"


def main() -> None:
    """Run commands until standard input ends."""
    answers = sys.stdout
    for line in sys.stdin:
        ran = run_cli(*json.loads(line), environment={"GPUSCALE_CONTEXTS": os.fspath(CONTEXTS)})
        answers.write(f"{json.dumps([ran.code, ran.out, ran.err])}\n")
        answers.flush()


if __name__ == "__main__":
    main()
