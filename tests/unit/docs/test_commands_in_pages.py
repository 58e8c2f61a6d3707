"""What the pages tell people to type are commands that there are, with options that they have."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpuscale.cli.main import root
from tests.unit.docs.pages import HAND_WRITTEN, ROOT

PAGES = [ROOT / "README.md", *HAND_WRITTEN, *sorted((ROOT / "examples").glob("*.md"))]


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
    command: click.Command = root()
    context = click.Context(command)
    left = list(words)
    while isinstance(command, click.Group):
        parsed = command.make_context(None, left, resilient_parsing=True, ignore_unknown_options=True)
        left = [*parsed._protected_args, *parsed.args]
        if not left or not left[0][:1].islower():
            return "" if command is not root() else f"{' '.join(words)}: no command"
        parsed.resilient_parsing = False
        try:
            _, found, left = command.resolve_command(parsed, left)
        except click.UsageError:
            found = None
        if found is None:
            return f"{' '.join(words)}: no command {left[0]}"
        command, context = found, parsed
    options = {text for one in command.get_params(context) for text in (*one.opts, *one.secondary_opts)}
    if command.context_settings.get("ignore_unknown_options"):
        return ""
    for word in left:
        name = word.partition("=")[0]
        if word.startswith("-") and len(word) > 1 and name not in options and name[:2] not in options:
            return f"{' '.join(words)}: no option {name}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_there(page: Path) -> None:
    assert [problem for words in typed(page) if (problem := unknown(words))] == []


def test_the_search_finds_commands_and_what_is_wrong_with_them() -> None:
    assert sum(1 for page in PAGES for _ in typed(page)) > 80
    assert unknown(["get", "nodes", "-o", "json"]) == ""
    assert "no option --deadline" in unknown(["drain", "n", "--deadline", "3m"])
    assert "no command" in unknown(["explain-placement"])
    assert "no command" in unknown(["get", "frogs"])
