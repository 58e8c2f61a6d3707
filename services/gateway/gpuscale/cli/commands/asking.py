"""The options that say which GPUs are wanted, and for whom: the same for every command that asks for some."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuscale.cli.console.command import names_of
from gpuscale.cli.grammar.parameters import (
    DURATION,
    GPU_NAME,
    LABEL,
    PERCENT,
    POSITIVE,
    SHARE,
    SIZE,
    once,
    option,
    repeated,
    shared,
)

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Ask, ReserveRequest
    from gpuscale.client import AskOptions

WHOLE = 1000
"""A whole GPU or core, in thousandths."""
POLICIES = ("spread", "pack", "bestfit", "firstfit", "fgd")
STRATEGIES = ("pack", "strict-pack", "spread", "strict-spread")
Names = tuple[str, ...]
Labels = tuple[tuple[str, str], ...]
NODE_NAMES = names_of("nodes")
MIN_MEMORY = option(
    "--min-memory",
    type=SIZE,
    help="Least free memory of each GPU, such as 8GiB; the server's default is 8000 MiB.",
)
MAX_UTILIZATION = option(
    "--max-utilization",
    type=PERCENT,
    help="Only GPUs used less than this, in percent; the server's default is 50.",
)
MODEL = repeated("--model", metavar="TEXT", help="Only GPUs of this model, such as A100.")
TTL = option("--ttl", type=DURATION, help="How long the lease lasts, such as 60s or 5m.")


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Which GPUs are wanted, as typed."""

    gpus: int = shared(
        option("--gpus", type=POSITIVE, required=True, metavar="N", help="How many GPUs, all on one node.")
    )
    min_memory: int | None = shared(MIN_MEMORY)
    max_utilization: float | None = shared(MAX_UTILIZATION)
    allow_unknown_utilization: bool | None = shared(
        option(
            "--allow-unknown-utilization/--refuse-unknown-utilization",
            default=None,
            help="Whether to take GPUs whose utilization cannot be read; by default only with --mig-profile.",
        )
    )
    share: int | None = shared(option("--share", type=SHARE, help="Share of each GPU, such as 0.5."))
    gpu_memory: int | None = shared(
        option("--gpu-memory", type=SIZE, help="Memory of each GPU that a share takes.")
    )
    model: Names = shared(MODEL)
    mig_profile: str = shared(
        option(
            "--mig-profile",
            default="",
            metavar="NAME",
            help="MIG instances of this profile, such as 1g.10gb.",
        )
    )
    cpus: float = shared(
        option(
            "--cpus",
            type=click.FloatRange(0, 10_000),
            default=0.0,
            metavar="N",
            help="CPU cores of the node for each member.",
        )
    )
    host_memory: int = shared(
        option("--host-memory", type=SIZE, default=0, help="Main memory of the node for each member.")
    )
    node: Names = shared(
        repeated("--node", metavar="NAME", help="Only on this node.", shell_complete=NODE_NAMES)
    )
    exclude_node: Names = shared(
        repeated("--exclude-node", metavar="NAME", help="Not on this node.", shell_complete=NODE_NAMES)
    )
    gpu: Names = shared(repeated("--gpu", type=GPU_NAME, help="Only this GPU."))
    exclude_gpu: Names = shared(repeated("--exclude-gpu", metavar="NODE/UUID", help="Not this GPU."))
    node_label: Labels = shared(repeated("--node-label", type=LABEL, help="Only on nodes with this label."))
    apart_from: Labels = shared(
        repeated("--apart-from", type=LABEL, help="Not beside reservations with this label.")
    )
    nvlink: bool = shared(
        option("--nvlink", is_flag=True, help="Prefer GPUs with the most NVLink between them.")
    )
    balanced: bool = shared(
        option("--balanced", is_flag=True, help="Prefer GPUs with about equal free memory.")
    )
    members: int | None = shared(
        option("--members", type=POSITIVE, metavar="N", help="Reserve this many times --gpus, all or none.")
    )
    strategy: str | None = shared(
        option("--strategy", type=click.Choice(STRATEGIES), help="How members are placed on nodes.")
    )
    policy: str | None = shared(option("--policy", type=click.Choice(POLICIES), help="How GPUs are picked."))

    def message(self) -> "Ask":
        """The message of the contract."""
        from gpuscale.client import ask

        return ask(self.gpus, self.options())

    def options(self) -> "AskOptions":
        """The options of the client beside the number of GPUs; a usage error where options exclude each other."""
        from gpuscale.cli.console.resources import full_name
        from gpuscale.client import AskOptions
        from gpuscale.common.names import GPU, NODE

        if self.nvlink and self.balanced:
            raise click.UsageError("--nvlink and --balanced exclude each other")
        return AskOptions(
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
            only_gpus=[full_name(GPU, name.lower()) for name in self.gpu],
            excluded_gpus=[full_name(GPU, name.lower()) for name in self.exclude_gpu],
            node_labels=once(self.node_label),
            apart_from=once(self.apart_from),
            gpu_set="nvlink" if self.nvlink else "memory_balanced" if self.balanced else "",
            member_count=self.members,
            gang_strategy=self.strategy.replace("-", "_") if self.strategy else "",
            policy=self.policy or "",
        )


@dataclass(frozen=True, kw_only=True)
class Requesting:
    """For whom GPUs are reserved, and how, as typed."""

    ttl: float | None = shared(TTL)
    wait: float = shared(
        option("--wait", type=DURATION, default=0.0, help="How long to wait in the queue for free GPUs.")
    )
    holder: str = shared(
        option("--holder", default="", metavar="NAME", help="Who holds them; USER@HOST by default.")
    )
    label: Labels = shared(repeated("--label", type=LABEL, help="A label of your own."))
    tenant: str = shared(
        option("--tenant", default="", metavar="NAME", help="Whose quota it counts against.")
    )
    priority: int = shared(
        option("--priority", type=int, default=0, metavar="N", help="Higher is served sooner.")
    )
    preemptible: bool = shared(
        option("--preemptible", is_flag=True, help="May be ended for a request of higher priority.")
    )
    preempt: bool = shared(
        option("--preempt", is_flag=True, help="May end preemptible reservations of lower priority.")
    )
    request_id: str | None = shared(
        option(
            "--request-id", metavar="UUID", help="Makes the command repeatable: same id, same reservation."
        )
    )

    def message(self, asking: Asking) -> "ReserveRequest":
        """The request for the GPUs that are wanted."""
        from gpuscale.client import ReserveOptions, reserve_request
        from gpuscale.client.asks import default_holder

        options = ReserveOptions(
            **asking.options(),
            ttl=self.ttl,
            wait=self.wait or None,
            anywhere=True,
            labels=once(self.label),
            tenant=self.tenant,
            priority=self.priority,
            preemptible=self.preemptible,
            may_preempt=self.preempt,
            request_id=self.request_id,
        )
        return reserve_request(asking.gpus, self.holder or default_holder(), options)
