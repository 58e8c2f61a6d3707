"""Use cases of quotas: set, delete, look up, list. They are kept on disk and read from memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuscale.allocator.queueing.model import Quota
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.state.cordons_and_quotas import QuotaStore
from gpuscale.common.errors import NotFoundError
from gpuscale.common.runtime.tasks import uninterrupted
from gpuscale.common.wire import page


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant: its quota, the thousandths of GPUs that it holds, and how many requests of it wait."""

    quota: Quota
    gpu_milli_held: int
    waiting: int


class Quotas:
    """The quotas of tenants.

    Args:
        quotas: those that are on disk, by tenant; they follow what is set here.
        held: thousandths of GPUs by the tenants that hold any.
        waiting: how many requests of each tenant wait.
    """

    def __init__(
        self,
        store: QuotaStore,
        quotas: dict[str, Quota],
        changes: Changes,
        *,
        held: Mapping[str, int],
        waiting: Callable[[], Mapping[str, int]],
    ) -> None:
        self._store = store
        self._quotas = quotas
        self._changes = changes
        self._held = held
        self._waiting = waiting

    @uninterrupted
    async def set(self, quota: Quota) -> Standing:
        """Set a quota, in place of what the tenant had; a limit below what it holds ends nothing.

        Raises:
            UnavailableError: it cannot be written; nothing has changed.
        """
        await self._store.save(quota)
        self._quotas[quota.tenant] = quota
        self._changes.room(())
        return self._standing(quota.tenant, self._waiting())

    @uninterrupted
    async def delete(self, tenant: str) -> None:
        """Remove a quota.

        Raises:
            NotFoundError: the tenant has none.
            UnavailableError: it cannot be written; nothing has changed.
        """
        if tenant not in self._quotas:
            raise NotFoundError(
                f"tenant {tenant} has no quota", reason="QUOTA_NOT_FOUND", metadata={"tenant": tenant}
            )
        await self._store.remove(tenant)
        self._quotas.pop(tenant, None)
        self._changes.room(())

    def list_quotas(self, *, page_size: int, page_token: str) -> tuple[list[Standing], str]:
        """A page of tenants that have a quota, hold or wait for something, by name, and the token of the next page.

        Raises:
            InvalidArgumentError: the token is not one of this list.
        """
        waiting = self._waiting()
        tenants = sorted({*self._quotas, *self._held, *waiting})
        return page(
            [self._standing(tenant, waiting) for tenant in tenants],
            key=lambda one: one.quota.tenant,
            page_size=page_size,
            page_token=page_token,
        )

    def _standing(self, tenant: str, waiting: Mapping[str, int]) -> Standing:
        quota = self._quotas.get(tenant) or Quota(tenant)
        return Standing(quota, self._held.get(tenant, 0), waiting.get(tenant, 0))
