"""Entry point of the installed programs; imports nothing that may be missing."""

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = {
    "gpuscale-agent": ("gpuscale.monitor.app.agent", "agent"),
    "gpuscale-fleet": ("gpuscale.monitor.app.fleet", "server"),
    "gpuscale-allocator": ("gpuscale.allocator.app", "server"),
    "gpuscale-autoscaler": ("gpuscale.autoscaler.app", "server"),
    "gpuscale-adapter": ("gpuscale.autoscaler.adapters.main", "server"),
    "gpuscale-container-adapter": ("gpuscale.autoscaler.adapters.main", "container"),
    "gpuscale-gateway": ("gpuscale.gateway.main", "runtime"),
    "gpuscale-dashboard": ("gpuscale.dashboard.main", "dashboard"),
}
"""By program: the module with its `main`, and the extra of gpuscale that it needs."""


def main() -> int | None:
    """Run the program named by argv[0] and return its exit code."""
    name = Path(sys.argv[0]).name
    if name not in PROGRAMS:
        sys.exit(f"{name} is no program of gpuscale; call it by its own name: {', '.join(PROGRAMS)}")
    module, extra = PROGRAMS[name]
    gc.disable()  # imports make no garbage, and collecting takes an eighth of their time
    try:
        import_grpc()
        program = import_module(module)
    except ModuleNotFoundError as error:
        sys.exit(what_to_install(name, error, extra))
    code: int | None = program.main()
    return code


def import_grpc() -> None:
    """Import gRPC without its own log lines, which would mix with ours on stderr, and without its handlers of forks.

    These run in each child that uvloop starts, where they may crash it before its program runs. A user's variables still count.
    Child processes do not inherit ours.
    """
    ours = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "false"}
    for name in ours.keys() & os.environ.keys():
        del ours[name]
    os.environ.update(ours)
    import_module("grpc")
    for name in ours:
        del os.environ[name]


def what_to_install(program: str, error: ModuleNotFoundError, extra: str) -> str:
    """How to install the package that a program is missing. Raises `error` if it is ours, which is a bug."""
    package = (error.name or "gpuscale").partition(".")[0]
    if package == "gpuscale":
        raise error
    return f"{program}: the Python package {package} is missing: pip install 'gpuscale[{extra}]'"
