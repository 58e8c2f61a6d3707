"""The program `gpuscalectl`: its command line, and the one place where errors become exit codes.

What is slow to import (gRPC, the contract, YAML, the services behind `up`) is imported inside of commands, so that `--help`
is quick.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import click

from gpuscale.cli.commands.watching import GetGroup
from gpuscale.cli.console.command import OF_ALL_COMMANDS, PROGRAM, CommandEntry, ExplainGroup, Group, JobGroup
from gpuscale.cli.console.errors import ExitCode, report, report_os, report_usage, report_value
from gpuscale.cli.console.terminal import TERMINAL, TerminatedError, flush_output, note
from gpuscale.cli.grammar.nouns import format_of
from gpuscale.common.errors import GpuscaleError

HELP = """See every GPU, reserve GPUs, and scale workers from queue depth onto GPUs that are really there.

The options below may be anywhere on the line.
"""


def _of(module: str, names: str, function: str = "{}") -> dict[str, str]:
    """Commands by their names, each the function of a module that is named so, or as `function` says."""
    return {name: f"{module}:{function.format(name.replace('-', '_'))}" for name in names.split()}


class DeleteGroup(Group):
    """`delete`: what ends in another way is told how."""

    of_other_tools: ClassVar[Mapping[str, str]] = {
        "adapters": "forget adapter NAME",
        "cordons": "uncordon NAME",
        "jobs": "stop job NAME",
        "nodes": "forget node NAME (or drain NAME)",
        "replicas": "scale endpoint NAME --replicas N",
        "reservations": "release NAME",
    }


COMMANDS: Mapping[str, CommandEntry] = {
    "top": CommandEntry("Show GPUs, reservations, endpoints, decisions and health on one screen.", "top:top"),
    "status": CommandEntry("Show the fleet at a glance.", "top:status"),
    "get": CommandEntry(
        "Show nodes, GPUs, reservations, endpoints and other resources.",
        {
            "all": "overview:get_all",
            **_of(
                "get",
                "nodes gpus processes reservations jobs endpoints replicas watchers decisions adapters metrics",
            ),
            "certs": "certs:list_certificates",
            **_of("get", "cordons recordings health rules quotas bookings policies"),
            **_of("get", "acts targets notifications budgets changes backtests audit"),
        },
        GetGroup,
    ),
    "describe": CommandEntry("Show all that is known of a resource.", "describe:describe"),
    "explain": CommandEntry(
        "Explain decisions, placements, fields and exit codes.",
        {
            **_of("explain", "endpoint decision exit-codes field reservation policy", "explain_{}"),
            "placement": "capacity:explain_placement",
        },
        ExplainGroup,
    ),
    "events": CommandEntry("Show what happened, oldest first.", "events:events"),
    "snapshot": CommandEntry("Show the GPUs of one host as its agent reads them.", "get:snapshot"),
    "topology": CommandEntry(
        "Show how close the GPUs and network cards of a node are to each other.", "topology:topology"
    ),
    "history": CommandEntry("Show what nodes and GPUs did.", "recordings:history"),
    "report": CommandEntry("Show who used how many GPU hours.", "usage:report"),
    "stats": CommandEntry("Show how a reservation or job uses its GPUs.", "usage:stats"),
    "reserve": CommandEntry("Reserve GPUs, all or none.", "reserve:reserve"),
    "renew": CommandEntry("Renew the leases of reservations.", "reserve:renew"),
    "release": CommandEntry("Release reservations.", "reserve:release"),
    "run": CommandEntry("Run a command on GPUs that are reserved while it runs.", "run:run"),
    "probe": CommandEntry("Find faulty GPUs, by what is known of them and by a test.", "probe:probe"),
    "check": CommandEntry("Check whether GPUs are free, and which.", "capacity:check"),
    "estimate": CommandEntry("Estimate how many GPUs a model needs.", "capacity:estimate"),
    "rank": CommandEntry("Rank nodes by idle GPUs.", {"nodes": "capacity:rank_nodes"}),
    "plan": CommandEntry("Plan moves that make room.", {"rebalance": "capacity:plan_rebalance"}),
    "cordon": CommandEntry("Close nodes or GPUs to new work; what runs there stays.", "maintenance:cordon"),
    "uncordon": CommandEntry("Open nodes or GPUs to new work again.", "maintenance:uncordon"),
    "drain": CommandEntry("Cordon nodes or GPUs, and ask the holders there to leave.", "maintenance:drain"),
    "clear": CommandEntry(
        "Clear the quarantine or the fences of GPUs.", _of("maintenance", "quarantine fence", "clear_{}")
    ),
    "driver": CommandEntry(
        "Make an agent close the GPU driver for a while.", _of("maintenance", "release resume", "driver_{}")
    ),
    "record": CommandEntry("Run a command and print what GPUs did while it ran.", "recordings:record"),
    "start": CommandEntry("Start recording what GPUs do.", {"recording": "recordings:start_recording"}),
    "stop": CommandEntry(
        "Stop a job, a recording or a backtest.",
        {"job": "logs:stop", "recording": "recordings:stop_recording", "backtest": "backtest:stop_backtest"},
        JobGroup,
    ),
    "apply": CommandEntry("Make queue watchers, endpoints and policies match files.", "apply:apply"),
    "diff": CommandEntry("Show what apply would change.", "apply:diff"),
    "edit": CommandEntry(
        "Change an endpoint or a queue watcher in your editor.", _of("apply", "endpoint watcher", "edit_{}")
    ),
    "create": CommandEntry("Add a rule to an endpoint.", {"rule": "endpoints:create_rule"}),
    "update": CommandEntry("Change a rule of an endpoint.", {"rule": "endpoints:update_rule"}),
    "set": CommandEntry("Set the quota of a tenant.", {"quota": "capacity:set_quota"}),
    "scale": CommandEntry(
        "Set the desired replicas of an endpoint.", {"endpoint": "endpoints:scale_endpoint"}
    ),
    "delete": CommandEntry(
        "Delete endpoints, rules, queue watchers, quotas, bookings, policies and other resources.",
        {
            **_of("endpoints", "endpoint watcher", "delete_{}"),
            "recording": "recordings:delete_recording",
            "quota": "capacity:delete_quota",
            "booking": "reserve:delete_booking",
            **_of("endpoints", "policy target budget", "delete_{}"),
            "rule": "endpoints:delete_rule",
            "backtest": "backtest:delete_backtest",
        },
        DeleteGroup,
    ),
    "forget": CommandEntry(
        "Forget adapters or nodes that will never come back.", _of("maintenance", "adapter node", "forget_{}")
    ),
    "logs": CommandEntry("Show what replicas and jobs wrote.", "logs:logs"),
    "adopt": CommandEntry("Reserve the GPUs that running processes use.", "adopt:adopt"),
    "attach": CommandEntry("Follow a job until it ends.", "logs:attach"),
    "wait": CommandEntry("Wait until resources are ready, deleted or meet a condition.", "wait:wait"),
    "evaluate": CommandEntry(
        "Show how many replicas an endpoint would get.", {"endpoint": "explain:evaluate_endpoint"}
    ),
    "preset": CommandEntry(
        "Show the policies of known systems, as manifests.",
        {"list": "preset:list_presets", "show": "preset:show_preset"},
    ),
    "backtest": CommandEntry("Run policies on a recorded workload.", "backtest:backtest"),
    "tune": CommandEntry("Search for the cheapest policy that meets a goal.", "backtest:tune"),
    "up": CommandEntry("Start everything on this machine, in one process.", "serving:up"),
    "dashboard": CommandEntry("Serve the dashboard to browsers.", "serving:dashboard"),
    "config": CommandEntry(
        "Manage contexts: servers by name.",
        _of("config", "get-contexts current-context use-context set-context delete-context view"),
    ),
    "token": CommandEntry(
        "Manage the tokens of a server, in its tokens file.",
        {"create": "tokens:create", "list": "tokens:list_tokens", **_of("tokens", "limit rotate revoke")},
    ),
    "certs": CommandEntry(
        "Manage your own certificate authority and certificates.",
        {
            "init": "certs:init",
            "issue": "certs:issue_client",
            "list": "certs:list_certificates",
            **_of("certs", "renew revoke rotate-ca"),
        },
    ),
    "init": CommandEntry("Set up the services on this host, for others to join.", "hosts:init"),
    "join-token": CommandEntry(
        "Manage the tokens that let hosts join.",
        {
            "create": "tokens:create_join_token",
            "list": "tokens:list_join_tokens",
            "delete": "tokens:delete_join_token",
        },
    ),
    "join": CommandEntry("Get a certificate and settings for this host.", "joining:join"),
    "login-code": CommandEntry("Let people log in once.", {"create": "login:create"}),
    "login": CommandEntry("Log in to a server, with a code or through an OIDC provider.", "login:login"),
    "logout": CommandEntry("Delete what login wrote.", "login:logout"),
    "leave": CommandEntry("Remove what join wrote on this host.", "joining:leave"),
    "upgrade": CommandEntry("Restart this host's units in order, after an update.", "upgrade:upgrade"),
    "doctor": CommandEntry(
        "Find what is wrong with this host and the fleet, and what to do.", "doctor:doctor"
    ),
    "support-bundle": CommandEntry(
        "Collect logs, settings without secrets and the state of the fleet in one file.",
        "doctor:support_bundle",
    ),
    "version": CommandEntry("Show the versions of this program and of the servers.", "overview:version"),
    "api-resources": CommandEntry("List the kinds of resources.", "overview:api_resources"),
    "completion": CommandEntry(
        "Write the script that completes commands, options and names.", "completion:completion"
    ),
}

OF_OTHER_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("list", "ls"), "get TYPE"),
    **dict.fromkeys(("htop", "nvitop", "nvtop", "pmon"), "top"),
    **dict.fromkeys(("nvidia-smi", "smi"), "get gpus -o wide (or top)"),
    **dict.fromkeys(("jobs", "ps"), "get jobs"),
    **dict.fromkeys(("nodes", "sinfo"), "get nodes"),
    **dict.fromkeys(("sbatch", "submit"), "run -d --gpus N -- COMMAND"),
    **dict.fromkeys(("sprio", "sshare"), "get quotas"),
    "cancel": "release NAME (or stop job NAME)",
    "cluster-info": "status (or version)",
    "dmon": "history NAME (or top)",
    "exec": "run -- COMMAND",
    "free": "status (or get gpus)",
    "gpustat": "status (or top)",
    "help": "--help",
    "kill": "stop job NAME",
    "gpus": "get gpus",
    "patch": "edit TYPE NAME (or apply -f FILE)",
    "rollout": "edit endpoint NAME",
    "sacct": "get reservations --since 1d",
    "sattach": "attach NAME",
    "salloc": "reserve --gpus N",
    "scancel": "stop job NAME (or release NAME)",
    "scontrol": "describe reservation NAME",
    "squeue": "get reservations (or get jobs)",
    "srun": "run --gpus N -- COMMAND",
    "sreport": "report",
    "sstat": "stats NAME",
    "tail": "logs -f JOB",
    "watch": "get TYPE -w",
    "who": "get reservations",
    "why": "explain TYPE NAME",
}
"""Words of kubectl, Slurm, Docker and nvidia-smi that people type out of habit, and what says the same here."""


class Root(Group):
    """The group of all commands, whose help shows their common options."""

    options = OF_ALL_COMMANDS
    of_all = ()
    of_other_tools = OF_OTHER_TOOLS


@cache
def root() -> Group:
    """The group of all commands, made once."""
    program = Root(
        PROGRAM,
        COMMANDS,
        help=HELP,
        epilog="Exit codes: gpuscalectl explain exit-codes",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    message, said = "%(prog)s %(version)s", "Print the version and exit."
    version = click.version_option(package_name="gpuscale", prog_name=PROGRAM, message=message, help=said)
    return version(program)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code, of the one table (or of a command that it runs)."""
    TERMINAL.reset()
    TERMINAL.json = format_of(arguments) in {"json", "jsonl"}
    asked = os.environ.get("_GPUSCALECTL_COMPLETE")
    if asked:
        from gpuscale.cli.commands.completion import complete

        return complete(root(), asked)
    try:
        with root().make_context(PROGRAM, list(arguments)) as context:
            root().invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except GpuscaleError as error:
        return report(error)
    except click.ClickException as error:
        return report_usage(error)
    except TerminatedError:
        note("SIGTERM ended the wait")
        return 128 + signal.SIGTERM  # as of who does not handle it
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except ValueError as error:
        return report_value(error)
    except OSError as error:
        # Standard output is full or gone; commands handle the files that they read themselves.
        return report_os(error)
    return ExitCode.OK


def main() -> None:
    """Run one command and end the process with its exit code."""
    TERMINAL.silence_grpc()
    stdout: Any = sys.stdout
    if format_of(sys.argv[1:]) not in {"", "table", "wide"} and hasattr(stdout, "reconfigure"):
        stdout.reconfigure(encoding="utf-8")  # data is UTF-8 in any locale
    code = run_command(sys.argv[1:])
    try:
        flush_output()
    except OSError as error:
        code = report_os(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
