"""Which recordings take in the samples of one GPU, and which of them do so together. Pure: times are arguments.

Recordings of a GPU that took in the same sample and are to wait equally long take in the same ones from then on. They share
a span, so that a sample is counted once for all of them and not once for each.
"""

from collections import defaultdict
from collections.abc import Sequence

from gpuscale.monitor.model.metrics import Sample
from gpuscale.monitor.model.recordings import NEVER, RecordedGpu, Recording, Span

EARLY = 0.25
"""A sample may come this share of the interval, or of the agent's period if that is shorter, early."""


class Spans:
    """The recordings that take in the samples of one GPU."""

    def __init__(self) -> None:
        self._all: list[Span] = []
        self._apart = 0  # samples that were counted more than once since spans were joined last

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, recording: Recording, gpu: RecordedGpu) -> None:
        """Let a recording take in the samples of its GPU."""
        interval = recording.order.interval
        pace = interval - EARLY * min(interval, gpu.target.period)
        gpu.until = recording.last_moment
        gpu.span = Span(pace, max(recording.started_at, gpu.own.last_at + pace), gpu.until, {gpu})
        self._all.append(gpu.span)

    def add(self, at: float, sample: Sample) -> None:
        """Take in what was read at `at`."""
        due: defaultdict[float, list[Span]] = defaultdict(list)
        for span in [span for span in self._all if at >= span.due]:
            if at > span.until:
                self._release(span, at)
            if span.members:
                due[span.pace].append(span)
        for spans in due.values():
            self._take(spans, at, sample)

    def tidy(self) -> None:
        """Let go of spans that nobody has part in."""
        self._all = [span for span in self._all if span.members]

    def _take(self, spans: Sequence[Span], at: float, sample: Sample) -> None:
        """Let spans of one pace take in a sample, and join them once counting each has cost as much as joining will."""
        new = [span for span in spans if not span.figures.sample_count]
        if len(new) > 1:
            spans = [*(span for span in spans if span.figures.sample_count), self._joined(new)]
        for span in spans:
            span.due = at + span.pace
            span.figures.add(at, sample)
        self._apart += len(spans) - 1
        if len(spans) > 1 and self._apart >= sum(len(span.members) for span in spans):
            self._joined(spans)
            self._apart = 0

    def _joined(self, spans: Sequence[Span]) -> Span:
        """One span in place of these, which are due at the same time."""
        members = {member for span in spans for member in span.members}
        until = min(member.until for member in members)
        joined = Span(spans[0].pace, spans[0].due, until, members)
        for member in members:
            member.leave()
            member.span = joined
        self.tidy()
        self._all.append(joined)
        return joined

    def _release(self, span: Span, at: float) -> None:
        """Let those go that take in nothing that was read at `at`."""
        for member in [member for member in span.members if member.until < at]:
            member.leave()
        span.until = min((member.until for member in span.members), default=NEVER)
        self.tidy()
