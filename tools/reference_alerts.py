"""The reference page of the alerts: what each says, how long that lasts before it fires, and what to look at first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

RULES = Path(__file__).resolve().parent.parent / "deploy/prometheus/rules.yml"
HEAD = """# Every alert

Written by `make docs` from [rules.yml](../../deploy/prometheus/rules.yml).

| alert | severity | after | it says | look first at |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The text of the page."""
    read: Any = YAML(typ="safe")  # its stubs leave out what it reads
    groups: list[dict[str, Any]] = read.load(RULES)["groups"]
    return HEAD + "".join(_row(rule) for group in groups for rule in group["rules"] if "alert" in rule)


def _row(rule: dict[str, Any]) -> str:
    said = rule["annotations"]
    summary, look = (
        re.sub(r"{{ \$(?:labels\.)?(\w+)[^}]*}}", r"*\1*", said[name]) for name in ("summary", "first_look")
    )
    cells = (
        f"`{rule['alert']}`",
        rule["labels"]["severity"],
        rule.get("for", "at once"),
        summary,
        look,
    )
    return f"| {' | '.join(cells)} |\n"
