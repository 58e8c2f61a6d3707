"""`@command`, the common options, and groups that import a command when it is used.

The common options may be typed anywhere before `--`, so that each command and group knows them. A command gets the `Session`
that they describe as its first argument.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypedDict

import click

from gpuscale import client as library
from gpuscale.cli.console.output import Output
from gpuscale.cli.console.terminal import TERMINAL, detail
from gpuscale.cli.grammar.jsonpath import WITH_EXPRESSION, Form, Format
from gpuscale.cli.grammar.nouns import is_field, plural, with_noun
from gpuscale.cli.grammar.parameters import CLOCK, DURATION, FORM, decoded
from gpuscale.cli.grammar.selecting import near
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError, UnavailableError
from gpuscale.common.rpc import channel

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

NO_ANSWER = "NO_ANSWER"
"""The reason of a client's error if it cannot connect."""
NOBODY = frozenset({NO_ANSWER, UnavailableError.default_reason})
"""Reasons of errors without an answer; a service that answers gives others."""


class _Where(TypedDict):
    context: str | None
    token: str | Path | None
    tls: library.ClientTls | None


@dataclass(frozen=True)
class Session:
    """One run of the program.

    Attributes:
        without_token: send no token, even if the environment names one.
        request_timeout: most seconds of a call.
        dial_timeout: most seconds to connect.
        apart: addresses of services, by the names of the client's stubs, where no gateway leads to them.
        kept: an open client to use instead of a new one.
        silent: errors of lists that did not come in time, by the names of their requests; they are not asked for again.
    """

    address: str | None = None
    token_file: Path | None = None
    without_token: bool = False
    request_timeout: float = 10.0
    dial_timeout: float = 5.0
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    context: str | None = None
    apart: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: library.Client | None = None
    silent: dict[str, GpuscaleError] = field(default_factory=dict[str, GpuscaleError])
    output: Output = field(default_factory=Output)

    def options(self) -> list[str]:
        """The command-line options for the same server."""
        named = {
            name: getattr(self, name)
            for name in ("address", "token_file", "ca_file", "cert_file", "key_file", "context")
        }
        return [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value is not None]

    @contextmanager
    def connect(self, *, quickly: float | None = None) -> Generator[library.Client]:
        """A client of the gateway; `quickly`: most seconds to connect and for each call.

        Raises UnavailableError: nothing answers; the message says how to start a server.
        """
        if self.kept is not None:
            yield self.kept
            return
        timeout, dial = quickly or self.request_timeout, quickly or self.dial_timeout
        began = time.monotonic()
        with ExitStack() as stack:
            dialed = partial(library.connect, **self._where(), timeout=timeout, dial_timeout=dial)
            client = stack.enter_context(dialed(self.address))
            for name, address in self.apart.items():
                setattr(client, name, getattr(stack.enter_context(dialed(address)), name))
            detail(f"connecting to {client.address}")
            try:
                yield client
            except UnavailableError as error:
                if error.reason != NO_ANSWER:
                    raise
                message = (
                    f"{error.message}\nto start everything on this machine: gpuscalectl up\n"
                    "to use another server: --address HOST:PORT, GPUSCALE_ADDRESS, or gpuscalectl config set-context"
                )
                raise UnavailableError(message, reason=NO_ANSWER) from error
            finally:
                detail(f"took {time.monotonic() - began:.3f} s")

    def each(self) -> Sequence[Session]:
        """A session for each of its addresses."""
        with self.connect() as client:
            addresses = channel.split_addresses(client.address)
        current = None if self.address or os.environ.get("GPUSCALE_ADDRESS") else ""
        return [replace(self, address=one, context=self.context or current) for one in addresses]

    def login(self) -> str:
        """The command that renews the login whose token is sent; empty if it is another token, or none."""
        if self.token_file or self.without_token or os.environ.get("GPUSCALE_TOKEN_FILE"):
            return ""
        if self.context is None and (self.address or os.environ.get("GPUSCALE_ADDRESS")):
            return ""
        from gpuscale.client.connection import contexts_file, find_context

        found = find_context(self.context)
        token = found.token_file
        if token is None or token.parent != contexts_file().parent:
            return ""
        given = f" --ca-file {found.ca_file}" if found.ca_file else ""
        given += " --oidc" if token.with_suffix(".login").exists() else ""
        return f"{PROGRAM} login {found.address}{given} --as {token.stem}"

    def connect_async(self) -> library.AsyncClient:
        """An async client of the gateway, not yet connected."""
        return library.connect_async(self.address, **self._where(), timeout=self.request_timeout)

    def _where(self) -> _Where:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidArgumentError("--cert-file and --key-file need each other: pass both")
        if self.cert_file and not self.ca_file:
            raise InvalidArgumentError("--cert-file and --key-file need --ca-file, which turns TLS on")
        return {
            "context": self.context,
            "token": "" if self.without_token else self.token_file,
            "tls": library.ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None,
        }


Complete: TypeAlias = "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]"
PROGRAM = "gpuscalectl"
EPILOG = "Options of all commands, such as -o and --address: gpuscalectl --help"
COMPLETION_SECONDS = 0.5
"""Most seconds to wait for names to complete."""
FILE = click.Path(path_type=Path)
_TYPED = "gpuscale.cli.typed"
"""Key of the common options in `Context.meta`, which a command shares with its groups."""


def config_home() -> Path:
    """The directory of the user's settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Keep a common option; the last one typed counts."""
    if value is not None and parameter.name:
        kept = decoded(value) if isinstance(value, str) else value
        context.meta.setdefault(_TYPED, {})[parameter.name] = kept


def anywhere(*names: str, **attributes: Any) -> click.Option:
    """An option that may be typed before or after a command."""
    return click.Option(names, expose_value=False, callback=_keep, default=None, **attributes)


def typed_anywhere(context: click.Context) -> dict[str, Any]:
    """The options of `anywhere` that were typed, by name."""
    return dict(context.meta.get(_TYPED, {}))


def words(*known: str) -> Complete:
    """Completes an option with these words."""

    def complete(_context: click.Context, _parameter: click.Parameter, part: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(word) for word in known if word.startswith(part)]

    return complete


def names_of(*kinds: str) -> Complete:
    """Completes with the names of kinds of resources, such as `nodes`; with none if no server answers."""

    def complete(context: click.Context, _parameter: click.Parameter, part: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from gpuscale.cli.console.lookup import short_names

        try:
            with session_of(context).connect(quickly=COMPLETION_SECONDS) as client:
                known = (name for kind in kinds for name in short_names(client, kind))
                return [CompletionItem(name) for name in known if name.startswith(part)]
        except GpuscaleError:
            return []

    return complete


def names_of_typed(name: str, kinds: Collection[str]) -> Complete:
    """Completes with names of the kind that the parameter `name` begins with; with the kinds while it is empty."""

    def complete(context: click.Context, parameter: click.Parameter, part: str) -> list[CompletionItem]:
        typed = context.params.get(name) or ""
        kind = plural(typed if isinstance(typed, str) else typed[0])
        known = names_of(kind) if kind in kinds else words(*(() if typed else kinds))
        return known(context, parameter, part)

    return complete


def context_names(_context: click.Context, _parameter: click.Parameter, part: str) -> list[CompletionItem]:
    """Completes with the names of contexts."""
    from click.shell_completion import CompletionItem

    from gpuscale.client.connection import contexts_file, read_contexts

    try:
        known = read_contexts(contexts_file()).by_name
    except GpuscaleError:
        return []
    return [CompletionItem(name, help=one.address) for name, one in known.items() if name.startswith(part)]


OF_ALL_COMMANDS = (
    anywhere(
        "--address",
        metavar="HOST:PORT",
        help="Server to use; $GPUSCALE_ADDRESS or 127.0.0.1:7070 by default.",
    ),
    anywhere("--token-file", type=FILE, help="Bearer token to send; $GPUSCALE_TOKEN_FILE by default."),
    anywhere("--ca-file", type=FILE, help="Certificate authority of the server, PEM; turns TLS on."),
    anywhere("--cert-file", type=FILE, help="Client certificate, PEM."),
    anywhere("--key-file", type=FILE, help="Key of the client certificate, PEM."),
    anywhere(
        "--context",
        metavar="NAME",
        help="Server from the contexts file; $GPUSCALE_CONTEXT or the current one by default.",
        shell_complete=context_names,
    ),
    anywhere("--request-timeout", type=DURATION, help="Time limit of one call; 10s by default."),
    anywhere("--dial-timeout", type=DURATION, help="Time limit of connecting; 5s by default."),
    anywhere(
        "--output",
        "-o",
        type=FORM,
        help="table, wide, json, yaml, name, jsonl, csv, jsonpath=PATH or custom-columns=HEADING:PATH,...",
        shell_complete=words(*(f"{one}=" if one in WITH_EXPRESSION else one for one in Format)),
    ),
    anywhere("--no-headers", is_flag=True, help="Leave out the headings of tables."),
    anywhere("--utc", is_flag=True, help="Show and read times in UTC instead of the local zone."),
    anywhere("--ascii", is_flag=True, help="Write ASCII only."),
    anywhere("--verbose", "-v", is_flag=True, help="Write more to standard error."),
)


def session_of(context: click.Context) -> Session:
    """The session that the common options describe."""
    typed = typed_anywhere(context)
    form: Form = typed.get("output", Form())
    CLOCK.utc = bool(typed.get("utc"))
    TERMINAL.folds = form.format is Format.TABLE
    TERMINAL.ascii, TERMINAL.verbose = bool(typed.get("ascii")), bool(typed.get("verbose"))
    known = {
        key: value for key, value in typed.items() if key in Session.__dataclass_fields__ and key != "output"
    }
    return replace(Session(output=Output(form.format, not typed.get("no_headers"), form)), **known)


class Command(click.Command):
    """A command with the common options and those of its class; its help ends with an example."""

    options: ClassVar[Sequence[click.Option]] = ()
    of_all: ClassVar[Sequence[click.Option]] = OF_ALL_COMMANDS

    def __init__(self, *given: Any, example: str = "", **attributes: Any) -> None:
        self.example = example
        if example:
            attributes["epilog"] = f"\b\nExample:\n  {PROGRAM} {example}\n\n{EPILOG}"
        super().__init__(*given, **attributes)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own parameters, and the common options."""
        return [*self.own_params(ctx), *self.of_all]

    def own_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own parameters, which its help lists."""
        return [*super().get_params(ctx), *self.options]

    def choose(self, session: Session, context: click.Context) -> Session:
        """The session, changed by the options of its class."""
        del context
        return session

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own options."""
        records = [record for one in self.own_params(ctx) if (record := one.get_help_record(ctx)) is not None]
        if records:
            with formatter.section("Options"):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it with its session."""
        ctx.obj = self.begin(ctx)
        return super().invoke(ctx)

    def begin(self, ctx: click.Context) -> Session:
        """Its session, of which errors know the options and the login."""
        options = [one for one in self.own_params(ctx) if isinstance(one, click.Option)]
        typed = ctx.params | typed_anywhere(ctx)
        valued = [(one.name, one.opts[0]) for one in options if typed.get(one.name or "") is not None]
        words = {word[2:].replace("-", "_"): word for _, word in valued}
        TERMINAL.options = {name or word: word for name, word in valued} | words
        session = self.choose(session_of(ctx), ctx)
        TERMINAL.login = session.login
        return session


class CommandEntry(NamedTuple):
    """A command or group of the program, known without importing it.

    `place` is `module:attribute` below `gpuscale.cli.commands`; for a group, those of its commands.
    """

    help: str
    place: str | Mapping[str, str]
    kind: type[Group] | None = None


class Group(Command, click.Group):
    """Commands by name, imported when used: importing all takes longer than most take to run."""

    of_other_tools: ClassVar[Mapping[str, str]] = {}
    """Commands of other tools, and their equivalents here."""

    def __init__(self, name: str, entries: Mapping[str, CommandEntry | str], **attributes: Any) -> None:
        super().__init__(name, no_args_is_help=True, **attributes)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of its commands."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        entry = self.entries.get(cmd_name)
        if isinstance(entry, CommandEntry) and not isinstance(entry.place, str):
            return (entry.kind or Group)(cmd_name, entry.place, help=entry.help)
        place = entry.place if isinstance(entry, CommandEntry) else entry
        if not isinstance(place, str):
            return None
        module, _, attribute = place.partition(":")
        found = getattr(import_module(f"gpuscale.cli.commands.{module}"), attribute)
        return found if isinstance(found, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was typed, with any name of its noun. Raises click.UsageError: unknown command; suggests the nearest one."""
        args = self.normal(ctx, args)
        if args[0] not in self.entries and not ctx.resilient_parsing and not args[0].startswith("-"):
            typed, other = args[0].casefold().partition("/")[0], self.of_other_tools
            wanted = other.get(typed) or other.get(plural(typed))
            hint = f"; try: {PROGRAM} {wanted}" if wanted else near(args[0], self.entries)
            ctx.fail(f"unknown command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def normal(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """The words after it, beginning with the name of a command."""
        del ctx
        return with_noun(args, self.entries)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own options, then its commands."""
        Command.format_options(self, ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(ctx, name)) for name in self.list_commands(ctx)])

    def _summary(self, ctx: click.Context, name: str) -> str:
        entry = self.entries[name]
        if isinstance(entry, CommandEntry):
            return entry.help
        found = self.get_command(ctx, name)
        return found.get_short_help_str(1000) if found else ""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands, or of options."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=self._summary(ctx, name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


def entries_above(context: click.Context, name: str = "") -> Mapping[str, CommandEntry | str]:
    """The commands of the running command's group, or of the named group."""
    of = context.find_root().command if name else context.parent and context.parent.command
    entries: Mapping[str, CommandEntry | str] = of.entries if isinstance(of, Group) else {}
    found = entries.get(name) if name else None
    return found.place if isinstance(found, CommandEntry) and not isinstance(found.place, str) else entries


class ExplainGroup(Group):
    """`explain endpoint.spec` explains a field of the contract."""

    def normal(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """The words after it, with `field` before a path of fields."""
        if ctx.resilient_parsing:
            return super().normal(ctx, args)
        # The words without the common options and their values.
        known: list[click.Parameter] = [*OF_ALL_COMMANDS, click.Argument(["words"], nargs=-1)]
        probe = click.Command(None, params=known, add_help_option=False)
        context = probe.make_context(None, list(args), resilient_parsing=True, ignore_unknown_options=True)
        return ["field", *args] if is_field(context.params["words"]) else super().normal(ctx, args)


class JobGroup(Group):
    """`stop r3fa7kq2vnb4d` is `stop job r3fa7kq2vnb4d`."""

    def normal(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """The words after it, with `job` before a name."""
        found = super().normal(ctx, args)
        named = found and found[0] not in self.entries and not found[0].startswith("-")
        return ["job", *found] if named and not ctx.resilient_parsing else found


def command(
    example: str = "", *, kind: type[Command] = Command, **attributes: Any
) -> Callable[[Callable[..., object]], Command]:
    """A decorator: makes a function a command, and passes it the session."""

    def decorate(function: Callable[..., object]) -> Command:
        return click.command(cls=kind, example=example, **attributes)(click.pass_obj(function))

    return decorate


def names(*nouns: str, metavar: str = "NAME", required: bool = True) -> Callable[[Any], Any]:
    """The argument `name`: names of kinds of resources, completed by the server."""
    complete = names_of(*nouns) if nouns else None
    return click.argument(
        "name",
        nargs=-1,
        required=required,
        metavar=f"{metavar}..." if required else f"[{metavar}]...",
        shell_complete=complete,
    )


def one_name(noun: str = "", *, metavar: str = "NAME", required: bool = True) -> Callable[[Any], Any]:
    """The argument `name`: the name of one resource, completed by the server."""
    attributes: dict[str, Any] = {} if required else {"default": ""}
    if noun:
        attributes["shell_complete"] = names_of(noun)
    return click.argument("name", metavar=metavar if required else f"[{metavar}]", **attributes)
