"""What may stand next on a command line: commands, options, their values, and the names of what there is.

Names are asked for with half a second to answer; where nobody does, there are none, and nothing is said.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuscale.cli.commands.completion import Shell
from gpuscale.cli.console.session import Session
from gpuscale.cli.grammar.arguments import GET_OPTIONS, GLOBAL_OPTIONS, NOUNS, normalise
from gpuscale.cli.grammar.formats import WITH_EXPRESSION, Format
from gpuscale.common.errors import GpuscaleError

if TYPE_CHECKING:
    from gpuscale.client import Client

PATIENCE = 0.5
"""Seconds that there are to answer with names."""
_NEXT = "\0"
"""In place of the word that is completed."""
_PLURAL = {name: noun.plural for noun in NOUNS for name in noun if name}
_NAMED: dict[str, str] = {
    **dict.fromkeys(("renew", "release", "--reservation"), "reservations"),
    **dict.fromkeys(
        ("cordon", "uncordon", "drain", "quarantine", "history", "--node", "--exclude-node"), "nodes"
    ),
    **dict.fromkeys(("use-context", "set-context", "delete-context", "--context"), "contexts"),
    "logs": "replicas",
    "--endpoint": "endpoints",
    "-e": "endpoints",
    "--watcher": "watchers",
    "show": "presets",
    "--preset": "presets",
}
"""What the names are of that commands and options take, beside those that have a noun."""


class Candidate(NamedTuple):
    """A word that may stand there, and what it is."""

    word: str
    help: str = ""


class Line(NamedTuple):
    """What was typed before the word that is completed."""

    command: Any
    path: tuple[str, ...]
    session: Session
    lost: bool
    """Whether a word stands there that is no command."""


def candidates(root: Any, words: Sequence[str]) -> list[Candidate]:
    """What may stand in place of the last of the words."""
    *typed, last = words or [""]
    if "--" in typed:
        return []
    line = read(root, typed)
    option, equals, part = last.partition("=")
    if equals and option.startswith("--"):
        return [one._replace(word=f"{option}={one.word}") for one in _starting(part, _values(line, option))]
    before = typed[-1] if typed else ""
    if before.startswith("-") and _takes_value(line.command, line.path, before):
        return _starting(last, _values(line, before))
    if last.startswith("-"):
        return _starting(last, _options(line))
    return _starting(last, _words(line))


def _words(line: Line) -> list[Candidate]:
    """What may stand where no option does."""
    if getattr(line.command, "commands", None):
        return [] if line.lost else _commands(line)
    arguments = [one for one in line.command.params if not one.opts[0].startswith("-")]
    return _choices(arguments[0] if arguments else None) or _names(line.session, line.path[-1])


def _starting(begin: str, found: Iterable[Candidate]) -> list[Candidate]:
    return [one for one in found if one.word.startswith(begin)]


def read(root: Any, typed: Sequence[str]) -> Line:
    """The command that was typed so far, under its own name, and the session of the global options before it."""
    command: Any = root
    path: tuple[str, ...] = ()
    settings: dict[str, str] = {}
    lost = False
    # With a word behind it, a kind of resource is not taken for the end of the line.
    left = iter(normalise([*typed, _NEXT]))
    for word in left:
        if word == _NEXT:
            continue
        option, equals, value = word.partition("=")
        if word.startswith("-"):
            if not equals and _takes_value(command, path, option):
                value = next(left, "")
            settings[option] = value
        elif word in getattr(command, "commands", {}):
            command, path = command.commands[word], (*path, word)
        elif hasattr(command, "commands"):
            lost = True
    files = {key: Path(settings[key]) if settings.get(key) else None for key in _FILES}
    return Line(
        command,
        path,
        Session(
            address=settings.get("--address"),
            context=settings.get("--context"),
            token_file=files["--token-file"],
            ca_file=files["--ca-file"],
            cert_file=files["--cert-file"],
            key_file=files["--key-file"],
        ),
        lost,
    )


_FILES = ("--token-file", "--ca-file", "--cert-file", "--key-file")


def _takes_value(command: Any, path: tuple[str, ...], option: str) -> bool:
    of_get: Mapping[str, bool] = GET_OPTIONS if path[:1] == ("get",) else {}
    if option in GLOBAL_OPTIONS or option in of_get:
        return GLOBAL_OPTIONS.get(option, of_get.get(option, False))
    found = _parameter(command, option)
    return found is not None and not found.is_flag


def _parameter(command: Any, option: str) -> Any:
    return next((one for one in command.params if option in [*one.opts, *one.secondary_opts]), None)


def _options(line: Line) -> list[Candidate]:
    own = [(one.opts + one.secondary_opts, one.help) for one in line.command.params if hasattr(one, "help")]
    common = [*GLOBAL_OPTIONS, *(GET_OPTIONS if line.path[:1] == ("get",) else ())]
    known = {name: text or "" for names, text in own for name in names}
    return [Candidate(name, known.get(name, "")) for name in dict.fromkeys([*known, *common])]


def _values(line: Line, option: str) -> list[Candidate]:
    if option in {"-o", "--output"}:
        return [Candidate(f"{one}=" if one in WITH_EXPRESSION else one) for one in Format]
    if option == "--for" and line.path[:1] == ("wait",):
        return [
            Candidate("ready", "until it is as it should be"),
            Candidate("deleted", "until it is gone"),
        ]
    if option in _NAMED:
        return _names(line.session, option)
    return _choices(_parameter(line.command, option))


def _choices(parameter: Any) -> list[Candidate]:
    """The words of an enum; where its class is kept depends on the version of typer."""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    words = kind if isinstance(kind, type) and issubclass(kind, Enum) else ()
    return [Candidate(str(one.value)) for one in words]


def _commands(line: Line) -> list[Candidate]:
    found = getattr(line.command, "commands", {})
    return [Candidate(name, one.get_short_help_str(60)) for name, one in found.items() if not one.hidden]


def _names(session: Session, of: str) -> list[Candidate]:
    kind = _NAMED.get(of) or _PLURAL.get(of, "")
    if kind == "contexts":
        from gpuscale.client.connection import contexts_file, read_contexts

        with contextlib.suppress(GpuscaleError):
            return [
                Candidate(name, one.address) for name, one in read_contexts(contexts_file()).by_name.items()
            ]
    elif kind in _readers():
        with contextlib.suppress(GpuscaleError), session.connect(quickly=PATIENCE) as client:
            return [Candidate(name) for name in _readers()[kind](client)]
    return []


def _readers() -> dict[str, Callable[["Client"], list[str]]]:
    """By kind, how the names of what there is are read."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.commands.rules import list_rules
    from gpuscale.cli.console import resources
    from gpuscale.cli.console.wire_json import name_of

    def short(items: Iterable[Any]) -> list[str]:
        return ["/".join(name_of(item).split("/")[1::2]) for item in items]

    return {
        "nodes": lambda client: short(resources.nodes(client)),
        "gpus": lambda client: [one.uuid for one in resources.gpus(resources.nodes(client))],
        "reservations": lambda client: short(resources.reservations(client)),
        "endpoints": lambda client: short(resources.endpoints(client)),
        "replicas": lambda client: short(resources.replicas(client)),
        "watchers": lambda client: short(resources.watchers(client)),
        "decisions": lambda client: short(resources.decisions(client)),
        "adapters": lambda client: short(resources.adapters(client)),
        "cordons": lambda client: short(resources.cordons(client)),
        "rules": lambda client: short(list_rules(client)),
        "presets": lambda client: [
            one.name for one in client.presets.ListPresets(api.ListPresetsRequest()).presets
        ],
    }


def complete(root: Any, arguments: Sequence[str]) -> int:
    """Write what may stand there, a line each, as the shell wants it; returns the exit code."""
    shell, *words = arguments or [Shell.BASH]
    if shell == Shell.BASH:
        words = _rejoined(words)
    for one in candidates(root, words):
        if shell == Shell.BASH:
            # To bash the part after the sign is a word of its own.
            sys.stdout.write(f"{one.word.rpartition('=')[2] if '=' in words[-1] else one.word}\n")
        else:
            sys.stdout.write(f"{one.word}\t{' '.join(one.help.split())}\n")
    return 0


def _rejoined(words: Sequence[str]) -> list[str]:
    """Words of bash, which takes `--output=json` for three, as they were typed."""
    joined: list[str] = []
    for word in words:
        if joined and (word == "=" or joined[-1].endswith("=")):
            joined[-1] += word
        else:
            joined.append(word)
    return joined
