"""The page of all commands of gpuscalectl, from the tree of commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuscale.cli.console.command import PROGRAM
from gpuscale.cli.console.errors import MEANINGS, ExitCode
from gpuscale.cli.main import root

HEAD = f"""# {PROGRAM}: every command

Written by `make docs` from the code; what commands have in common, and examples, are in [../cli.md](../cli.md). Every command
takes the [options of all commands](#options-of-all-commands), anywhere on the line.
"""
SERVES = "Takes every setting of its programs as a flag: [settings](settings.md)."


def page() -> str:
    """The whole page."""
    tree = root()
    context = tree.make_context(PROGRAM, [], resilient_parsing=True)
    sections = [
        HEAD,
        "## Exit codes\n",
        _exit_codes(),
        "## Options of all commands\n",
        _options(tree, context),
    ]
    for name in sorted(tree.list_commands(context)):
        sections += _command(tree.get_command(context, name), context, f"{PROGRAM} {name}")
    return "\n".join(sections)


def _exit_codes() -> str:
    lines = [f"| {code.value} | {code.name} | {MEANINGS[code]} |" for code in ExitCode]
    return "\n".join(["| code | name | when |", "| --- | --- | --- |", *lines, ""])


def _command(command: Any, parent: Any, path: str) -> Iterator[str]:
    """The parts of a command, and of those below it."""
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent)
    level = "##" if path.count(" ") == 1 else "###"
    yield f"{level} {path}\n"
    yield f"{_text(command.help)}\n"
    below = sorted(command.list_commands(context)) if hasattr(command, "list_commands") else []
    if below:
        if table := _options(command, context):
            yield f"Options anywhere after `{path}`:\n"
            yield table
        for name in below:
            yield from _command(command.get_command(context, name), context, f"{path} {name}")
        return
    words = " ".join(command.collect_usage_pieces(context))
    yield f"```\n{path} {words}\n```\n"
    if context.ignore_unknown_options:
        yield f"{SERVES}\n"
    elif table := _options(command, context):
        yield table


def _options(command: Any, context: Any) -> str:
    """The table of its own options, or of those that all commands of a group have; empty where there are none."""
    own = command.options if hasattr(command, "list_commands") else command.params
    records = [one.get_help_record(context) for one in own]
    lines = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in filter(None, records) if text]
    return "\n".join(["| option | what |", "| --- | --- |", *lines, ""]) if lines else ""


def _text(text: str | None) -> str:
    """Paragraphs, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
