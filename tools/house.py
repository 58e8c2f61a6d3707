"""Measure the house: its sizes, its circles, its names, and how many files one opens to follow a call.

    python tools/house.py            the table: figure, ceiling, goal
    python tools/house.py --check    exits with a line for each figure above its ceiling

Ceilings fall with the figures. One is raised for a capability, or for tests of defects, by what they cost, and the commit says which.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SERVICES = ROOT / "services"


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    value: float
    ceiling: float
    goal: float

    def __str__(self) -> str:
        return f"{self.name:<52} {self.value:>8,.6g} {self.ceiling:>8,.6g} {self.goal:>8,.6g}"


def python_files(folder: Path) -> list[Path]:
    """The Python files under a folder."""
    return sorted(folder.rglob("*.py"))


def lines(files: list[Path]) -> int:
    """Their lines in all."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def module_name(path: Path) -> str:
    """The dotted name of a file under services/."""
    parts = path.relative_to(SERVICES).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms() -> dict[str, list[Path]]:
    """The files of each room, by its package, such as `gpuscale.allocator`."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in python_files(SERVICES):
        found[".".join(module_name(path).split(".")[:2])].append(path)
    return found


def helpers_used_once() -> float:
    """Percent of functions that are private and named at one other place of their file."""
    functions, once = 0, 0
    for path in python_files(SERVICES):
        text = path.read_text(encoding="utf-8")
        named = Counter(re.findall(r"\b_[a-z]\w*", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions += 1
                private = node.name.startswith("_") and not node.name.startswith("__")
                once += private and named[node.name] == 2
    return round(100 * once / functions, 1)


def classes_twice() -> int:
    """How many names two or more classes have."""
    names = Counter(
        node.name
        for path in python_files(SERVICES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sum(count > 1 for count in names.values())


def imported(path: Path) -> Iterator[str]:
    """The modules that a file names in its imports; those for type checkers alone too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder_circles() -> int:
    """Pairs of folders of one room of which each reaches the other."""
    count = 0
    for files in rooms().values():
        folder_of = {module_name(path): path.parent for path in files}
        edges: dict[Path, set[Path]] = defaultdict(set)
        for path in files:
            edges[path.parent] |= {folder_of[name] for name in imported(path) if name in folder_of}
        reach = {folder: reached(folder, edges) for folder in edges}
        count += sum(
            a < b and b in reach[a] and a in reach.get(b, set())
            for a in reach
            for b in reach[a]
            if a not in b.parents and b not in a.parents
        )
    return count


def reached(start: Path, edges: dict[Path, set[Path]]) -> set[Path]:
    """All folders that imports lead to from one."""
    seen: set[Path] = set()
    todo = [start]
    while todo:
        for folder in edges[todo.pop()] - seen:
            seen.add(folder)
            todo.append(folder)
    return seen


def words() -> int:
    """Words of the pages that are written by hand."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    return sum(len(path.read_text(encoding="utf-8").split()) for path in pages)


def measure() -> list[Figure]:
    """Every figure of the table."""
    from tests.support.traces import traces

    files = python_files(SERVICES)
    found = asyncio.run(traces())
    return [
        Figure("hand-written lines under services/", lines(files), 86_050, 60_000),
        Figure("files under services/", len(files), 375, 380),
        Figure("files from the wire to the disk: Reserve", len(found["Reserve"]), 24, 20),
        Figure("files from the wire to the disk: Renew", len(found["Renew"]), 19, 12),
        Figure("files of a quiet tick", len(found["quiet tick"]), 12, 18),
        Figure("files of a scale-out tick", len(found["scale-out tick"]), 28, 28),
        Figure("private helpers used once, % of functions", helpers_used_once(), 8.0, 8),
        Figure("circles of folders in a room", folder_circles(), 0, 0),
        Figure("class names that exist twice", classes_twice(), 9, 10),
        Figure("lines of tests", lines(python_files(ROOT / "tests")), 82_926, 55_000),
        Figure("words of hand-written docs", words(), 39_938, 40_000),
    ]


def main() -> None:
    """Print the table; with --check exit with what is above its ceiling, with --trace name the files of each trace."""
    if "--trace" in sys.argv:
        from tests.support.traces import traces

        for name, files in asyncio.run(traces()).items():
            print(name, *sorted(files), sep="\n    ")
        return
    figures = measure()
    print(f"{'':<52} {'is':>8} {'ceiling':>8} {'goal':>8}", *figures, sep="\n")
    above = [figure.name for figure in figures if figure.value > figure.ceiling]
    if "--check" in sys.argv and above:
        sys.exit("above the ceiling: " + "; ".join(above))


if __name__ == "__main__":
    main()
