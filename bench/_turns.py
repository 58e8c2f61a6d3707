"""Measure two checkouts in turns on this machine, and print one table: the figures of the base, those of this one, and their ratio.

python -m bench --base ../first [--turns 5] [reserve ...] [its arguments]

The base is a folder with another commit and its .venv: `git worktree add ../first COMMIT`, then `make -C ../first .venv/.dev`. Each measurement
is run by its own checkout, one after the other, and the other way round in every second turn, so that a machine that gets
slower tells on both alike. Lines that differ in their numbers alone are one row; a number that is the same in all runs
belongs to the row's name, and lines that never differ are shown as they are. Shown are the medians, and the median of the ratios turn by turn, which holds on a machine whose speed changes.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent.parent
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
NOT_NAMED = "\0"
WIDTH = 58
"""Characters of a row's name."""

Lines = dict[tuple[str, int], str]
"""Each line of an output, by what it is without its numbers and how many such there were before."""


def asked_for(arguments: Sequence[str]) -> tuple[Path | None, int, list[str]]:
    """The base to measure against, if one is named, the turns, and the other arguments."""
    parser = argparse.ArgumentParser("python -m bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--base", type=lambda text: Path(text).resolve())
    parser.add_argument("--turns", type=int, default=5)
    own, others = parser.parse_known_args(arguments)
    return own.base, own.turns, others


def compare(base: Path, turns: int, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Measure what both checkouts have, and print a table for each name."""
    for name in names:
        if not (base / "bench" / f"{name}.py").exists():
            print(f"== {name}: the base has none", flush=True)
            continue
        outputs: dict[Path, list[str]] = {base: [], HERE: []}
        for turn in range(turns):
            for checkout in (base, HERE) if turn % 2 else (HERE, base):
                outputs[checkout].append(_run(checkout, name, arguments))
        print(f"== {name}: base, here, ratio (turn by turn), {turns} turns", flush=True)
        for row in rows(outputs[base], outputs[HERE]):
            print(row, flush=True)


def rows(base: Sequence[str], here: Sequence[str]) -> list[str]:
    """What the first run here printed, with the figures of all runs in place of its own; then what is not in every run."""
    there, ours = [lines(text) for text in base], [lines(text) for text in here]
    runs = (*there, *ours)
    table: list[str] = []
    for key, line in ours[0].items():
        if not all(key in one for one in runs):
            continue
        before_and_after = _numbers(one[key] for one in there), _numbers(one[key] for one in ours)
        columns = [*zip(*before_and_after, strict=True)]
        differing = [(before, after) for before, after in columns if len({*before, *after}) > 1]
        if not differing:
            table.append(line)
            continue
        name = key[0]
        for before, after in columns:
            name = name.replace(NOT_NAMED, "_" if (before, after) in differing else f"{before[0]:g}", 1)
        figures = "  ".join(_figure(before, after) for before, after in differing)
        table.append(f"{name[:WIDTH]:<{WIDTH}}  {figures}")
    for side, texts in (("base", there), ("here", ours)):
        alone = Counter(key[0] for one in texts for key in one if not all(key in run for run in runs))
        table += [f"not in every run, {side}: {text[:100].replace(NOT_NAMED, '_')}" for text in alone]
    return table


def lines(text: str) -> Lines:
    """The lines of an output."""
    found: Lines = {}
    seen: Counter[str] = Counter()
    for line in filter(str.strip, text.splitlines()):
        bare = " ".join(NUMBER.sub(NOT_NAMED, line).split())
        found[bare, seen[bare]] = line
        seen[bare] += 1
    return found


def _numbers(texts: Iterable[str]) -> list[tuple[float, ...]]:
    """The numbers of a line in each run, by their place in it."""
    return [
        *zip(*([float(one.replace(",", "")) for one in NUMBER.findall(text)] for text in texts), strict=True)
    ]


def _figure(before: Sequence[float], after: Sequence[float]) -> str:
    base, here = statistics.median(before), statistics.median(after)
    pairs = [new / old for old, new in zip(before, after, strict=True) if old]
    if not base or not pairs:
        return f"{base:g} {here:g}"
    return f"{base:g} {here:g} {here / base:.2f} ({statistics.median(pairs):.2f})"


def _run(checkout: Path, name: str, arguments: Sequence[str]) -> str:
    python = checkout / ".venv" / "bin" / "python"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # each its own modules
    ran = subprocess.run(
        [python, "-m", "bench", name, *arguments],
        cwd=checkout,
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{checkout}: bench {name} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
    return ran.stdout.partition(f"== {name}\n")[2]
