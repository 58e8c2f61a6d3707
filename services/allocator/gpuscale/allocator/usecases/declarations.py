"""Admins' declarations: use policies, notification targets and power budgets. Create, update, delete, get, list."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from gpuscale.allocator.state.policies import Declaration, PolicyStore
from gpuscale.common.errors import AlreadyExistsError, NotFoundError, expect_etag, request_id_reused
from gpuscale.common.runtime.tasks import Clock, uninterrupted

Spec = TypeVar("Spec")


@dataclass(eq=False)
class Declarations(Generic[Spec]):
    """The declarations of one collection, such as `policies`; `decode` parses a body, `changed` is called after each change.

    `decode` raises InvalidArgumentError for a body that contradicts itself.
    """

    collection: str
    store: PolicyStore
    decode: Callable[[str], Spec]
    clock: Clock
    changed: Callable[[], None] = field(default=lambda: None)
    _stored: dict[str, Declaration] = field(default_factory=dict[str, Declaration], init=False)
    _specs: dict[str, Spec] = field(default_factory=dict[str, Spec], init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def load(self) -> None:
        """Load what is on disk."""
        for one in await self.store.declared(self.collection):
            self._stored[one.id], self._specs[one.id] = one, self.decode(one.body)

    def __len__(self) -> int:
        return len(self._stored)

    def specs(self) -> Iterator[tuple[str, str, Spec]]:
        """(id, etag, value) of each, by id."""
        return ((key, self._stored[key].etag, self._specs[key]) for key in sorted(self._stored))

    def spec(self, key: str) -> Spec | None:
        """The value of one; None if there is none."""
        return self._specs.get(key)

    def every(self) -> list[Declaration]:
        """All, by id."""
        return [self._stored[key] for key in sorted(self._stored)]

    def get(self, key: str, etag: str = "") -> Declaration:
        """Look one up. Raises NotFoundError, or AbortedError (ETAG_MISMATCH) if `etag` is given and differs."""
        name = f"{self.collection}/{key}"
        found = NotFoundError.unless(self._stored.get(key), name)
        expect_etag(name, etag, found.etag)
        return found

    @uninterrupted
    async def create(self, key: str, body: str, *, request_id: str, validate_only: bool) -> Declaration:
        """Add one, or return what this request created. Raises AlreadyExistsError if the name or the request id is in use."""
        async with self._turn:
            etag, name = etag_of(body), f"{self.collection}/{key}"
            fingerprint = etag_of(f"{key} {body}")
            known = next((one for one in self._stored.values() if one.request_id == request_id), None)
            if known is not None and known.fingerprint == fingerprint:
                return known
            if known is not None:
                raise request_id_reused(request_id)
            if key in self._stored:
                raise AlreadyExistsError(f"{name} exists", metadata={"name": name})
            one = Declaration(key, body, etag, self.clock.wall().timestamp(), request_id, fingerprint)
            return await self._put(one, validate_only=validate_only)

    @uninterrupted
    async def update(
        self, key: str, change: Callable[[str], str], *, etag: str, validate_only: bool
    ) -> Declaration:
        """Replace the body of one by `change` of it. Raises like `get`."""
        async with self._turn:
            before = self.get(key, etag)
            body = change(before.body)
            after = replace(before, body=body, etag=etag_of(body))
            return await self._put(after, validate_only=validate_only)

    @uninterrupted
    async def delete(self, key: str, *, etag: str) -> None:
        """Remove one. Raises like `get`."""
        async with self._turn:
            self.get(key, etag)
            await self.store.withdraw(self.collection, key)
            del self._stored[key], self._specs[key]
        self.changed()

    async def _put(self, one: Declaration, *, validate_only: bool) -> Declaration:
        spec = self.decode(one.body)
        if validate_only or one == self._stored.get(one.id):
            return one
        await self.store.declare(self.collection, one)
        self._stored[one.id], self._specs[one.id] = one, spec
        self.changed()
        return one


def etag_of(body: str) -> str:
    """A hash of a body."""
    return hashlib.sha256(body.encode()).hexdigest()[:16]
