"""What the pages tell people to type are commands that there are, with options that they have."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuscale.cli.grammar.arguments import GLOBAL_OPTIONS, normalise
from gpuscale.cli.main import root
from tests.unit.docs.pages import HAND_WRITTEN, ROOT

PAGES = [ROOT / "README.md", *HAND_WRITTEN, *sorted((ROOT / "examples").glob("*.md"))]
OF_COMMANDS_THEMSELVES = {"--help", "-h", "--version"}


def typed(page: Path) -> Iterator[list[str]]:
    """The words of each command, of consoles and of lines within the text; without what a shell makes of it."""
    text = page.read_text(encoding="utf-8")
    consoles = re.findall(r"^\$ (gpuscalectl .*)$", text, re.MULTILINE)
    within = re.findall(r"`(gpuscalectl [a-z][^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in consoles + within:
        before = re.split(r" (?:\|\|?|&&|>|#) ?|\s#|\)", line.replace("\\|", "|"))[0]
        words = shlex.split(before, comments=True)[1:]
        yield words[: words.index("--")] if "--" in words else words


def unknown(words: list[str]) -> str:
    """What of a command is not there; empty where all is."""
    command: Any = root()
    context: Any = command.make_context("gpuscalectl", [], resilient_parsing=True)
    options = {*GLOBAL_OPTIONS, *OF_COMMANDS_THEMSELVES}
    left = iter(normalise(words))
    for word in left:
        if word.startswith("-") and len(word) > 1:
            if getattr(context, "ignore_unknown_options", False):
                return ""
            name, equals, _ = word.partition("=")
            if GLOBAL_OPTIONS.get(name) and not equals:
                next(left, None)  # its value
            if name not in options and name[:2] not in options:
                return f"{' '.join(words)}: no option {name}"
        elif hasattr(command, "list_commands") and word in command.list_commands(context):
            command = command.get_command(context, word)
            context = command.context_class(
                command, info_name=word, parent=context, ignore_unknown_options=False
            )
            context.ignore_unknown_options = command.context_settings.get("ignore_unknown_options", False)
            options |= {text for one in command.params for text in (*one.opts, *one.secondary_opts)}
        elif hasattr(command, "list_commands") and command is not root() and word[:1].islower():
            return "" if "/" in word else f"{' '.join(words)}: no command {word}"
    return "" if command is not root() else f"{' '.join(words)}: no command"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_there(page: Path) -> None:
    assert [problem for words in typed(page) if (problem := unknown(words))] == []


def test_the_search_finds_commands_and_what_is_wrong_with_them() -> None:
    assert sum(1 for page in PAGES for _ in typed(page)) > 80
    assert unknown(["get", "nodes", "-o", "json"]) == ""
    assert "no option --deadline" in unknown(["drain", "n", "--deadline", "3m"])
    assert "no command" in unknown(["explain-placement"])
    assert "no command" in unknown(["get", "frogs"])
