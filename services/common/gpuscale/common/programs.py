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
    """Import gRPC with its own log lines switched off, which would mix with ours on stderr.

    A user's GRPC_VERBOSITY still counts. Child processes do not inherit the variable.
    """
    if "GRPC_VERBOSITY" not in os.environ:
        os.environ["GRPC_VERBOSITY"] = "NONE"
        import_module("grpc")
        del os.environ["GRPC_VERBOSITY"]


def what_to_install(program: str, error: ModuleNotFoundError, extra: str) -> str:
    """How to install the package that a program is missing. Raises `error` if it is ours, which is a bug."""
    package = (error.name or "gpuscale").partition(".")[0]
    if package == "gpuscale":
        raise error
    return f"{program}: the Python package {package} is missing: pip install 'gpuscale[{extra}]'"
