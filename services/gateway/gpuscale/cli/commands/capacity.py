"""`gpuscalectl check`, `estimate` and `rank`: is there room, how much is needed, and where is it idle."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.asking import Asking
from gpuscale.cli.console.output import Format, write_lines
from gpuscale.cli.console.progress import REPEAT, Progress
from gpuscale.cli.console.session import Session, session_of
from gpuscale.cli.grammar.exit_codes import ExitCode
from gpuscale.cli.grammar.options import duration, once, size
from gpuscale.cli.grammar.typed import takes

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Ask, CheckAvailabilityResponse, EstimateRequirementsResponse
    from gpuscale.client import Client

rank_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_SLACK = 10.0
"""Seconds for which an answer may be late once the wait is over."""


@takes("asking", Asking)
def check(
    context: typer.Context,
    asking: Asking,
    wait: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Wait so long for room, for 0 at most.",
            show_default=False,
        ),
    ] = 0.0,
) -> None:
    """Say whether there is room, and which GPUs it would be; nothing is reserved. Exit code 5 where there is none."""
    from gpuscale.api.allocator import v1 as api

    session = session_of(context)
    ask = asking.message()
    with session.connect() as client:
        if wait:
            _wait(client, ask, wait)
        found = client.capacity.CheckAvailability(api.CheckAvailabilityRequest(ask=ask))
    _write_check(session, found)
    if not found.available:
        raise typer.Exit(ExitCode.NO_CAPACITY)


def _wait(client: "Client", ask: "Ask", wait: float) -> None:
    """Wait for room, and say in between why there is none."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.common.wire import seconds, to_duration

    progress = Progress()
    try:
        while (left := wait - progress.elapsed) > 0:
            part = min(left, REPEAT)
            request = api.WaitForAvailabilityRequest(ask=ask, timeout=to_duration(part))
            found = client.capacity.WaitForAvailability(request, timeout=part + _SLACK)
            if found.available or seconds(found.waited) < part / 2:
                return  # there is room, or, before the time was over, the answer that waiting would not help
            progress.tell(found.message)
    finally:
        progress.end()


def _write_check(session: Session, found: "CheckAvailabilityResponse") -> None:
    from gpuscale.cli.console.output import to_dict
    from gpuscale.cli.views.allocator import RESERVED_GPUS

    output = session.output
    if not output.human:
        output.write_data(to_dict(found))
        return
    write_lines([found.message])
    if found.gpus:
        write_lines(["", *output.table(found.gpus, RESERVED_GPUS)])


def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)] = "",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="NAME=VALUE",
            help="Parallelism, such as tp-size=4 or tp=[1,2,4]; may be repeated.",
        ),
    ] = None,
    parameter_count: Annotated[
        float | None, typer.Option(help="Number of parameters where the name does not tell, such as 70e9.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the weights: computes memory from it.")] = "",
    kv_cache_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens of the KV cache.")] = None,
    kv_cache_bytes_per_token: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Bytes of the KV cache for each token.")
    ] = None,
) -> None:
    """Say how many GPUs a model needs, and how much memory of each."""
    from google.protobuf.json_format import ParseDict

    from gpuscale.api.allocator import v1 as api

    request = api.EstimateRequirementsRequest(
        model=model,
        parameter_count=parameter_count,
        dtype=dtype,
        kv_cache_tokens=kv_cache_tokens,
        kv_cache_bytes_per_token=kv_cache_bytes_per_token,
    )
    ParseDict(once(map(_parameter, parameter or ())), request.parameters)
    session = session_of(context)
    with session.connect() as client:
        found = client.capacity.EstimateRequirements(request)
    _write_estimate(session, found)


def _parameter(typed: str) -> tuple[str, object]:
    """Name and value; a value that is JSON is what JSON says, and any other a text."""
    name, equals, value = typed.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{typed!r} is no parameter; write it like tp-size=4")
    try:
        return name, json.loads(value, parse_constant=str)  # NaN and Infinity are words here
    except json.JSONDecodeError:
        return name, value


def _write_estimate(session: Session, found: "EstimateRequirementsResponse") -> None:
    from gpuscale.cli.console.output import to_dict
    from gpuscale.cli.grammar.quantities import format_size

    if not session.output.human:
        session.output.write_data(to_dict(found))
        return
    lines = [
        f"{found.gpu_count} GPU{'' if found.gpu_count == 1 else 's'} with {format_size(found.memory_bytes)} each"
    ]
    lines += [f"  {note}" for note in found.notes]
    if found.ignored_parameters:
        lines.append(f"  ignored: {', '.join(found.ignored_parameters)}")
    write_lines(lines)


@rank_app.command("nodes")
def rank_nodes(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=0, help="Only nodes with so many GPUs.", show_default=False)] = 0,
    max_utilization: Annotated[
        float | None, typer.Option(min=0, max=100, help="Idle is below this, in percent; 30 when not given.")
    ] = None,
    max_memory: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="And below this share of memory, in percent; 50 when not given."),
    ] = None,
) -> None:
    """Rank nodes by how many idle GPUs they have, best first."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console.output import to_dict
    from gpuscale.cli.views.capacity import RANKED_NODES

    request = api.RankNodesRequest(
        gpu_count=gpus, max_utilization_percent=max_utilization, max_memory_percent=max_memory
    )
    session = session_of(context)
    with session.connect() as client:
        found = client.capacity.RankNodes(request)
    if session.output.format in {Format.JSON, Format.YAML, Format.JSONPATH}:
        session.output.write_data(to_dict(found))
        return
    session.output.write_list(found.nodes, RANKED_NODES)
    if session.output.human and found.fallback:
        write_lines(["", "No node has enough idle GPUs: schedule by your own judgement."])


@rank_app.command("gpus")
def rank_gpus(
    context: typer.Context,
    min_memory: Annotated[
        int,
        typer.Option(
            parser=size, metavar="SIZE", help="Least free memory, such as 8GiB.", show_default=False
        ),
    ] = 0,
    max_utilization: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="Used less than this, in percent; the server's default is 50."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Only GPUs of this model, such as A100; may be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="List so many at most.")] = 100,
) -> None:
    """List the GPUs that are free, best first, with their scores; nothing is reserved."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console.output import to_dict
    from gpuscale.cli.views.allocator import RESERVED_GPUS
    from gpuscale.client import AskOptions, ask

    options = AskOptions(
        min_memory_bytes=min_memory, max_utilization_percent=max_utilization, models=model or ()
    )
    session = session_of(context)
    with session.connect() as client:
        found = client.capacity.RankGpus(api.RankGpusRequest(ask=ask(1, options), max_count=limit))
    if session.output.format in {Format.JSON, Format.YAML, Format.JSONPATH}:
        session.output.write_data(to_dict(found))
        return
    session.output.write_list(found.gpus, RESERVED_GPUS)
    if session.output.human and found.free_count > len(found.gpus):
        write_lines(["", f"{found.free_count - len(found.gpus)} more are free: --limit shows more."])
