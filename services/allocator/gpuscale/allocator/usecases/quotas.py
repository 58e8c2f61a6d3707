"""Use cases of quotas: set, delete, list. They are kept on disk and read from memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuscale.allocator.queueing.model import Quota
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.state.cordons_and_quotas import QuotaStore
from gpuscale.common.errors import NotFoundError
from gpuscale.common.runtime.tasks import uninterrupted


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant: its quota, the thousandths of GPUs that it holds, and how many requests of it wait."""

    quota: Quota
    gpu_milli_held: int
    waiting: int


@dataclass(eq=False)
class Quotas:
    """The quotas of tenants.

    Args:
        quotas: those that are on disk, by tenant; they follow what is set here.
        held: thousandths of GPUs by the tenants that hold any.
        waiting: how many requests of each tenant wait.
    """

    store: QuotaStore
    quotas: dict[str, Quota]
    changes: Changes
    held: Mapping[str, int]
    waiting: Callable[[], Mapping[str, int]]

    @uninterrupted
    async def set(self, quota: Quota) -> Standing:
        """Set a quota, in place of what the tenant had; a limit below what it holds ends nothing.

        Raises:
            UnavailableError: it cannot be written; nothing has changed.
        """
        await self.store.save(quota)
        self.quotas[quota.tenant] = quota
        self.changes.room(())
        return self._standing(quota.tenant, self.waiting())

    @uninterrupted
    async def delete(self, tenant: str) -> None:
        """Remove a quota.

        Raises:
            NotFoundError: the tenant has none.
            UnavailableError: it cannot be written; nothing has changed.
        """
        if tenant not in self.quotas:
            raise NotFoundError(f"tenant {tenant} has no quota", metadata={"name": f"quotas/{tenant}"})
        await self.store.remove(tenant)
        self.quotas.pop(tenant, None)
        self.changes.room(())

    def every(self) -> list[Standing]:
        """The tenants that have a quota, hold or wait for something, by name."""
        waiting = self.waiting()
        tenants = sorted({*self.quotas, *self.held, *waiting})
        return [self._standing(tenant, waiting) for tenant in tenants]

    def _standing(self, tenant: str, waiting: Mapping[str, int]) -> Standing:
        quota = self.quotas.get(tenant) or Quota(tenant)
        return Standing(quota, self.held.get(tenant, 0), waiting.get(tenant, 0))
