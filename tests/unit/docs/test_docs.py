"""What the pages in docs/ name is there: files, links, states and codes; and their numbers are those of the code."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.docs.pages import DOCS, ROOMS, ROOT, SERVICES, programs, read, rows

PAGES = sorted([*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *DOCS.rglob("*.md")])
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "KiB": 1024.0, "MiB": 1024.0**2}
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?) ?([A-Za-z%]*)")


def links(page: Path) -> list[Path]:
    found: list[str] = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in found if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    assert [str(target) for target in links(page) if not target.exists()] == []


def headings(page: Path) -> set[str]:
    """What links to headings of a page may end with, as forges make it of them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    found: list[tuple[str, str]] = re.findall(
        r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")
    )
    aims = [((page.parent / target).resolve() if target else page, heading) for target, heading in found]
    assert [(aim.name, heading) for aim, heading in aims if heading not in headings(aim)] == []


def test_every_page_that_code_speaks_of_is_there() -> None:
    folders = [ROOT / name for name in ("services", "tests", "tools", "bench", "deploy", "examples")]
    kinds = {".py", ".toml", ".yml", ".yaml"}
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    texts = [path.read_text(encoding="utf-8") for path in files]
    named = {name for text in texts for name in re.findall(r"\bdocs/[\w/-]+\.md\b", text)}
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page.suffix == ".md" and page.exists() and page not in seen:
            seen.add(page)
            left += links(page)
    assert [str(page) for page in PAGES if page not in seen] == []


def test_every_file_in_the_table_of_the_architecture_exists() -> None:
    """A row that says "the same" speaks of the folder of the row above."""
    folder, checked = ROOT, 0
    for cells in rows(read("internals/architecture.md").partition("## Where to look")[2]):
        named = re.findall(r"`([^`]+/)`", cells[1])
        folder = ROOT / named[0] if named else folder
        for file in re.findall(r"`([^`]+\.\w+)`", cells[2]):
            assert list(folder.rglob(file)) if "*" in file else (folder / file).is_file(), (cells[0], file)
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_in_the_tables_of_a_room_exists(room: str) -> None:
    folder = SERVICES / room / "gpuscale" / ROOMS[room]
    cells = (" ".join(row) for row in rows(read(f"internals/{room}.md")))
    files = [file for one in cells for file in re.findall(r"`([\w/]+\.py)`", one)]
    assert len(files) >= 5
    tests = {path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    shown = {part for path in tests for part in (str(path), path.name)}
    assert [file for file in files if file not in shown and not (folder / file).is_file()] == []


@pytest.mark.parametrize(
    ("page", "module", "enum"),
    [
        ("allocation.md", "allocator.placing.constraints", "Obstacle"),
        ("allocation.md", "allocator.placing.refusal", "RefusalKind"),
        ("reference/api-autoscaler.md", "autoscaler.domain.decisions", "Code"),
        ("autoscaling.md", "autoscaler.domain.replicas", "ReplicaState"),
        ("autoscaling.md", "autoscaler.domain.signals", "QueueState"),
        ("monitoring.md", "monitor.model.readings", "GpuState"),
        ("reference/api-types.md", "monitor.model.readings", "ReadingStatus"),
        ("monitoring.md", "monitor.model.nodes", "NodeState"),
        ("monitoring.md", "monitor.health.checks", "HealthCheck"),
        ("monitoring.md", "monitor.health.checks", "HealthSeverity"),
        ("monitoring.md", "monitor.health.checks", "HealthAction"),
    ],
)
def test_every_state_and_code_that_users_see_is_on_its_page(page: str, module: str, enum: str) -> None:
    words = set(re.findall(r"\b(?:DECISION_CODE_|READING_STATUS_)?([A-Z][A-Z_]+)", read(page)))
    members = getattr(importlib.import_module(f"gpuscale.{module}"), enum)
    assert [member.name for member in members if member.name not in words] == []


def numbered(room: str) -> Iterator[tuple[str, str]]:
    """(how much, where it stands in the code) of each row of a page's table of numbers."""
    for cells in rows(read(f"internals/{room}.md")):
        if len(cells) == 3 and NUMBER.match(cells[1]) and cells[2].startswith("`"):
            yield cells[1], cells[2].strip("`")


def value(room: str, where: str) -> object:
    """What a constant such as `sweeper.TICK`, or a flag of a program of the room, is in the code."""
    if where.startswith("--"):
        name = where[2:].replace("-", "_")
        owners = [one for one in programs() if one.__module__.startswith(f"gpuscale.{room}")]
        [default] = {one.model_fields[name].default for one in owners if name in one.model_fields}
        return default
    parts = [part for part in ("gpuscale", ROOMS[room], *where.split(".")) if part]
    depth = next(index for index, part in enumerate(parts) if part.startswith("_") or not part.islower())
    found: Any = importlib.import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        found = getattr(found, part)
    return found


def readings(text: str) -> list[set[float]]:
    """Each number of a text: as it stands, and in the unit that the code counts in (seconds, bytes)."""
    found = ((float(number.replace(",", "")), unit) for number, unit in NUMBER.findall(text))
    return [{number, number * UNITS.get(unit, 1.0)} for number, unit in found]


@pytest.mark.parametrize("room", ROOMS)
def test_every_number_in_the_tables_of_a_room_is_the_one_in_the_code(room: str) -> None:
    found = list(numbered(room))
    assert found
    for text, where in found:
        in_code = value(room, where)
        expected = list(in_code) if isinstance(in_code, tuple) else [in_code]
        shown = readings(text)
        assert len(shown) == len(expected), (where, text)
        pairs = zip(expected, shown, strict=True)
        assert all(one in choices for one, choices in pairs), (where, text, in_code)
