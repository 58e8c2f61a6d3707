"""`gpuscalectl up` and `gpuscalectl dashboard`: they read their own arguments, and go on until they are told to stop."""

import typer

from gpuscale.common.errors import GpuscaleError


def up(context: typer.Context) -> None:
    """Start everything on this machine, in one process."""
    try:
        from gpuscale.up.main import main as run_up
    except ModuleNotFoundError as error:
        message = f"up needs more than the CLI ({error.name} is missing): pip install 'gpuscale[all]'"
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    raise typer.Exit(run_up(context.args))


def dashboard(context: typer.Context) -> None:
    """Serve what the services know to browsers; --help after it tells its own options."""
    try:
        from gpuscale.dashboard.main import main as run_dashboard
    except ModuleNotFoundError as error:
        message = (
            f"the dashboard is not installed ({error.name} is missing): pip install 'gpuscale[dashboard]'"
        )
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    chosen = context.find_root().params.get("address")
    address = ["--gateway-address", str(chosen)] if chosen else []
    raise typer.Exit(run_dashboard([*address, *context.args]))
