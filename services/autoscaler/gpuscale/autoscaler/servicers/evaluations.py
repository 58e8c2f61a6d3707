"""Evaluations that are only asked about: nothing is stored, and nothing is changed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import Outcome, compose
from gpuscale.autoscaler.domain.model import Endpoint, EndpointSpec
from gpuscale.autoscaler.domain.planning import set_states, startup_seconds
from gpuscale.autoscaler.domain.remembered import Remembered, Samples
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState
from gpuscale.autoscaler.domain.stating import Live, Stated, question, replaced_spec
from gpuscale.autoscaler.domain.validate import violations
from gpuscale.autoscaler.domain.whatif import answer
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.servicers import endpoint_changes
from gpuscale.autoscaler.signals.sources import SignalSources
from gpuscale.autoscaler.state import replica_store, store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.translate_evaluate import response_to_wire
from gpuscale.autoscaler.wire.translate_state import decision_body, sample_to_wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.store.store import Store


class Evaluations:
    """Asks the engine on behalf of users.

    Args:
        store: the autoscaler's store.
        clock: what ages are counted on.
        sources: what signals show.
        hub: tells which adapters are heard of.
        past: what is remembered of an endpoint, by its id; nothing before its first evaluation.
        samples: what each signal of an endpoint showed at its evaluations, by the id of the endpoint.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        sources: SignalSources,
        hub: AdapterHub,
        past: Callable[[str], Remembered],
        samples: Callable[[str], Mapping[str, Samples]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._sources = sources
        self._hub = hub
        self._past = past
        self._samples = samples

    async def signals(self, endpoint_id: str) -> api.QuerySignalsResponse:
        """What the signals of an endpoint showed.

        Raises:
            NotFoundError: no such endpoint.
        """
        await self._store.read(partial(endpoint_changes.find, endpoint_id=endpoint_id))
        return api.QuerySignalsResponse(
            signals=[
                api.SignalHistory(signal=signal, samples=[sample_to_wire(one) for one in shown])
                for signal, shown in self._samples(endpoint_id).items()
            ]
        )

    async def evaluate(
        self,
        endpoint_id: str,
        spec: EndpointSpec | None,
        state: Callable[[EndpointSpec, float], Stated],
    ) -> api.EvaluateResponse:
        """What an evaluation would come to now.

        Args:
            endpoint_id: whose live values are taken; empty for an endpoint that does not exist.
            spec: in place of the endpoint's own; None for that.
            state: what is stated, for a spec and a moment.

        Raises:
            NotFoundError: no such endpoint.
            InvalidArgumentError: neither an endpoint nor a spec, or a spec that contradicts itself.
        """
        if spec is not None and (found := violations(spec, "spec")):
            raise InvalidArgumentError(f"{found[0].field} {found[0].description}", violations=found)
        at = Moment(self._clock.now(), self._clock.wall())
        endpoint, live, granted = await self._live(endpoint_id, spec, at)
        asked = question(endpoint.spec, state(endpoint.spec, at.now), live, at)
        # Every alternative is an evaluation of its own: off the loop, for a spec may have many rules.
        found_answer = await asyncio.to_thread(answer, asked)
        decision = compose(endpoint, found_answer.result.evaluation, Outcome(granted))
        return response_to_wire(found_answer, decision_body(decision))

    async def _live(
        self, endpoint_id: str, spec: EndpointSpec | None, at: Moment
    ) -> tuple[Endpoint, Live, int]:
        """The endpoint with the spec to evaluate, what holds of it now, and the replicas that have their GPUs."""
        if not endpoint_id:
            if spec is None:
                raise InvalidArgumentError("name must be set, or spec", field="name")
            made = Endpoint("", spec, "", spec.min_replicas, at.wall, at.wall)
            return made, Live(spec.min_replicas, spec.min_replicas), spec.min_replicas
        endpoint, kept, changes = await self._store.read(partial(_found, endpoint_id=endpoint_id))
        rows = [one for one in kept if not one.ended]
        samples = self._sources.sample(endpoint, rows)
        live = Live(
            before=endpoint.desired,
            ready=sum(one.state is ReplicaState.READY for one in rows),
            unknown=sum(1 for one in rows if one.adapter and not self._hub.live(one.adapter)),
            samples=samples,
            past=self._past(endpoint_id).with_samples(endpoint.spec, samples),
            last_changes=changes,
            startup=startup_seconds(kept, at),
            gpu_limit=self._gpu_limit(spec or endpoint.spec, rows),
            sets=set_states(endpoint, kept, at.now, self._sources.busy(endpoint)),
        )
        granted = sum(one.granted for one in rows)
        if spec is None:
            return endpoint, live, granted
        changed = Endpoint(endpoint_id, spec, endpoint.etag, endpoint.desired, at.wall, at.wall)
        return changed, replaced_spec(endpoint.spec, spec, live), granted

    def _gpu_limit(self, spec: EndpointSpec, rows: Sequence[Replica]) -> int | None:
        room = self._sources.more(spec, self._hub.facts())
        return None if room is None else sum(one.granted for one in rows) + room


def _found(connection: Connection, endpoint_id: str) -> tuple[Endpoint, list[Replica], dict[str, float]]:
    """The endpoint, its replicas with those that have ended, and when its rules changed the count.

    Raises:
        NotFoundError: no such endpoint.
    """
    endpoint = endpoint_changes.find(connection, endpoint_id)
    kept = replica_store.replicas(connection, endpoint_id, show_ended=True)
    return endpoint, list(kept), store.rule_changes(connection, endpoint_id)
