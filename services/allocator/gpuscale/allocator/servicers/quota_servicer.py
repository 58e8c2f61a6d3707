"""QuotaService on the wire: messages to values, one use case, values to messages."""

from gpuscale.allocator.queueing.model import Quota
from gpuscale.allocator.usecases.quotas import Quotas, Standing
from gpuscale.api.allocator import v1 as api
from gpuscale.common.security.auth import Context


class QuotaServicer(api.QuotaServiceServicer):
    """The RPCs. Requests have been validated against the contract and callers authenticated before they come here."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    async def SetQuota(self, request: api.SetQuotaRequest, context: Context) -> api.SetQuotaResponse:
        """Set a tenant's quota."""
        return api.SetQuotaResponse(quota=_from_standing(await self._quotas.set(_to_quota(request.quota))))

    async def DeleteQuota(self, request: api.DeleteQuotaRequest, context: Context) -> api.DeleteQuotaResponse:
        """Remove a tenant's quota."""
        await self._quotas.delete(request.tenant)
        return api.DeleteQuotaResponse()

    async def ListQuotas(self, request: api.ListQuotasRequest, context: Context) -> api.ListQuotasResponse:
        """List a page of tenants."""
        found, token = self._quotas.list_quotas(page_size=request.page_size, page_token=request.page_token)
        return api.ListQuotasResponse(quotas=[_from_standing(one) for one in found], next_page_token=token)


def _to_quota(message: api.Quota) -> Quota:
    return Quota(
        tenant=message.tenant,
        gpu_milli_limit=message.gpu_milli_limit if message.HasField("gpu_milli_limit") else None,
        weight=message.weight if message.HasField("weight") else 1.0,
    )


def _from_standing(one: Standing) -> api.Quota:
    return api.Quota(
        tenant=one.quota.tenant,
        gpu_milli_limit=one.quota.gpu_milli_limit,
        weight=one.quota.weight,
        gpu_milli_held=one.gpu_milli_held,
        waiting_count=one.waiting,
    )
