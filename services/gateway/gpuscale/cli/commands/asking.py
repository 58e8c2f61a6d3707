"""The options that say what GPUs are wanted, the same for every command that asks for some."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.grammar.options import once, one_gpu, pair, share, size

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Ask
    from gpuscale.client import AskOptions

WHOLE = 1000
"""A whole GPU, or a core, in thousandths."""


class Policy(StrEnum):
    """How GPUs are picked."""

    SPREAD = "spread"
    PACK = "pack"
    BESTFIT = "bestfit"
    FIRSTFIT = "firstfit"
    FGD = "fgd"


class Strategy(StrEnum):
    """How members lie on nodes."""

    PACK = "pack"
    STRICT_PACK = "strict-pack"
    SPREAD = "spread"
    STRICT_SPREAD = "strict-spread"


Names = list[str] | None


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What GPUs are wanted, as it was typed."""

    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs, all on one node.", show_default=False)]
    min_memory: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="Least free memory of each, such as 8GiB; the server's default is 8000 MiB.",
        ),
    ] = None
    max_utilization: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, help="Each must be used less than this, in percent; the server's default is 50."
        ),
    ] = None
    allow_unknown_utilization: Annotated[
        bool | None,
        typer.Option(
            "--allow-unknown-utilization/--refuse-unknown-utilization",
            help="Whether to admit GPUs whose utilization cannot be read; by default only with --mig-profile.",
        ),
    ] = None
    share_: Annotated[
        int | None,
        typer.Option("--share", parser=share, metavar="0-1", help="Share of each GPU, such as 0.5."),
    ] = None
    gpu_memory: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Memory of each GPU that a share takes.")
    ] = None
    model: Annotated[
        Names, typer.Option(metavar="TEXT", help="Only GPUs of this model, such as A100; may be repeated.")
    ] = None
    mig_profile: Annotated[
        str, typer.Option(metavar="NAME", help="MIG instances of this profile, such as 1g.10gb.")
    ] = ""
    cpus: Annotated[
        float,
        typer.Option(min=0, max=10_000, help="CPU cores of the node, for each member.", show_default=False),
    ] = 0.0
    host_memory: Annotated[
        int,
        typer.Option(
            parser=size, metavar="SIZE", help="Main memory of the node, for each member.", show_default=False
        ),
    ] = 0
    node: Annotated[Names, typer.Option(metavar="NAME", help="Only on this node; may be repeated.")] = None
    exclude_node: Annotated[
        Names, typer.Option(metavar="NAME", help="Not on this node; may be repeated.")
    ] = None
    gpu: Annotated[
        Names, typer.Option(parser=one_gpu, metavar="NODE/UUID", help="Only this GPU; may be repeated.")
    ] = None
    exclude_gpu: Annotated[
        Names, typer.Option(metavar="NODE/UUID", help="Not this GPU; may be repeated.")
    ] = None
    node_label: Annotated[
        Names, typer.Option(metavar="KEY=VALUE", help="Only on nodes that bear this label; may be repeated.")
    ] = None
    apart_from: Annotated[
        Names,
        typer.Option(metavar="KEY=VALUE", help="Not beside reservations with this label; may be repeated."),
    ] = None
    nvlink: Annotated[
        bool, typer.Option("--nvlink", help="Prefer GPUs with the most NVLink between them.")
    ] = False
    balanced: Annotated[
        bool, typer.Option("--balanced", help="Prefer GPUs with about the same free memory.")
    ] = False
    members: Annotated[int | None, typer.Option(min=1, help="So many times that many GPUs, all or none.")] = (
        None
    )
    strategy: Annotated[Strategy | None, typer.Option(help="How members lie on nodes.")] = None
    policy: Annotated[Policy | None, typer.Option(help="How GPUs are picked.")] = None

    def message(self) -> "Ask":
        """The same as a message of the contract."""
        from gpuscale.client import ask

        return ask(self.gpus, self.options())

    def options(self) -> "AskOptions":
        """The same, beside the number of GPUs, in the words of the client; a usage error where options exclude others."""
        from gpuscale.cli.console.resources import full_name
        from gpuscale.client import AskOptions
        from gpuscale.common.names import GPU, NODE

        if self.nvlink and self.balanced:
            raise typer.BadParameter("--nvlink and --balanced exclude each other")
        return AskOptions(
            min_memory_bytes=self.min_memory,
            max_utilization_percent=self.max_utilization,
            allow_unknown_utilization=self.allow_unknown_utilization,
            gpu_milli=self.share_,
            gpu_memory_bytes=self.gpu_memory,
            models=self.model or (),
            mig_profile=self.mig_profile,
            cpu_milli=round(self.cpus * WHOLE),
            host_memory_bytes=self.host_memory,
            nodes=[full_name(NODE, name) for name in self.node or ()],
            excluded_nodes=[full_name(NODE, name) for name in self.exclude_node or ()],
            only_gpus=[full_name(GPU, name.lower()) for name in self.gpu or ()],
            excluded_gpus=[full_name(GPU, name.lower()) for name in self.exclude_gpu or ()],
            node_labels=once(map(pair, self.node_label or ())),
            apart_from=once(map(pair, self.apart_from or ())),
            gpu_set="nvlink" if self.nvlink else "memory_balanced" if self.balanced else "",
            member_count=self.members,
            gang_strategy=self.strategy.replace("-", "_") if self.strategy else "",
            policy=self.policy or "",
        )
