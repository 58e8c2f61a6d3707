"""What every `get` has in common: `-l`, `--sort-by`, and `--watch`, which reads again and again and writes what changed.

Where the API has a Watch method, news on its stream let it read at once; where not, or while the stream is broken, it reads
every so often.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuscale.cli.console.choosing import Chosen, Watched
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.formats import Format
from gpuscale.cli.grammar.options import duration
from gpuscale.cli.grammar.selecting import parse_selector
from gpuscale.common.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from gpuscale.cli.commands.news import News

Command = Callable[..., None]


def options(
    context: typer.Context,
    selector: Annotated[
        str,
        typer.Option(
            "--selector",
            "-l",
            metavar="KEY=VALUE,...",
            help="Only those with this label, or field: state=READY,zone!=a,!cordoned,fence>=3.",
        ),
    ] = "",
    sort_by: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="A column or a field, such as LEFT or .fence; -LEFT begins with the most."
        ),
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on, and write each that changes; Ctrl-C ends it.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="How often --watch reads, if no news come."),
    ] = 2.0,
) -> None:
    """Show nodes, GPUs, reservations, endpoints and the rest."""
    session = session_of(context)
    if watch and session.output.format is Format.JSON:
        raise InvalidArgumentError("--watch writes one object after the other: use -o jsonl, not -o json")
    try:
        conditions = parse_selector(selector) if selector else ()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--selector") from error
    chosen = Chosen(conditions, sort_by, Watched(every) if watch else None)
    context.obj = replace(session, output=replace(session.output, chosen=chosen))


def repeated(command: Command) -> Command:
    """The command, which goes on where it is watched; an answer that fails to come once is said, and asked for again."""

    @wraps(command)
    def run(**typed: Any) -> None:
        command(**typed)
        session = session_of(typed["context"])
        if session.output.chosen.watched is None:
            return
        from gpuscale.cli.commands.news import news_of

        with news_of(command.__name__, session) as news:
            _go_on(command, typed, session.output.chosen.watched, news)

    return run


def _go_on(command: Command, typed: dict[str, Any], watched: Watched, news: "News | None") -> None:
    """Read again, for ever."""
    away = False
    while True:
        sys.stdout.flush()
        if news is None:
            pause(watched.every)
        else:
            news.wait(watched.every)
        try:
            command(**typed)
            away = False
        except UnavailableError as error:
            if not away:
                note(f"{error.message}; asking again every {watched.every:g}s")
            away = True


def pause(seconds: float) -> None:
    """Wait until it is time to read again."""
    time.sleep(seconds)
