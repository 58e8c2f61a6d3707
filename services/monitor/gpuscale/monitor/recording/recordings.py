"""All recordings that are kept. Pure: times are arguments, in seconds of the clock that samples are dated by.

A sample counts once: it is a new reading, made while the recording runs, and one interval after the one before (a
quarter early at most, for what the network does to the arrival of snapshots). What it costs does not grow with the number of
recordings that take it in.
"""

from gpuscale.common.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError
from gpuscale.monitor.model.metrics import Sample
from gpuscale.monitor.model.recordings import Order, RecordedGpu, Recording, RecordingState
from gpuscale.monitor.recording.spans import Spans

MOST_KEPT = 100


class Recordings:
    """Recordings by id, and for each GPU those that take in its samples.

    Attributes:
        nodes: ids of the nodes of these GPUs: samples of others are of no use.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._all: dict[str, Recording] = {}
        self._spans: dict[str, Spans] = {}
        self._nodes_of: dict[str, frozenset[str]] = {}
        self.nodes: frozenset[str] = frozenset()

    def all(self, now: float) -> list[Recording]:
        """Every recording, by id."""
        self._expire(now)
        return [self._all[key] for key in sorted(self._all)]

    def get(self, key: str, now: float) -> Recording:
        """A recording by its id.

        Raises:
            NotFoundError: there is none.
        """
        self._expire(now)
        found = self._all.get(key)
        if found is None:
            raise NotFoundError(f"there is no recordings/{key}", metadata={"name": f"recordings/{key}"})
        return found

    def start(self, order: Order, now: float) -> Recording:
        """Begin a recording, or return the one that this request began before.

        Raises:
            AlreadyExistsError: the id is taken, or the request id was used with other arguments.
            ResourceExhaustedError: as many recordings as are kept at most run.
        """
        self._expire(now)
        repeated = self._repeated(order)
        if repeated is not None:
            return repeated
        if order.id in self._all:
            raise AlreadyExistsError(f"there is a recordings/{order.id} already", reason="RECORDING_EXISTS")
        self._make_room()
        recording = Recording(order, now, [RecordedGpu(target) for target in order.targets])
        self.restore(recording)
        return recording

    def restore(self, recording: Recording) -> None:
        """Keep a recording as it is; one that runs goes on."""
        self._all[recording.order.id] = recording
        names = {target.name for target in recording.order.targets}
        self._nodes_of[recording.order.id] = frozenset(name.split("/")[1] for name in names)
        if recording.state is RecordingState.RUNNING:
            for gpu in recording.gpus:
                self._spans.setdefault(gpu.target.uuid.lower(), Spans()).begin(recording, gpu)
            self._note_nodes()

    def stop(self, key: str, now: float) -> Recording:
        """End a recording; one that has ended stays as it is.

        Raises:
            NotFoundError: there is none.
        """
        recording = self.get(key, now)
        if recording.state is RecordingState.RUNNING:
            _end(recording, RecordingState.STOPPED, now)
            self._note_nodes()
        return recording

    def delete(self, key: str, now: float) -> None:
        """End a recording and forget it.

        Raises:
            NotFoundError: there is none.
        """
        self._forget(self.stop(key, now))

    def add(self, uuid: str, at: float, sample: Sample) -> None:
        """Take in what was read at `at` of the GPU with that UUID, in lower case."""
        spans = self._spans.get(uuid)
        if spans is not None:
            spans.add(at, sample)
            if not spans:
                del self._spans[uuid]

    def _repeated(self, order: Order) -> Recording | None:
        for recording in self._all.values():
            if recording.order.request_id == order.request_id:
                if recording.order.fingerprint != order.fingerprint:
                    raise AlreadyExistsError(
                        "request_id was used with other arguments", reason="REQUEST_ID_REUSED"
                    )
                return recording
        return None

    def _make_room(self) -> None:
        """Forget the recording that ended first, where as many are kept as may be."""
        if len(self._all) < self._most_kept:
            return
        ended = [one for one in self._all.values() if one.ended_at is not None]
        if not ended:
            raise ResourceExhaustedError(
                f"{self._most_kept} recordings run already", reason="TOO_MANY_RECORDINGS"
            )
        oldest = min(ended, key=lambda one: one.ended_at or 0.0)
        self._forget(oldest)

    def _forget(self, recording: Recording) -> None:
        """Let go of a recording that has ended."""
        del self._all[recording.order.id], self._nodes_of[recording.order.id]
        for gpu in recording.gpus:
            gpu.leave()
            uuid = gpu.target.uuid.lower()
            spans = self._spans.get(uuid)
            if spans is not None:
                spans.tidy()
                if not spans:
                    del self._spans[uuid]

    def _expire(self, now: float) -> None:
        over = [one for one in self._running() if now > one.last_moment]
        for recording in over:
            _end(recording, RecordingState.EXPIRED, recording.last_moment)
        if over:
            self._note_nodes()

    def _running(self) -> list[Recording]:
        return [one for one in self._all.values() if one.state is RecordingState.RUNNING]

    def _note_nodes(self) -> None:
        self.nodes = frozenset().union(*(self._nodes_of[one.order.id] for one in self._running()))


def _end(recording: Recording, state: RecordingState, at: float) -> None:
    recording.state, recording.ended_at = state, at
    for gpu in recording.gpus:
        gpu.end()
