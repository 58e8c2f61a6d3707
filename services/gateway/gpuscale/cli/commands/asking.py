"""The options, shared by commands, that say which GPUs to reserve, and for whom."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuscale import client as library
from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import names_of
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import (
    DURATION,
    GPU_NAME,
    LABEL,
    PERCENT,
    POSITIVE,
    SHARE,
    SIZE,
    WATTS,
    once,
    shared,
)
from gpuscale.common.names import BOOKING, NODE

if TYPE_CHECKING:
    from gpuscale.client import AskOptions, Client

WHOLE = 1000
"""A whole GPU or core, in thousandths."""
POLICIES = ("spread", "pack", "bestfit", "firstfit", "fgd")
STRATEGIES = ("pack", "strict-pack", "spread", "strict-spread")
Names = tuple[str, ...]
Labels = tuple[tuple[str, str], ...]
NODE_NAMES = names_of("nodes")
TTL_HELP = "How long the lease lasts, such as 60s or 5m."


@dataclass(frozen=True, kw_only=True)
class Preferring:
    """Requirements on each GPU, as typed."""

    min_memory: int | None = shared(
        type=SIZE, help="Least free memory, such as 8GiB; the server's default is 8000 MiB."
    )
    max_utilization: float | None = shared(
        type=PERCENT, help="Utilization must be lower, in percent; the server's default is 50."
    )
    model: Names = shared(many=True, metavar="TEXT", help="Only GPUs of this model, such as A100.")


@dataclass(frozen=True, kw_only=True)
class Asking(Preferring):
    """Which GPUs to reserve, as typed."""

    gpus: int | None = shared(type=POSITIVE, metavar="N", help="How many GPUs, all on one node.")
    allow_unknown_utilization: bool | None = shared(
        "--allow-unknown-utilization/--refuse-unknown-utilization",
        default=None,
        help="Whether to take GPUs whose utilization cannot be read; by default only with --mig-profile.",
    )
    share: int | None = shared(type=SHARE, help="Share of each GPU, such as 0.5.")
    gpu_memory: int | None = shared(type=SIZE, help="Memory of each GPU to set aside for a share.")
    mig_profile: str = shared(
        default="", metavar="NAME", help="MIG instances of this profile, such as 1g.10gb."
    )
    cpus: float = shared(
        type=click.FloatRange(0, 10_000),
        default=0.0,
        metavar="N",
        help="CPU cores of the node for each member.",
    )
    host_memory: int = shared(type=SIZE, default=0, help="Main memory of the node for each member.")
    node: Names = shared(many=True, metavar="NAME", help="Only on this node.", shell_complete=NODE_NAMES)
    exclude_node: Names = shared(
        many=True, metavar="NAME", help="Not on this node.", shell_complete=NODE_NAMES
    )
    gpu: Names = shared(many=True, type=GPU_NAME, help="Only this GPU: NODE/INDEX, NODE/UUID or UUID.")
    exclude_gpu: Names = shared(many=True, type=GPU_NAME, help="Not this GPU.")
    node_label: Labels = shared(many=True, type=LABEL, help="Only on nodes with this label.")
    apart_from: Labels = shared(many=True, type=LABEL, help="Not beside reservations with this label.")
    nvlink: bool = shared(is_flag=True, help="Prefer GPUs with the most NVLink between them.")
    balanced: bool = shared(is_flag=True, help="Prefer GPUs with about equal free memory.")
    power_limit: float | None = shared(
        type=WATTS, help="What each GPU may draw at most, such as 300W, where gpuscale-power runs."
    )
    members: int | None = shared(
        type=POSITIVE, metavar="N", help="Reserve this many times --gpus, all or none."
    )
    strategy: str | None = shared(type=click.Choice(STRATEGIES), help="How members are placed on nodes.")
    policy: str | None = shared(type=click.Choice(POLICIES), help="How GPUs are picked.")

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.nvlink and self.balanced:
            raise click.UsageError("--nvlink and --balanced exclude each other")

    def message(self, client: "Client") -> "api.Ask":
        """The `Ask` message."""
        return library.ask(self.count(), self.options(client))

    def count(self) -> int:
        """Number of GPUs. Raises click.UsageError: no number was typed."""
        if self.gpus is None:
            raise click.UsageError("Missing option '--gpus'.")
        return self.gpus

    def options(self, client: "Client") -> "AskOptions":
        """The client's options, apart from the number of GPUs; queries the fleet for GPUs without a full name."""

        def gpus(typed: Names) -> list[str]:
            return lookup.spots(lambda: lookup.nodes(client), typed, "gpus") if typed else []

        return library.AskOptions(
            min_memory_bytes=self.min_memory,
            max_utilization_percent=self.max_utilization,
            allow_unknown_utilization=self.allow_unknown_utilization,
            gpu_milli=self.share,
            gpu_memory_bytes=self.gpu_memory,
            models=self.model,
            mig_profile=self.mig_profile,
            cpu_milli=round(self.cpus * WHOLE),
            host_memory_bytes=self.host_memory,
            nodes=[full_name(NODE, name) for name in self.node],
            excluded_nodes=[full_name(NODE, name) for name in self.exclude_node],
            only_gpus=gpus(self.gpu),
            excluded_gpus=gpus(self.exclude_gpu),
            node_labels=once(self.node_label),
            apart_from=once(self.apart_from),
            gpu_set="nvlink" if self.nvlink else "memory_balanced" if self.balanced else "",
            power_limit_watts=self.power_limit,
            member_count=self.members,
            gang_strategy=self.strategy.replace("-", "_") if self.strategy else "",
            policy=self.policy or "",
        )


@dataclass(frozen=True, kw_only=True)
class Requesting:
    """For whom to reserve GPUs, and how, as typed."""

    ttl: float | None = shared(type=DURATION, help=TTL_HELP)
    wait: float | None = shared(
        type=DURATION,
        help="How long to wait in the queue for free GPUs; up to 7d for run, otherwise not at all, by default.",
    )
    holder: str = shared(default="", metavar="NAME", help="Who holds them; USER@HOST by default.")
    label: Labels = shared(many=True, type=LABEL, help="A label of your own.")
    tenant: str = shared(default="", metavar="NAME", help="Tenant whose quota it counts against.")
    owner: str = shared(
        default="", metavar="NAME", help="Owner of the reservation, for admins; you by default."
    )
    priority: int = shared(type=int, default=0, metavar="N", help="Higher priorities are served first.")
    preemptible: bool = shared(is_flag=True, help="A request of higher priority may end it.")
    preempt: bool = shared(is_flag=True, help="It may end preemptible reservations of lower priority.")
    request_id: str | None = shared(
        metavar="UUID", help="Makes the command idempotent: same id, same reservation."
    )
    time_limit: float | None = shared(
        type=DURATION, help="End it after this time, so it may use GPUs that are booked for later."
    )
    booking: str = shared(
        default="",
        metavar="NAME",
        help="Only on the GPUs of this booking.",
        shell_complete=names_of("bookings"),
    )

    def message(self, asking: Asking, client: "Client") -> "api.ReserveRequest":
        """The request for these GPUs."""
        from gpuscale.client.asks import default_holder

        options = library.ReserveOptions(
            **asking.options(client),
            ttl=self.ttl,
            wait=self.wait or None,
            anywhere=True,
            labels=once(self.label),
            tenant=self.tenant,
            owner=self.owner,
            priority=self.priority,
            preemptible=self.preemptible,
            may_preempt=self.preempt,
            request_id=self.request_id,
            time_limit=self.time_limit,
            booking=self.booking and full_name(BOOKING, self.booking),
        )
        count = asking.gpus
        if count is None and self.booking and not asking.members:
            count = len(lookup.bookings(client, [self.booking])[0].gpus)
        return library.reserve_request(count or asking.count(), self.holder or default_holder(), options)
