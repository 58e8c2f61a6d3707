"""`gpuscalectl check`, `estimate`, `rank` and `explain placement`: what is free, how much is needed; and quotas of tenants."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands.reserve import ANSWER_SECONDS, WHOLE, Asking
from gpuscale.cli.console import cells, lookup
from gpuscale.cli.console.bulk import Done, confirm, say_each
from gpuscale.cli.console.command import FILE, Session, command, names, one_name
from gpuscale.cli.console.errors import ExitCode, leave
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import Progress, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import tenant_of
from gpuscale.cli.grammar.parameters import (
    COUNT,
    DURATION,
    PERCENT,
    POSITIVE,
    SIZE,
    YES,
    Parsed,
    format_size,
    once,
    option,
    pair,
    repeated,
    takes,
)
from gpuscale.cli.views import allocator as views
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import GPU, parse, quota_name
from gpuscale.common.sizes import counted

if TYPE_CHECKING:
    from gpuscale.client import Client

CONTEXT = 4096
"""Default tokens of a sequence."""


@command("check --gpus 4 --wait 10m")
@takes("asking", Asking)
@option("--wait", type=DURATION, default=0.0, help="How long to wait for free GPUs.")
def check(session: Session, asking: Asking, wait: float) -> None:
    """Check whether GPUs are free, and which, without reserving them. Exit code 5 if not."""
    output = session.output
    with session.connect() as client:
        ask = asking.message(client)
        progress = Progress()
        try:
            while (left := wait - progress.elapsed) > 0:
                part = min(left, 1.0)  # then its reason is shown
                request = api.WaitForAvailabilityRequest(ask=ask, timeout=wire.to_duration(part))
                looked = client.capacity.WaitForAvailability(request, timeout=part + ANSWER_SECONDS)
                if looked.available or wire.seconds(looked.waited) < part / 2:
                    break  # they are free, or waiting cannot help
                progress.tell(looked.message)
        finally:
            progress.end()
        found = client.capacity.CheckAvailability(api.CheckAvailabilityRequest(ask=ask))
    table = ["", *output.table(found.gpus, views.RESERVED_GPUS)] if found.gpus else []
    output.write_said([found.message, *table], found)
    if not found.available:
        leave(ExitCode.NO_CAPACITY)


def _parameter(text: str) -> tuple[str, object]:
    """A name and value; a value that is not JSON is a string."""
    name, value = pair(text, "a parameter", "tp-size=4")
    try:
        return name, json.loads(value, parse_constant=str)  # treat NaN and Infinity as strings
    except json.JSONDecodeError:
        return name, value


@command("estimate llama-3.1-8b --tokens 32768 --batch 8")
@click.argument("model", default="", metavar="[MODEL]")
@repeated(
    "--parameter",
    "-p",
    type=Parsed("name=value", _parameter),
    help="Parallelism, such as tp-size=4 or tp=[1,2,4].",
)
@option(
    "--parameter-count",
    type=float,
    metavar="N",
    help="Number of parameters, such as 70e9, if the name does not tell.",
)
@option(
    "--dtype",
    default="",
    metavar="TYPE",
    help="Type of the weights: fp32, bf16, fp16, fp8, int8, int4; bf16 by default.",
)
@option(
    "--tokens",
    type=POSITIVE,
    metavar="N",
    help="Tokens of each sequence, prompt and answer; 4096 by default.",
)
@option("--batch", "batch_size", type=POSITIVE, default=1, metavar="N", help="Sequences at once.")
@option("--from-config", type=FILE, metavar="FILE", help="The model's config.json, as on Hugging Face.")
@option("--kv-cache-tokens", type=COUNT, metavar="N", help="Tokens in the KV cache.")
@option("--kv-cache-bytes-per-token", type=SIZE, help="Size of the KV cache per token.")
def estimate(
    session: Session,
    model: str,
    parameter: tuple[tuple[str, Any], ...],
    tokens: int | None,
    from_config: Path | None,
    **options: Any,
) -> None:
    """Estimate how many GPUs of this fleet a language model needs, and how much memory on each.

    With --parameter-count or --kv-cache-tokens, only these numbers are used.
    """
    from google.protobuf.json_format import ParseDict, ParseError

    if not (model or from_config or options["parameter_count"]):
        raise InvalidArgumentError("pass MODEL, --from-config or --parameter-count")
    plain = options["parameter_count"] is not None or options["kv_cache_tokens"] is not None
    request = api.EstimateRequirementsRequest(model=model, **options)
    request.context_tokens = tokens or (0 if plain else CONTEXT)
    ParseDict(once(parameter), request.parameters)
    if from_config:
        try:
            ParseDict(json.loads(from_config.read_text(encoding="utf-8")), request.config)
        except (OSError, ValueError, ParseError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not the JSON of a config.json"
            raise InvalidArgumentError(f"{from_config}: {reason}") from error
    with session.connect() as client:
        found = client.capacity.EstimateRequirements(request)
    lines = [f"{counted(found.gpu_count, 'GPU')} with {format_size(found.memory_bytes)} each"]
    lines += [f"  {note}" for note in found.notes]
    if found.ignored_parameters:
        lines.append(f"  ignored: {', '.join(found.ignored_parameters)}")
    session.output.write_said(lines, found)


@command("rank nodes --gpus 2")
@option("--gpus", type=COUNT, default=0, metavar="N", help="Only nodes with this many GPUs.")
@option("--max-utilization", type=PERCENT, help="Idle is below this, in percent; 30 by default.")
@option("--max-memory", type=PERCENT, help="Idle is below this share of memory, in percent; 50 by default.")
def rank_nodes(session: Session, gpus: int, max_utilization: float | None, max_memory: float | None) -> None:
    """Rank nodes by idle GPUs, best first."""
    request = api.RankNodesRequest(
        gpu_count=gpus, max_utilization_percent=max_utilization, max_memory_percent=max_memory
    )
    with session.connect() as client:
        found = client.capacity.RankNodes(request)
    if session.output.format in {Format.JSON, Format.YAML, Format.JSONPATH}:
        session.output.write_data(to_dict(found))
        return
    session.output.write_list(found.nodes, views.RANKED_NODES)
    if session.output.human and found.fallback:
        write_lines(["", "No node has enough idle GPUs: choose one yourself."])


@command("explain placement --gpus 8 --min-memory 40GiB")
@takes("asking", Asking)
def explain_placement(session: Session, asking: Asking) -> None:
    """Show what a request would find: what each constraint removes, the nearest nodes, and what would help."""
    with session.connect() as client:
        found = client.capacity.ExplainPlacement(api.ExplainPlacementRequest(ask=asking.message(client)))
    lines = [found.message]
    if found.remedies:
        lines += ["", "What would help:", *(f"  {remedy}" for remedy in found.remedies)]
    effects = [one for one in found.constraints if one.removed_alone_count]
    if effects:
        width = max(len(cells.word(one, "constraint")) for one in effects)
        lines += ["", "GPUs that each constraint removes, after those above it, and alone:"]
        lines += [
            f"  {cells.word(one, 'constraint'):<{width}}   {one.removed_in_order_count:>5}   {one.removed_alone_count:>5}"
            for one in effects
        ]
    if found.nodes:
        lines += ["", f"Nodes, nearest first ({len(found.nodes)} of {found.node_count}):"]
    for node in found.nodes:
        obstacle = f", {cells.word(node, 'obstacle')}: {node.message}" if node.obstacle else ""
        lines.append(f"  {node.name}: {node.fitting_count} of {counted(len(node.gpus), 'GPU')} fit{obstacle}")
        for gpu in node.gpus:
            why = f"score {gpu.score.total:.3f}"
            if gpu.obstacle:
                why = f"{cells.word(gpu, 'obstacle')}: {gpu.message}"
            lines.append(f"    {gpu.uuid or gpu.name.rpartition('/')[2]}   {why}")
    session.output.write_said(lines, found)


@command("plan rebalance --gpus 8")
@takes("asking", Asking)
@option(
    "--apply",
    is_flag=True,
    help="Start the moves for the first waiting request that they help, or have idle GPUs partitioned for it.",
)
@YES
def plan_rebalance(session: Session, asking: Asking, apply: bool, yes: bool) -> None:
    """Plan the cheapest moves that free --gpus, or the GPUs that waiting requests need.

    Moves nothing without --apply. Exit code 5 if no moves make room for --gpus.
    """
    typed = any(vars(asking).values())
    if apply and typed:
        raise InvalidArgumentError(
            "--apply is for requests that wait: leave out which GPUs, and reserve them with --wait"
        )
    ask: api.Ask | None = None
    with session.connect() as client:
        if apply:
            confirm("Begin", "moves for a waiting request", yes=yes)
            begun = client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())
            plans = [begun.plan] if begun.HasField("plan") else []
            found = api.PlanRebalanceResponse(plans=plans, notes=begun.notes)
        else:
            ask = asking.message(client) if typed else None
            found = client.capacity.PlanRebalance(api.PlanRebalanceRequest(ask=ask))
    output = session.output
    lines: list[str] = []
    for plan in found.plans:
        lines += [": ".join(filter(None, (plan.reservation or plan.holder, plan.message)))]
        lines += [*output.table(plan.moves, views.MOVES), ""] if plan.moves else [""]
        for part in plan.partitions:
            if apply:
                lines += [f"{part.gpu} gets {', '.join(part.profiles)}: gpuscalectl get power-changes", ""]
                continue
            ids, smi = parse(GPU, part.gpu), f"nvidia-smi mig -i {part.index}"
            spot = f"{ids['node']}/{ids['gpu']}"
            lines += [
                f"gpuscalectl cordon {spot}",
                f"then, as root on {ids['node']}:",
                f"  {smi} -dci; {smi} -dgi",
                f"  {smi} -cgi {','.join(part.profiles)} -C",
                f"gpuscalectl uncordon {spot}",
                "",
            ]
    if found.notes:
        lines += ["Not moved:", *(f"  {note}" for note in found.notes)]
    nobody = "nobody waits"
    if apply:
        nobody = "nothing begun: nobody waits, or no moves help; without --apply it says why"
    output.write_said(lines if found.plans else [nobody, *lines], found)
    if ask is not None and not found.plans[0].available:
        leave(ExitCode.NO_CAPACITY)


def _gpu_count(text: str) -> int:
    """A number of GPUs, such as 8 or 1.5, in thousandths."""
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not (math.isfinite(count * WHOLE) and count >= 0):
        raise ValueError(f"{text!r} is not a number of GPUs; write it like 8 or 1.5")
    return round(count * WHOLE)


@command("set quota vision --gpus 8 --weight 2")
@one_name("quotas", metavar="TENANT")
@option("--gpus", "limit", type=Parsed("n", _gpu_count), help="Most GPUs the tenant may hold.")
@option("--no-limit", is_flag=True, help="Let the tenant hold any number of GPUs.")
@option("--hours", type=float, metavar="N", help="Most GPU-hours the tenant may use in a calendar month.")
@option("--no-hours", is_flag=True, help="Let the tenant use any number of GPU-hours.")
@option("--weight", type=float, metavar="N", help="Twice the weight gets twice the GPUs.")
def set_quota(
    session: Session,
    name: str,
    limit: int | None,
    no_limit: bool,
    hours: float | None,
    no_hours: bool,
    weight: float | None,
) -> None:
    """Set the most GPUs and GPU-hours of a tenant, and its weight in the queue; options left out stay unchanged."""
    if limit is hours is weight is None and not no_limit and not no_hours:
        raise InvalidArgumentError("nothing to set: pass --gpus, --hours, --no-limit, --no-hours or --weight")
    for given, none, option_name in (
        (limit, no_limit, "--gpus and --no-limit"),
        (hours, no_hours, "--hours and --no-hours"),
    ):
        if given is not None and none:
            raise InvalidArgumentError(f"{option_name} exclude each other")
    tenant = tenant_of(name)
    with session.connect() as client:
        before = next((one for one in lookup.quotas(client) if one.tenant == tenant), api.Quota())
        quota = api.Quota(tenant=tenant, etag=before.etag)
        if limit is not None or (before.HasField("gpu_milli_limit") and not no_limit):
            quota.gpu_milli_limit = before.gpu_milli_limit if limit is None else limit
        if hours is not None or (before.HasField("gpu_hours_per_month") and not no_hours):
            quota.gpu_hours_per_month = before.gpu_hours_per_month if hours is None else hours
        if weight is not None or before.HasField("weight"):
            quota.weight = before.weight if weight is None else weight
        found = client.quotas.SetQuota(api.SetQuotaRequest(quota=quota)).quota
    session.output.write_one(found, views.QUOTAS)


@command("delete quota vision")
@names("quotas", metavar="TENANT")
@YES
def delete_quota(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete the quotas of tenants, which then have no limit and weight 1; they keep their GPUs."""

    def delete(client: "Client", one: str) -> Done:
        tenant = tenant_of(one)
        full = quota_name(tenant)
        # `tenant` is for allocators of version 0.x.
        client.quotas.DeleteQuota(api.DeleteQuotaRequest(name=full, tenant=tenant))
        return Done(full, f"the quota of {tenant} is deleted", {"name": full})

    confirm("Delete", f"the quota of {', '.join(name)}", yes=yes)
    say_each(session, "quotas", name, delete, lambda client, one: lookup.quotas(client, [one]))
