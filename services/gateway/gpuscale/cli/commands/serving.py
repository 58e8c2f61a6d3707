"""`gpuscalectl up` and `gpuscalectl dashboard`, which parse their own arguments and run until stopped."""

import gc
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import click

from gpuscale.cli.console.command import Command, Session, command
from gpuscale.cli.console.errors import leave
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.programs import import_grpc

SERVES: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


class UpCommand(Command):
    """`up` takes its settings as flags, even those named like options of all commands."""

    of_all = ()


@command(kind=UpCommand, **SERVES)
@click.pass_context
def up(context: click.Context, _session: Session) -> None:
    """Start everything on this machine, in one process."""
    gc.disable()  # as in common/programs.py
    try:
        import_grpc()
        from gpuscale.up.main import main as run_up

        leave(run_up(context.args))
    except ModuleNotFoundError as error:
        message = f"up needs more than the CLI ({error.name} is missing): pip install 'gpuscale[all]'"
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error


@command(**SERVES)
@click.pass_context
def dashboard(context: click.Context, session: Session) -> None:
    """Serve the dashboard to browsers; --help after it lists its own options."""
    if find_spec("nicegui") is None:
        message = "the dashboard is not installed: pip install 'gpuscale[dashboard]'"
        raise GpuscaleError(message, reason="NOT_INSTALLED")
    from gpuscale.dashboard.main import main as run_dashboard

    typed = context.args
    if "--help" not in typed:
        from gpuscale.client.connection import find_context

        # Its gateway is that of this command line's options, or of the context, where nothing else names one.
        address = session.address or os.environ.get("GPUSCALE_ADDRESS")
        named = any(one.startswith(("--config", "--gateway-address")) for one in typed) or (
            {"GPUSCALE_CONFIG", "GPUSCALE_DASHBOARD_GATEWAY_ADDRESS"} & {*os.environ}
        )
        if session.context or not (address or named):
            known = find_context(session.context)  # its token is not for whoever looks at the page
            files = ("ca_file", "cert_file", "key_file")
            session = replace(session, **{one: getattr(session, one) or getattr(known, one) for one in files})
            address = address or known.address
        options = replace(session, address=address or None, context=None).options()
        of_gateway = (f"--gateway-{one[2:]}" if one.startswith("--address=") else one for one in options)
        typed = [*of_gateway, *typed]
    leave(run_dashboard(typed))
