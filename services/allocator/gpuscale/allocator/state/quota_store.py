"""Quotas on disk, in the file of the allocator's state."""

from sqlalchemy import Connection, delete, select
from sqlmodel import Field

from gpuscale.allocator.queueing import model
from gpuscale.allocator.state.schema_store import Table
from gpuscale.allocator.state.sealing import sealed
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.store.schema import Prepared, Whole


class Quota(Table, table=True):
    """The quota of a tenant."""

    tenant: str = Field(primary_key=True)
    gpu_milli_limit: int | None = Field(sa_type=Whole)
    weight: float
    checksum: int = Field(default=0, sa_type=Whole)


_QUOTA = Table.metadata.tables["quota"]
_PUT = Prepared.replacing(_QUOTA)


class QuotaStore:
    """Reads and writes quotas. Every write returns once it is on disk, and raises as `Store.write` does."""

    def __init__(self, store: AllocatorStore) -> None:
        self._store = store

    async def load(self) -> list[model.Quota]:
        """Every quota."""

        def work(connection: Connection) -> list[model.Quota]:
            columns = select(_QUOTA.c.tenant, _QUOTA.c.gpu_milli_limit, _QUOTA.c.weight)
            return [model.Quota(**row) for row in connection.execute(columns).mappings()]

        return await self._store.read(work)

    async def save(self, quota: model.Quota) -> None:
        """Write a quota, in place of the tenant's before."""
        row = sealed(
            {
                "tenant": quota.tenant,
                "gpu_milli_limit": quota.gpu_milli_limit,
                "weight": float(quota.weight),
            }
        )

        def work(connection: Connection) -> None:
            _PUT.run(connection, [row])

        await self._store.change(work)

    async def remove(self, tenant: str) -> None:
        """Delete the quota of a tenant, if there is one."""

        def work(connection: Connection) -> None:
            connection.execute(delete(_QUOTA).where(_QUOTA.c.tenant == tenant))

        await self._store.change(work)
