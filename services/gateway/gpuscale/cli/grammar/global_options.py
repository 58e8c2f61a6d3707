"""The options that all commands have in common."""

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gpuscale.cli.grammar.formats import Form
from gpuscale.cli.grammar.options import duration, form

PROGRAM = "gpuscalectl"


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"{PROGRAM} {version('gpuscale')}\n")
        raise typer.Exit


Address: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to connect; $GPUSCALE_ADDRESS or 127.0.0.1:7070.",
        show_default=False,
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Bearer token to send; $GPUSCALE_TOKEN_FILE.", show_default=False),
]
CaFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Authority of the server, PEM; switches TLS on.", show_default=False),
]
CertFile: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Client certificate, PEM.", show_default=False)
]
KeyFile: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Key of the client certificate, PEM.", show_default=False)
]
ContextName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Server of the file of contexts; $GPUSCALE_CONTEXT or the current one.",
        show_default=False,
    ),
]
RequestTimeout: TypeAlias = Annotated[
    float, typer.Option(parser=duration, metavar="DURATION", help="Time that one call may take.")
]
DialTimeout: TypeAlias = Annotated[
    float, typer.Option(parser=duration, metavar="DURATION", help="Time that it may take to connect.")
]
OutputForm: TypeAlias = Annotated[
    Form,
    typer.Option(
        "--output",
        "-o",
        parser=form,
        metavar="FORMAT",
        help="table, wide, json, yaml, name, jsonl, jsonpath=PATH or custom-columns=HEADING:PATH,...",
        show_default=False,
    ),
]
NoHeaders: TypeAlias = Annotated[bool, typer.Option("--no-headers", help="Tables without headings.")]
OnlyAscii: TypeAlias = Annotated[bool, typer.Option("--ascii", help="Write nothing but ASCII.")]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", "-v", help="Say more, on standard error.")]
Version: TypeAlias = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
]
