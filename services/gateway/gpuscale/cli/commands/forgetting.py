"""`gpuscalectl forget node`: a node whose host is gone for good is listed no more."""

from typing import TYPE_CHECKING

import typer

from gpuscale.cli.console.session import session_of
from gpuscale.cli.console.several import Done, named, say_each
from gpuscale.cli.grammar.options import SomeNames

if TYPE_CHECKING:
    from gpuscale.client import Client


def forget_node(context: typer.Context, name: SomeNames) -> None:
    """Forget nodes that are OFFLINE, with their health events; an agent that reports later makes its node known again."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common.names import NODE

    def forget(client: "Client", full: str) -> Done:
        client.fleet.ForgetNode(api.ForgetNodeRequest(name=full))
        return named(full, "is forgotten")

    def check(client: "Client", full: str) -> None:
        client.fleet.GetNode(api.GetNodeRequest(name=full))

    say_each(session_of(context), "nodes", [full_name(NODE, one) for one in name], forget, check)
