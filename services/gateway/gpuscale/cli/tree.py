"""The commands there are, each imported when it is asked for: importing them all takes longer than most of them run.

The table says of each what stands beside it in `gpuscalectl --help`, and where it is.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main

from gpuscale.cli.grammar.examples import with_example

EPILOG = "What is common to all commands, such as -o, --no-headers and --address: gpuscalectl --help"
_RUNS = {"allow_interspersed_args": False}
_SERVES = {"allow_extra_args": True, "ignore_unknown_options": True}


class Entry(NamedTuple):
    """A command, or a group of them.

    Attributes:
        help: one line of what it does.
        place: `module:attribute` in this room: a function, or a Typer of functions.
        more: commands of a group that stand elsewhere: their place, by name.
        settings: how its words are read, where that is not as usual.
    """

    help: str
    place: str
    more: Mapping[str, str] = {}
    settings: Mapping[str, bool] | None = None


COMMANDS: Mapping[str, Entry] = {
    "top": Entry("GPUs, reservations, endpoints, decisions and health on one screen.", "top:top"),
    "get": Entry(
        "Show nodes, GPUs, reservations, endpoints and the rest.",
        "get:app",
        {
            "recordings": "observed:recordings",
            "health": "observed:health",
            "rules": "rules:get_rules",
            "quotas": "quotas:get_quotas",
        },
    ),
    "explain": Entry(
        "Say why.",
        "explain:app",
        {
            "field": "explain_field:explain_field",
            "reservation": "why:explain_reservation",
            "placement": "why:explain_placement",
        },
    ),
    "events": Entry("What happened, oldest first.", "events:events"),
    "snapshot": Entry("Show the GPUs of one host, asked of its agent.", "snapshot:snapshot"),
    "history": Entry("What nodes and GPUs did.", "observed:history"),
    "reserve": Entry("Reserve GPUs, all or none.", "reserve:reserve"),
    "renew": Entry("Start the leases of reservations anew, from now.", "reserve:renew"),
    "release": Entry("Give reservations back.", "reserve:release"),
    "run": Entry("Run a command on GPUs that are reserved while it runs.", "run:run", settings=_RUNS),
    "check": Entry("Say whether there is room, and which GPUs it would be.", "capacity:check"),
    "estimate": Entry("Say how many GPUs a model needs.", "capacity:estimate"),
    "rank": Entry("Rank nodes by how idle they are, and free GPUs by their scores.", "capacity:rank_app"),
    "cordon": Entry("Let nothing new onto nodes or GPUs; what is there stays.", "maintenance:cordon"),
    "uncordon": Entry("Lift cordons, and with them drains.", "maintenance:uncordon"),
    "drain": Entry("Cordon nodes or GPUs, and tell the holders there to leave.", "maintenance:drain"),
    "clear": Entry("Lift the quarantine of GPUs, or forget their fences.", "maintenance:clear_app"),
    "driver": Entry("Let an agent close the GPU driver for a while.", "maintenance:driver_app"),
    "record": Entry("Run a command and print what GPUs did meanwhile.", "record:record", settings=_RUNS),
    "start": Entry("Begin to record what GPUs do.", "recordings:start_app"),
    "stop": Entry("End a recording.", "recordings:stop_app"),
    "apply": Entry("Make watchers and endpoints as files say.", "apply:apply"),
    "diff": Entry("Say what apply would change; nothing is changed.", "apply:diff"),
    "create": Entry("Add a rule to an endpoint.", "rules:create_app"),
    "update": Entry("Change a rule of an endpoint.", "rules:update_app"),
    "set": Entry("Set the quota of a tenant.", "quotas:set_app"),
    "scale": Entry("Set how many replicas an endpoint aims at.", "change:scale_app"),
    "delete": Entry(
        "Delete endpoints, rules, queue watchers, quotas or recordings.",
        "change:delete_app",
        {
            "recording": "recordings:delete_recording",
            "quota": "quotas:delete_quota",
            "rule": "rules:delete_rule",
        },
    ),
    "forget": Entry(
        "Give up adapters or nodes that will never come back.",
        "forget:app",
        {"node": "forgetting:forget_node"},
    ),
    "logs": Entry("Show what replicas wrote.", "logs:logs"),
    "wait": Entry("Wait until things are as they should be.", "wait:wait"),
    "evaluate": Entry("Say what an endpoint would scale to; nothing is changed.", "evaluate:app"),
    "preset": Entry("Known systems' policies, as manifests.", "preset:app"),
    "backtest": Entry("Run policies on a recorded workload.", "backtest:backtest"),
    "tune": Entry("Search for the cheapest policy that meets the goal.", "tune:tune"),
    "up": Entry("Start everything on this machine, in one process.", "serving:up", settings=_SERVES),
    "dashboard": Entry("Serve what the services know to browsers.", "serving:dashboard", settings=_SERVES),
    "config": Entry("Servers by name: contexts.", "config:app"),
    "token": Entry("Tokens of a server, in its tokens file.", "tokens:app"),
    "certs": Entry("An authority of your own, and certificates of it.", "certs:app"),
    "completion": Entry(
        "Write the script that completes commands, options and names.", "completion:completion"
    ),
}


class Commands(MutableMapping[str, Any]):
    """Every command by name, made when it is asked for, and then kept."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _made(name, COMMANDS[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Root(typer.core.TyperGroup):
    """The group of all commands, which knows their names and what they do without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def _made(name: str, entry: Entry) -> Any:
    """The command as Typer makes it."""
    found = _at(entry.place)
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    holder.callback()(_nothing)
    if isinstance(found, typer.Typer):
        for word, place in entry.more.items():
            found.command(word)(_at(place))
        for registered in found.registered_commands:
            registered.epilog = with_example(f"{name} {_name_of(registered)}", EPILOG)
        if name == "get":
            _watched(found)
        holder.add_typer(found, name=name, help=entry.help)
    else:
        serves = entry.settings is _SERVES
        settings = dict(entry.settings) if entry.settings else None
        holder.command(
            name,
            epilog=None if serves else with_example(name, EPILOG),
            add_help_option=not serves,
            context_settings=settings,
        )(found)
    return typer.main.get_group(holder).commands[name]


def _name_of(registered: Any) -> str:
    """The word of a command: its own, or that of its function."""
    return str(registered.name or registered.callback.__name__.replace("_", "-"))


def _nothing() -> None:
    """What the group around a single command does itself."""


def _watched(group: typer.Typer) -> None:
    """Every `get` goes on where that is asked for."""
    from gpuscale.cli.commands import watching

    group.callback()(watching.options)
    for registered in group.registered_commands:
        if registered.callback is not None:
            registered.callback = watching.repeated(registered.callback)


def _at(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"gpuscale.cli.commands.{module}"), attribute)
