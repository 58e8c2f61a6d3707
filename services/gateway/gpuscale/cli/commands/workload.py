"""The options that say what a backtest is run on, the same for every command that runs one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.grammar.options import duration
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import BacktestPolicy, BacktestRequest, BacktestResponse
    from gpuscale.api.autoscaler.v1 import Workload as ApiWorkload
    from gpuscale.client import Client

LONGEST_CALL = 125.0
"""Seconds that one call may take; the service gives up before."""


@dataclass(frozen=True)
class Span:
    """The least and the most of a time that varies, in seconds."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:g}s..{self.most:g}s"


def span(text: "str | Span") -> Span:
    """A duration, or two of them as `10s..60s`; a usage error where it is neither. A default (typer passes it too) is one."""
    if isinstance(text, Span):
        return text
    least, dots, most = text.partition("..")
    found = Span(duration(least), duration(most if dots else least))
    if found.most < found.least:
        raise typer.BadParameter(f"{text!r}: the second is shorter than the first")
    return found


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What there is to do, and what replicas are like, as it was typed."""

    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="CSV of arrival_seconds,service_seconds, or of t_s,context_tokens,generated_tokens; - for standard input.",
            show_default=False,
        ),
    ] = ""
    history: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT", help="In place of a trace: what arrived at this endpoint in the last day."
        ),
    ] = ""
    service_time: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="With --history: time of a request; learnt when not given.",
        ),
    ] = None
    goal: Annotated[
        float,
        typer.Option(
            "--goal", "--slo", parser=duration, metavar="DURATION", help="How long a request may wait."
        ),
    ] = 30.0
    slots: Annotated[int, typer.Option(min=1, help="Requests that a replica serves at a time.")] = 1
    cold_start: Annotated[
        Span,
        typer.Option(
            parser=span,
            metavar="DURATION[..DURATION]",
            help="From the decision to a replica that works.",
        ),
    ] = Span(30.0, 30.0)
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that there are; 16 replicas when not given.")
    ] = None
    kills: Annotated[bool, typer.Option("--kills", help="A replica that goes drops what it has in hand.")] = (
        False
    )
    seed: Annotated[int, typer.Option(help="The same seed, the same cold starts.")] = 0

    def request(self) -> "BacktestRequest":
        """A request without policies.

        Raises:
            InvalidArgumentError: the trace cannot be read, or is none.
        """
        from gpuscale.api.autoscaler import v1 as api
        from gpuscale.cli.console.resources import full_name
        from gpuscale.common import names
        from gpuscale.common.wire import to_duration

        if bool(self.trace) == bool(self.history):
            raise InvalidArgumentError("pass --trace, or --history: one of the two")
        trace = read_workload(self.trace) if self.trace else api.Workload()
        return api.BacktestRequest(
            arrivals=trace.arrivals,
            service_seconds=trace.service_seconds,
            endpoint=full_name(names.ENDPOINT, self.history) if self.history else "",
            service_time=None if self.service_time is None else to_duration(self.service_time),
            goal=to_duration(self.goal),
            slots=self.slots,
            min_cold_start=to_duration(self.cold_start.least),
            max_cold_start=to_duration(self.cold_start.most),
            seed=self.seed,
            max_gpus=self.max_gpus,
            kills=self.kills,
        )


def read_workload(name: str) -> "ApiWorkload":
    """The workload of a trace in a file.

    Raises:
        InvalidArgumentError: it cannot be read, or is none.
    """
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.commands.apply import read
    from gpuscale.client.traces import ServiceModel, read_trace

    text, _ = next(read(name))
    requests = read_trace(text.splitlines(keepends=True), ServiceModel())
    return api.Workload(
        arrivals=[one.arrival for one in requests], service_seconds=[one.service for one in requests]
    )


def run(client: "Client", request: "BacktestRequest", policies: "list[BacktestPolicy]") -> "BacktestResponse":
    """Run policies on the workload of a request."""
    del request.policies[:]
    request.policies.extend(policies)
    return client.backtests.Backtest(request, timeout=LONGEST_CALL)


def preset_names(client: "Client", typed: list[str]) -> list[str]:
    """The presets of these names; `all` stands for all there are.

    Raises:
        InvalidArgumentError: none is left.
    """
    from gpuscale.api.autoscaler import v1 as api

    if "all" not in typed:
        return typed
    known = [one.name for one in client.presets.ListPresets(api.ListPresetsRequest()).presets]
    if not known:
        raise InvalidArgumentError("there are no presets")
    return known
