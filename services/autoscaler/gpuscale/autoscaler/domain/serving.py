"""Metrics of language model servers on their own /metrics: names, readings, and what follows from two readings. Pure.

A metric that a server does not have is absent, and never 0. TGI and Triton have no histogram of the time to the first token
that includes the queue (Triton's own counts the first chunk), so it is absent for them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WINDOW = 30.0
"""Seconds of a percentile's window."""
RATE_WINDOW = 10.0
"""Seconds over which requests and tokens per second are taken: short, to see a burst before it becomes a queue."""
PREFIX = "llm:"
"""Prefix of signals' metrics that are read from the replicas' own /metrics."""
MAX_BUCKETS = 256
"""Most buckets of a histogram."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """A histogram: how many took at most each of `bounds`, in ascending seconds, and finally the total."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A server's metrics at a moment; the counts are since its start."""

    running: float | None = None  # requests that it works on
    waiting: float | None = None  # requests in its queue
    kv_cache_percent: float | None = None
    requests: float | None = None  # requests that got their first token, or their answer
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    ttft: Latencies | None = None  # from the arrival of a request to its first token, including the queue
    itl: Latencies | None = None  # between two tokens of an answer


SERVERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vLLM": {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_cache_percent": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "requests": ("vllm:time_to_first_token_seconds_count",),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generated_tokens": ("vllm:generation_tokens_total",),
        "ttft": ("vllm:time_to_first_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    },
    "SGLang": {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_cache_percent": ("sglang:token_usage",),
        "requests": ("sglang:time_to_first_token_seconds_count",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generated_tokens": ("sglang:generation_tokens_total",),
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    },
    "TGI": {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "requests": ("tgi_request_success", "tgi_request_count"),
        "prompt_tokens": ("tgi_request_input_length_sum",),
        "generated_tokens": ("tgi_request_generated_tokens_sum",),
        "itl": ("tgi_request_mean_time_per_token_duration",),
    },
    "Triton": {
        "running": ('nv_trt_llm_request_metrics{request_type="scheduled"}',),
        "waiting": (
            'nv_trt_llm_request_metrics{request_type="waiting"}',
            "nv_inference_pending_request_count",
        ),
        "kv_cache_percent": ('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',),
        "requests": ("nv_inference_request_success",),
    },
}
"""The names of the metrics of each known server, by field of `ServerReading`; of several, the first that exists.

A label is `name{label="value"}`, and the KV cache is a fraction.
"""

_HISTOGRAMS = frozenset({"ttft", "itl"})
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(\{[^}]*\})?[ \t]+(\S+)")
_LE = re.compile(r'(?:^|[{,])\s*le="([^"]*)"')


class NoServerError(Exception):
    """A page does not come from a known server; the text says so."""


@dataclass(frozen=True, slots=True)
class _Page:
    """The samples of a page by family name: labels and value."""

    samples: Mapping[str, list[tuple[str, float]]]

    def sums(self, names: Iterable[str]) -> Iterator[float]:
        """The sum over all series of each name that exists, such as of several models behind one page."""
        for name in names:
            family, brace, label = name.partition("{")
            found = [
                value
                for labels, value in self.samples.get(family, ())
                if not brace or label.removesuffix("}") in labels
            ]
            if found:
                yield math.fsum(found)

    def latencies(self, names: Iterable[str]) -> Iterator[Latencies]:
        """The histogram of each name that exists, summed over its series."""
        for name in names:
            counts: defaultdict[float, float] = defaultdict(float)
            for labels, value in self.samples.get(f"{name}_bucket", ()):
                bound = _LE.search(labels)
                if bound is not None:
                    counts[_number(bound[1])] += value
            bounds = sorted(counts)
            if bounds and bounds[-1] == math.inf and len(bounds) <= MAX_BUCKETS:
                yield Latencies(tuple(bounds[:-1]), tuple(counts[one] for one in bounds))


def read_server(text: str) -> ServerReading:
    """Parse a page in Prometheus text format. Raises NoServerError if it is from no known server."""
    samples: dict[str, list[tuple[str, float]]] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is not None and math.isfinite(value := _number(found[3])):
            samples.setdefault(found[1], []).append((found[2] or "", value))
    page = _Page(samples)
    for names in SERVERS.values():
        if next(page.sums((*names["running"], *names["waiting"])), None) is not None:
            values: dict[str, Any] = {
                field: next(page.latencies(own) if field in _HISTOGRAMS else page.sums(own), None)
                for field, own in names.items()
            }
            if values.get("kv_cache_percent") is not None:
                values["kv_cache_percent"] *= 100
            return ServerReading(**values)
    raise NoServerError(f"shows no metrics of {', '.join(SERVERS)}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


Reading = tuple[float, ServerReading]
"""A reading, and when it was taken, in seconds since boot."""


def restarted(before: ServerReading, after: ServerReading) -> bool:
    """Whether a count fell, so that the server has restarted in between."""
    pairs = ((getattr(before, one), getattr(after, one)) for one in _COUNTS)
    return any(one is not None and other is not None and other < one for one, other in pairs)


_COUNTS = ("requests", "prompt_tokens", "generated_tokens")


def rate(first: Reading, last: Reading, count: str) -> float | None:
    """The rate of a count per second between two readings; None if one of them lacks it."""
    one, other, gap = getattr(first[1], count), getattr(last[1], count), last[0] - first[0]
    return None if one is None or other is None or gap <= 0 else max(0.0, other - one) / gap


def arrivals(first: Reading, last: Reading) -> float | None:
    """Requests per second: those that got their first token, and the growth of the queue."""
    answered, gap = rate(first, last, "requests"), last[0] - first[0]
    if answered is None or first[1].waiting is None or last[1].waiting is None:
        return answered
    return max(0.0, answered + (last[1].waiting - first[1].waiting) / gap)


def percentile(spans: Iterable[tuple[Latencies, Latencies]], percent: float) -> float | None:
    """The percentile of what several servers added between two readings each; None if they added nothing.

    Values are assumed to be even within a bucket, as in Prometheus' histogram_quantile; beyond the last bound, that bound is
    returned.
    """
    added: defaultdict[float, float] = defaultdict(float)
    for before, after in spans:
        if before.bounds == after.bounds:
            grown = [max(0.0, new - old) for old, new in zip(before.counts, after.counts, strict=True)]
            parts = [grown[0], *(max(0.0, more - less) for less, more in pairwise(grown))]
            for bound, part in zip((*after.bounds, math.inf), parts, strict=True):
                added[bound] += part
    wanted, seen, low = percent / 100 * math.fsum(added.values()), 0.0, 0.0
    for bound in sorted(added):
        if added[bound] > 0 and seen + added[bound] >= wanted:
            return low if bound == math.inf else low + (bound - low) * (wanted - seen) / added[bound]
        seen, low = seen + added[bound], bound
    return None


def in_hand(_: Reading, last: Reading) -> float | None:
    """Requests in a server, including its queue."""
    running, waiting = last[1].running, last[1].waiting
    return None if running is None or waiting is None else running + waiting


def _level(name: str) -> Callable[[Reading, Reading], float | None]:
    return lambda _, last: getattr(last[1], name)


def _rate(count: str) -> Callable[[Reading, Reading], float | None]:
    return lambda first, last: rate(first, last, count)


METRICS: Mapping[str, Callable[[Reading, Reading], float | None]] = {
    "running": _level("running"),
    "waiting": _level("waiting"),
    "in_hand": in_hand,
    "kv_cache_percent": _level("kv_cache_percent"),
    "requests_per_second": arrivals,
    "served_per_second": _rate("requests"),
    "prompt_tokens_per_second": _rate("prompt_tokens"),
    "generated_tokens_per_second": _rate("generated_tokens"),
}
"""Replica metrics for signals, by the first and last reading of the window; both are the same for a single reading."""
LEVELS = frozenset({"running", "waiting", "in_hand", "kv_cache_percent"})
"""Those that only need the last reading."""
_PERCENTILE = re.compile(r"(ttft|itl)_p([1-9]\d?)_seconds")


def percentile_of(metric: str) -> tuple[str, float] | None:
    """Histogram and percentile of a metric such as ttft_p95_seconds, over all replicas; None for other metrics."""
    found = _PERCENTILE.fullmatch(metric)
    return None if found is None else (found[1], float(found[2]))


def is_known(metric: str) -> bool:
    """Whether a signal may read it: any that replicas report themselves, and behind `PREFIX` those of servers."""
    name = metric.removeprefix(PREFIX)
    return name == metric or name in METRICS or percentile_of(name) is not None
