"""Use cases of quotas: set, delete, get, list. They are stored on disk and read from memory."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuscale.allocator.queueing.model import MonthStanding, Quota
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.state.operators import QuotaStore
from gpuscale.common.errors import NotFoundError, expect_etag
from gpuscale.common.names import quota_name
from gpuscale.common.runtime.tasks import uninterrupted


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant: its quota, the thousandths of GPUs it holds, its waiting requests, and its month."""

    quota: Quota
    gpu_milli_held: int
    waiting: int
    gpu_milli_past: float | None
    month: MonthStanding


@dataclass(eq=False)
class Quotas:
    """Quotas by tenant.

    Of each tenant, `held` has the thousandths of GPUs it holds, `waiting` the number of waiting requests, `past` its past use (see
    `FairShare`), and `month` its standing.
    """

    store: QuotaStore
    quotas: dict[str, Quota]
    changes: Changes
    held: Mapping[str, int]
    waiting: Callable[[], Mapping[str, int]]
    past: Mapping[str, float]
    month: Callable[[str], MonthStanding]

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @uninterrupted
    async def set(self, tenant: str, change: Callable[[Quota], Quota], *, etag: str = "") -> Standing:
        """Set a quota to `change` of it, which ends nothing; AbortedError (ETAG_MISMATCH) if its etag differs."""
        async with self._turn:
            before = self.quotas.get(tenant) or Quota(tenant)
            expect_etag(quota_name(tenant), etag, etag_of(before))
            quota = change(before)
            await self.store.save(quota)
            self.quotas[tenant] = quota
        self.changes.room(())
        return self._standing(tenant, self.waiting())

    @uninterrupted
    async def delete(self, tenant: str, *, etag: str = "", allow_missing: bool = False) -> None:
        """Remove a quota; NotFoundError if there is none, unless `allow_missing`, AbortedError (ETAG_MISMATCH)."""
        async with self._turn:
            before = self.quotas.get(tenant)
            if before is None and allow_missing:
                return
            if before is None:
                raise NotFoundError(f"tenant {tenant} has no quota", metadata={"name": quota_name(tenant)})
            expect_etag(quota_name(tenant), etag, etag_of(before))
            await self.store.remove(tenant)
            self.quotas.pop(tenant, None)
        self.changes.room(())

    def get(self, tenant: str) -> Standing:
        """A tenant of `every`. Raises NotFoundError if there is none."""
        waiting = self.waiting()
        if not any(tenant in one for one in (self.quotas, self.held, waiting, self.past)):
            message = f"tenant {tenant} has no quota, holds nothing and waits for nothing"
            raise NotFoundError(message, metadata={"name": quota_name(tenant)})
        return self._standing(tenant, waiting)

    def every(self) -> list[Standing]:
        """The tenants that have a quota, hold or wait for something, or have past use that counts; by name."""
        waiting = self.waiting()
        tenants = sorted({*self.quotas, *self.held, *waiting, *self.past})
        return [self._standing(tenant, waiting) for tenant in tenants]

    def _standing(self, tenant: str, waiting: Mapping[str, int]) -> Standing:
        quota = self.quotas.get(tenant) or Quota(tenant)
        held, waits = self.held.get(tenant, 0), waiting.get(tenant, 0)
        return Standing(quota, held, waits, self.past.get(tenant), self.month(tenant))


def etag_of(quota: Quota) -> str:
    """A hash of the quota."""
    hours = "" if quota.gpu_hours_per_month is None else f" {quota.gpu_hours_per_month}"
    return hashlib.sha256(f"{quota.gpu_milli_limit} {quota.weight}{hours}".encode()).hexdigest()[:16]
