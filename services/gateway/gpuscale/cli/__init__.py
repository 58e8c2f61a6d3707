"""`gpuscalectl`: the command line over the gateway's one address. This module is its entry, and imports nothing slow."""

import signal
import sys

from gpuscale.cli.deferred import defer
from gpuscale.common.programs import what_to_install

defer()


def start() -> None:
    """Run one command and end the process with its exit code.

    Until a command can catch it, Ctrl-C ends the process as it ends any other, without a traceback of imports.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so under nohup
    if default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from gpuscale.cli.main import main
    except ModuleNotFoundError as error:
        sys.exit(what_to_install("gpuscalectl", error, "cli"))
    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
