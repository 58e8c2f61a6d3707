"""The programs that are installed, by name. This module is the entry of each, and imports nothing that may be missing."""

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = {
    "gpuscale-agent": ("gpuscale.monitor.app.agent", "agent"),
    "gpuscale-fleet": ("gpuscale.monitor.app.fleet", "server"),
    "gpuscale-allocator": ("gpuscale.allocator.main", "server"),
    "gpuscale-autoscaler": ("gpuscale.autoscaler.main", "server"),
    "gpuscale-adapter": ("gpuscale.autoscaler.adapters.main", "server"),
    "gpuscale-container-adapter": ("gpuscale.autoscaler.adapters.main", "container"),
    "gpuscale-gateway": ("gpuscale.gateway.main", "runtime"),
    "gpuscale-dashboard": ("gpuscale.dashboard.main", "dashboard"),
}
"""Module with the `main` of each, and the extra of gpuscale that brings what it needs."""


def main() -> int | None:
    """Run the program that the process was started as; its exit code."""
    name = Path(sys.argv[0]).name
    if name not in PROGRAMS:
        sys.exit(f"{name} is no program of gpuscale; call it by its own name: {', '.join(PROGRAMS)}")
    module, extra = PROGRAMS[name]
    gc.disable()  # until it runs: of what imports make nothing is garbage, and to look for some is an eighth of their time
    try:
        import_grpc()
        program = import_module(module)
    except ModuleNotFoundError as error:
        sys.exit(what_to_install(name, error, extra))
    code: int | None = program.main()
    return code


def import_grpc() -> None:
    """Import gRPC so that its core writes nothing to stderr: lines of its own form would stand among those of the log.

    Whoever sets GRPC_VERBOSITY gets the lines. The variable is not left behind for the programs that this one starts.
    """
    if "GRPC_VERBOSITY" not in os.environ:
        os.environ["GRPC_VERBOSITY"] = "NONE"
        import_module("grpc")
        del os.environ["GRPC_VERBOSITY"]


def what_to_install(program: str, error: ModuleNotFoundError, extra: str) -> str:
    """What to type where a program finds a package missing.

    Raises:
        ModuleNotFoundError: it is one of gpuscale's own modules, which is a defect.
    """
    package = (error.name or "gpuscale").partition(".")[0]
    if package == "gpuscale":
        raise error
    return f"{program}: the Python package {package} is missing: pip install 'gpuscale[{extra}]'"
