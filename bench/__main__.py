"""Run the measurements: all of them, or those that are named.

python -m bench              all
python -m bench reserve      one
python -m bench placement --seeds 2     one, with arguments of its own (--help lists them)
python -m bench --base ../first reserve     the same of another checkout, in turns, and both beside each other (bench/_turns.py)
"""

from __future__ import annotations

import importlib
import platform
import sys
import timeit
from pathlib import Path

from bench._turns import asked_for, compare

HERE = Path(__file__).parent
ALL = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def main() -> None:
    """Run each module's main() in turn, or compare them with another checkout's."""
    base, turns, sys.argv[1:] = asked_for(sys.argv[1:])
    options = next((place for place, word in enumerate(sys.argv) if word.startswith("-")), len(sys.argv))
    names = sys.argv[1:options] or ALL
    unknown = sorted(set(names) - set(ALL))
    if unknown:
        sys.exit(f"no such measurement: {', '.join(unknown)} (there are: {', '.join(ALL)})")
    sys.argv[1:] = sys.argv[options:]
    print(_interpreter(), flush=True)
    if base:
        compare(base, turns, names, sys.argv[1:])
        return
    for name in names:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


def _interpreter() -> str:
    """Which Python runs, and how fast: one that was compiled without profile-guided optimisation takes up to twice as long."""
    turn = min(
        timeit.repeat(
            "attend(7)", "def attend(n):\n return [n + 1 for n in range(n)]", repeat=5, number=20_000
        )
    )
    return f"Python {platform.python_version()}, {platform.python_compiler()}: {turn * 50:.2f} us for a call with a loop of 7"


if __name__ == "__main__":
    main()
