"""What users do with single rules of an endpoint: every change is one of the endpoint's spec."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from gpuscale.autoscaler.domain.model import Endpoint, EndpointSpec
from gpuscale.autoscaler.domain.policies.apply import in_order
from gpuscale.autoscaler.domain.rules import Rule
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.autoscaler.servicers import endpoint_changes
from gpuscale.autoscaler.servicers.endpoints import Endpoints
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gpuscale.common.names import rule_name
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.store.store import Store
from gpuscale.common.wire import page

_PRIORITIES = 1 << 31


@dataclass(frozen=True, slots=True)
class RuleView:
    """A rule with its endpoint, that endpoint's etag, and seconds since it changed the count (None: never)."""

    endpoint: str
    rule: Rule
    etag: str
    since_change: float | None = None


class EndpointRules:
    """The rules of all endpoints."""

    def __init__(self, endpoints: Endpoints, store: Store, clock: Clock) -> None:
        self._endpoints = endpoints
        self._store = store
        self._clock = clock

    async def create(self, endpoint: str, rule: Rule, *, etag: str, validate_only: bool) -> RuleView:
        """Add a rule; the same again changes nothing.

        Raises:
            AlreadyExistsError: another rule has its id.
            InvalidArgumentError: it contradicts itself or others.
            NotFoundError, AbortedError, FailedPreconditionError: as `Endpoints.update`.
        """

        def added(spec: EndpointSpec) -> EndpointSpec:
            known = next((one for one in spec.rules if one.id == rule.id), None)
            if known is not None and known != rule:
                name = rule_name(endpoint, rule.id)
                raise AlreadyExistsError(f"{name} exists", metadata={"name": name})
            return spec if known else replace(spec, rules=(*spec.rules, rule))

        return await self._change(endpoint, rule.id, added, etag=etag, validate_only=validate_only)

    async def update(
        self, endpoint: str, rule_id: str, change: Callable[[Rule], Rule], *, etag: str, validate_only: bool
    ) -> RuleView:
        """Replace a rule by `change` of it.

        Raises:
            NotFoundError: no such endpoint or rule.
            InvalidArgumentError: the new rule contradicts itself or others.
            AbortedError, FailedPreconditionError: as `Endpoints.update`.
        """

        def changed(spec: EndpointSpec) -> EndpointSpec:
            new = change(_rule(endpoint, spec, rule_id))
            return replace(spec, rules=tuple(new if one.id == rule_id else one for one in spec.rules))

        return await self._change(endpoint, rule_id, changed, etag=etag, validate_only=validate_only)

    async def delete(self, endpoint: str, rule_id: str, *, etag: str) -> None:
        """Take a rule away.

        Raises:
            NotFoundError: no such endpoint or rule.
            AbortedError, FailedPreconditionError: as `Endpoints.update`.
        """

        def without(spec: EndpointSpec) -> EndpointSpec:
            gone = _rule(endpoint, spec, rule_id)
            return replace(spec, rules=tuple(one for one in spec.rules if one is not gone))

        await self._endpoints.update(endpoint, without, etag=etag, validate_only=False)

    async def get(self, endpoint: str, rule_id: str) -> RuleView:
        """One rule.

        Raises:
            NotFoundError: no such endpoint or rule.
        """
        found = await self._store.read(partial(endpoint_changes.find, endpoint_id=endpoint))
        _rule(endpoint, found.spec, rule_id)
        [view] = await self._views([found], lambda rule: rule.id == rule_id)
        return view

    async def list(
        self, endpoint: str, wanted: Callable[[Rule], bool], page_size: int, page_token: str
    ) -> tuple[Sequence[RuleView], str]:
        """A page of the rules that are wanted, of one endpoint or of all, in the order in which they are read.

        Raises:
            InvalidArgumentError: the token is not one of this list.
        """
        every = await self._store.read(store.endpoints)
        views = await self._views([one for one in every if endpoint in {"", one.id}], wanted)
        return page(views, key=_order, page_size=page_size, page_token=page_token)

    async def _change(
        self,
        endpoint: str,
        rule_id: str,
        change: Callable[[EndpointSpec], EndpointSpec],
        *,
        etag: str,
        validate_only: bool,
    ) -> RuleView:
        position: list[int] = []

        def noted(spec: EndpointSpec) -> EndpointSpec:
            changed = change(spec)
            position.extend(index for index, one in enumerate(changed.rules) if one.id == rule_id)
            return changed

        with _as_fields_of_the_rule(position):
            view = await self._endpoints.update(endpoint, noted, etag=etag, validate_only=validate_only)
        [found] = await self._views([view.endpoint], lambda rule: rule.id == rule_id)
        return found

    async def _views(
        self, endpoints: Iterable[Endpoint], wanted: Callable[[Rule], bool]
    ) -> Sequence[RuleView]:
        chosen = list(endpoints)

        def read(connection: Connection) -> list[dict[str, float]]:
            return [store.rule_changes(connection, one.id) for one in chosen]

        now = self._clock.now()
        return [
            RuleView(one.id, rule, one.etag, now - changes[rule.id] if rule.id in changes else None)
            for one, changes in zip(chosen, await self._store.read(read), strict=True)
            for rule in in_order(one.spec.rules)
            if wanted(rule)
        ]


def _rule(endpoint: str, spec: EndpointSpec, rule_id: str) -> Rule:
    """The rule of an id; NotFoundError where there is none."""
    for one in spec.rules:
        if one.id == rule_id:
            return one
    name = rule_name(endpoint, rule_id)
    raise NotFoundError(f"there is no {name}", metadata={"name": name})


def _order(view: RuleView) -> str:
    return f"{view.endpoint} {view.rule.priority + _PRIORITIES:010d} {view.rule.id}"


@contextmanager
def _as_fields_of_the_rule(position: Sequence[int]) -> Generator[None]:
    """Faults of the rule, told by fields of the request; those of other parts of the spec as they are."""
    try:
        yield
    except InvalidArgumentError as error:
        at = f"{SPEC}.rules[{position[0]}]" if position else SPEC
        found = [one._replace(field=one.field.replace(at, "rule", 1)) for one in error.violations]
        if not found:
            raise
        raise InvalidArgumentError(f"{found[0].field} {found[0].description}", violations=found) from error
