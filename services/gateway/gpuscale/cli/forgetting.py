"""`gpuscalectl forget node`: a node whose host is gone for good is listed no more."""

import typer

from gpuscale.cli.options import Name
from gpuscale.cli.output import Format, write_lines
from gpuscale.cli.session import session_of


def forget_node(context: typer.Context, name: Name) -> None:
    """Forget a node that is OFFLINE, with its health events; an agent that reports for it later makes it known again."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.resources import full_name
    from gpuscale.common.names import NODE

    full = full_name(NODE, name)
    with session_of(context).connect() as client:
        client.fleet.ForgetNode(api.ForgetNodeRequest(name=full))
    output = session_of(context).output
    if output.human:
        write_lines([f"{full} is forgotten"])
    elif output.format is Format.NAME:
        write_lines([full])
    else:
        output.write_data({"name": full})
