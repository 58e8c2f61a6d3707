"""A server of a language model with continuous batching, in virtual time, and what it shows on /metrics by vLLM's names.

Each step gives every request of the batch a token, and takes `step_base` + `step_each` x batch + `prefill_token` x the tokens of
the prompts that joined. Orders of magnitude of a model of 8 billion parameters on one large GPU.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuscale.autoscaler.domain.serving import Latencies, ServerReading

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Those of vLLM."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: when it comes, and tokens of its prompt and of its answer."""

    at: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Speed:
    step_base: float = 0.012
    step_each: float = 0.0011
    prefill_token: float = 0.00006
    batch: int = 64
    kv_tokens: int = 60_000

    def step(self, batch: int, prompts: int) -> float:
        """Seconds of a step."""
        return self.step_base + self.step_each * batch + self.prefill_token * prompts


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.buckets[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def latencies(self) -> Latencies:
        counts, seen = [], 0.0
        for one in self.buckets:
            seen += one
            counts.append(seen)
        return Latencies(self.bounds, tuple(counts))


@dataclass(slots=True)
class Served:
    """What became of a request: time to its first token, and the mean time between its tokens; None while it is not known."""

    ask: Ask
    ttft: float | None = None
    itl: float | None = None
    _first: float = field(default=0.0, repr=False)


class LlmServer:
    """One server that began at `now`."""

    def __init__(self, speed: Speed, now: float = 0.0) -> None:
        self.speed = speed
        self.now = now
        self.waiting: deque[Served] = deque()
        self._running: list[tuple[int, int, Served]] = []  # by the step at which the answer is complete
        self._steps = self._numbers = 0
        self._kv = 0
        self._prompt_tokens = self._answer_tokens = 0
        self._ttft, self._itl = _Histogram(TTFT_BOUNDS), _Histogram(ITL_BOUNDS)

    @property
    def load(self) -> int:
        """Requests that it has, running and waiting."""
        return len(self._running) + len(self.waiting)

    def take(self, ask: Ask) -> Served:
        """A request comes, at its time."""
        self.advance(ask.at)
        one = Served(ask)
        self.waiting.append(one)
        return one

    def advance(self, until: float) -> None:
        """Take every step that is over by `until`; one that is under way goes on."""
        while self.now < until:
            if not self.load:
                self.now = until
                return
            self._step()

    def _step(self) -> None:
        joined: list[Served] = []
        while self.waiting and len(self._running) + len(joined) < self.speed.batch:
            ask = self.waiting[0].ask
            if self._kv + ask.prompt + ask.answer > self.speed.kv_tokens and (self._running or joined):
                break
            self._kv += ask.prompt + ask.answer
            joined.append(self.waiting.popleft())
        before = len(self._running)
        took = self.speed.step(before + len(joined), sum(one.ask.prompt for one in joined))
        self.now += took
        self._steps += 1
        if before:
            self._itl.add(took, before)
        self._answer_tokens += before + len(joined)
        for one in joined:
            self._prompt_tokens += one.ask.prompt
            one.ttft, one._first = self.now - one.ask.at, self.now
            self._ttft.add(one.ttft)
            self._numbers += 1
            heapq.heappush(self._running, (self._steps + one.ask.answer - 1, self._numbers, one))
        while self._running and self._running[0][0] <= self._steps:
            _, _, one = heapq.heappop(self._running)
            self._kv -= one.ask.prompt + one.ask.answer
            one.itl = (self.now - one._first) / max(1, one.ask.answer - 1)

    def reading(self) -> ServerReading:
        """What it shows of itself, as it is read."""
        ttft = self._ttft.latencies()
        return ServerReading(
            running=len(self._running),
            waiting=len(self.waiting),
            kv_cache_percent=min(100.0, 100 * self._kv / self.speed.kv_tokens),
            requests=ttft.counts[-1],
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._answer_tokens,
            ttft=ttft,
            itl=self._itl.latencies(),
        )

    def page(self) -> str:
        found = self.reading()
        labels = 'engine="0",model_name="m"'
        levels = {
            "num_requests_running": found.running,
            "num_requests_waiting": found.waiting,
            "kv_cache_usage_perc": (found.kv_cache_percent or 0.0) / 100,
            "prompt_tokens_total": found.prompt_tokens,
            "generation_tokens_total": found.generated_tokens,
        }
        lines = [f"vllm:{name}{{{labels}}} {value}" for name, value in levels.items()]
        lines += _page("time_to_first_token_seconds", labels, self._ttft)
        lines += _page("inter_token_latency_seconds", labels, self._itl)
        return "\n".join(lines) + "\n"


def _page(name: str, labels: str, histogram: _Histogram) -> Iterator[str]:
    found = histogram.latencies()
    yield f"# TYPE vllm:{name} histogram"
    for bound, count in zip((*found.bounds, math.inf), found.counts, strict=True):
        le = "+Inf" if bound == math.inf else f"{bound:g}"
        yield f'vllm:{name}_bucket{{{labels},le="{le}"}} {count}'
    yield f"vllm:{name}_sum{{{labels}}} {histogram.sum}"
    yield f"vllm:{name}_count{{{labels}}} {found.counts[-1]}"
