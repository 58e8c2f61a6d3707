"""Hold the house to its sizes: files at most 700 lines, functions at most 90, at most 5 `type: ignore`.

    python tools/check_size.py

Prints the medians too, so that growth is seen before a limit is met.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 90
MAX_TYPE_IGNORES = 5
IGNORE = "type:" + " ignore"


def sources() -> list[Path]:
    """Hand-written Python of the services, add-ons, tools, benches and examples."""
    rooms = ("services", "addons", "tools", "bench", "examples")
    found = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    return sorted(found)


def functions(path: Path) -> list[tuple[int, str]]:
    """Length in lines and place of every function of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
        )
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def main() -> None:
    """Print the figures; exit with a line for each thing that is too large."""
    files = {path: path.read_text(encoding="utf-8").splitlines() for path in sources()}
    lengths = [(len(lines), str(path.relative_to(ROOT))) for path, lines in files.items() if lines]
    found = [entry for path in files for entry in functions(path)]
    ignores = [
        f"{path.relative_to(ROOT)}:{number}"
        for path, lines in files.items()
        for number, line in enumerate(lines, 1)
        if IGNORE in line
    ]
    ninety = statistics.quantiles([length for length, _ in found], n=10)[-1]
    print(
        f"{len(lengths)} files, median {statistics.median(n for n, _ in lengths):.0f} lines, longest {max(lengths)}; "
        f"{len(found)} functions, p90 {ninety:.0f} lines, longest {max(found)}; {len(ignores)} ignores"
    )
    problems = [f"file too long ({n} lines): {where}" for n, where in lengths if n > MAX_FILE_LINES]
    problems += [f"function too long ({n} lines): {where}" for n, where in found if n > MAX_FUNCTION_LINES]
    if len(ignores) > MAX_TYPE_IGNORES:
        problems.append(f"{len(ignores)} ignores, at most {MAX_TYPE_IGNORES}: {', '.join(ignores)}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
