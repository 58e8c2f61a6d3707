"""The options that say for whom and how GPUs are reserved, the same for every command that reserves some."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.grammar.options import duration, once, pair

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import ReserveRequest
    from gpuscale.cli.commands.asking import Asking

Ttl = Annotated[
    float | None,
    typer.Option(parser=duration, metavar="DURATION", help="How long the lease lasts, such as 60s or 5m."),
]


@dataclass(frozen=True, kw_only=True)
class Requesting:
    """For whom and how, as it was typed."""

    ttl: Ttl = None
    wait: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="How long to wait in the queue for room.",
            show_default=False,
        ),
    ] = 0.0
    holder: Annotated[str, typer.Option(help="Who will hold them; USER@HOST when not given.")] = ""
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label of yours; may be repeated.")
    ] = None
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose quota it counts against.")] = ""
    priority: Annotated[
        int, typer.Option(help="The higher, the sooner it is served.", show_default=False)
    ] = 0
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="May be ended for a request with a higher priority.")
    ] = False
    preempt: Annotated[
        bool, typer.Option("--preempt", help="Preemptible ones with a lower priority may be ended for it.")
    ] = False
    request_id: Annotated[
        str | None,
        typer.Option(metavar="UUID", help="Makes the command repeatable: same id, same reservation."),
    ] = None

    def message(self, asking: "Asking") -> "ReserveRequest":
        """The request that they say, for what is asked for."""
        from gpuscale.client import ReserveOptions, reserve_request
        from gpuscale.client.asks import default_holder

        options = ReserveOptions(
            **asking.options(),
            ttl=self.ttl,
            wait=self.wait or None,
            anywhere=True,
            labels=once(map(pair, self.label or ())),
            tenant=self.tenant,
            priority=self.priority,
            preemptible=self.preemptible,
            may_preempt=self.preempt,
            request_id=self.request_id,
        )
        return reserve_request(asking.gpus, self.holder or default_holder(), options)
