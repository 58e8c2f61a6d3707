"""What the tests of the pages share: their text, their tables, and the settings they speak of."""

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from gpuscale.common.config.sources import Settings

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
SERVICES = ROOT / "services"
ROOMS = {
    "common": "common", "monitor": "monitor", "allocator": "allocator", "autoscaler": "autoscaler",
    "gateway": "",
}  # fmt: skip
"""Page of a room, and where below `gpuscale` the names in its tables begin."""


HAND_WRITTEN = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "reference")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each table row, headings too."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def reasons() -> dict[str, list[str]]:
    """Each reason of the generated page, with the cells of its row."""
    table = rows(read("reference/errors.md").partition("\n## Reasons\n")[2])
    return {cells[0].strip("`"): cells for cells in table if cells[0].startswith("`")}


def scripts() -> set[str]:
    """The names of the programs that gpuscale and its add-ons install."""
    projects = [SERVICES.parent / "pyproject.toml", *SERVICES.parent.glob("addons/*/pyproject.toml")]
    return {name for path in projects for name in tomllib.loads(path.read_text())["project"]["scripts"]}


def programs() -> list[type[Settings]]:
    """The settings of every program: each class in a settings.py, or of an engine, that names its own section."""
    files = sorted([*SERVICES.rglob("*settings.py"), *SERVICES.rglob("engines/*/engine.py")])
    names = [".".join(path.relative_to(SERVICES).with_suffix("").parts[1:]) for path in files]
    addons = [f"{path.name}.engine" for path in SERVICES.parent.glob("addons/*/gpuscale_*")]
    modules = [importlib.import_module(name) for name in (*names, *addons)]
    found = {value for module in modules for _, value in inspect.getmembers(module, inspect.isclass)}
    own = [one for one in found if issubclass(one, Settings) and "section" in vars(one)]
    return sorted(own, key=lambda one: one.section)
