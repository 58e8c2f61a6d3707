"""`gpuscalectl`: the command line over the gateway's one address. This module is its entry, and imports nothing slow."""

import os
import signal
import sys
from importlib import import_module

from gpuscale.cli.deferred import defer

defer()


def start() -> None:
    """Run one command and exit with its exit code. The internal command `supervise` skips the command line's imports.

    Ctrl-C during imports ends the process without a traceback.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # it is closed: nothing else may take its number
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so under nohup
    if default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        name = "commands.supervise" if sys.argv[1:2] == ["supervise"] else "main"
        program = import_module(f"gpuscale.cli.{name}")
    except ModuleNotFoundError as error:
        from gpuscale.common.programs import what_to_install

        sys.exit(what_to_install("gpuscalectl", error, "cli"))
    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    program.main()
