"""`gpuscalectl get`, `set` and `delete quota`: what tenants may hold, and their weights in the queue."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.change import Yes, confirm
from gpuscale.cli.console.session import session_of
from gpuscale.cli.console.several import Done, say_each
from gpuscale.cli.grammar.options import Names
from gpuscale.common.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Quota
    from gpuscale.client import Client

set_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Tenant = Annotated[str, typer.Argument(metavar="TENANT", show_default=False)]


def gpus(text: str | int) -> int:
    """A number of GPUs, such as 8 or 1.5, in thousandths; a usage error where it is none."""
    if isinstance(text, int):
        return text
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not (math.isfinite(count * 1000) and count >= 0):
        raise typer.BadParameter(f"{text!r} is not a number of GPUs; write it like 8 or 1.5")
    return round(count * 1000)


def get_quotas(context: typer.Context, tenant: Names = None) -> None:
    """Tenants: what each holds, may hold, and waits for."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.capacity import QUOTAS

    with session_of(context).connect() as client:
        found = {quota.tenant: quota for quota in resources.quotas(client)}
    for one in tenant or ():
        if one not in found:
            raise NotFoundError(f"tenant {one} has no quota and holds nothing: not found")
    output = session_of(context).output
    if tenant and len(tenant) == 1:
        output.write_one(found[tenant[0]], QUOTAS)
        return
    chosen = [found[one] for one in tenant] if tenant else list(found.values())
    output.write_list(chosen, QUOTAS)
    output.note_none(chosen)


@set_app.command("quota")
def set_quota(
    context: typer.Context,
    tenant: Tenant,
    limit: Annotated[
        int | None,
        typer.Option(
            "--gpus", parser=gpus, metavar="N", help="Most GPUs that it may hold.", show_default=False
        ),
    ] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="It may hold as many as there are.")] = False,
    weight: Annotated[
        float | None,
        typer.Option(metavar="N", help="With twice the weight it gets twice the GPUs.", show_default=False),
    ] = None,
) -> None:
    """Say what a tenant may hold, and how it weighs in the queue; what is not said stays as it is."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.views.capacity import QUOTAS

    if limit is None and weight is None and not no_limit:
        raise InvalidArgumentError("say what to set: --gpus, --no-limit or --weight")
    if limit is not None and no_limit:
        raise InvalidArgumentError("--gpus and --no-limit contradict each other")
    with session_of(context).connect() as client:
        quota = _kept(client, tenant)
        if limit is not None:
            quota.gpu_milli_limit = limit
        elif no_limit:
            quota.ClearField("gpu_milli_limit")
        if weight is not None:
            quota.weight = weight
        found = client.quotas.SetQuota(api.SetQuotaRequest(quota=quota)).quota
    session_of(context).output.write_one(found, QUOTAS)


def delete_quota(
    context: typer.Context,
    tenant: Annotated[list[str], typer.Argument(metavar="TENANT", show_default=False)],
    yes: Yes = False,
) -> None:
    """Delete the quotas of tenants: no limit, weight 1; what they hold stays."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console import resources

    def delete(client: "Client", one: str) -> Done:
        client.quotas.DeleteQuota(api.DeleteQuotaRequest(tenant=one))
        return Done(one, f"the quota of {one} is deleted", {"tenant": one})

    def check(client: "Client", one: str) -> None:
        if not any(quota.tenant == one for quota in resources.quotas(client)):
            raise NotFoundError(f"tenant {one} has no quota: not found")

    confirm(f"the quota of {', '.join(tenant)}", yes=yes)
    say_each(session_of(context), "quotas", tenant, delete, check)


def _kept(client: "Client", tenant: str) -> "Quota":
    """What is set for a tenant now, without what it holds."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console import resources

    found = next((one for one in resources.quotas(client) if one.tenant == tenant), None)
    kept = api.Quota(tenant=tenant)
    if found is not None and found.HasField("gpu_milli_limit"):
        kept.gpu_milli_limit = found.gpu_milli_limit
    if found is not None and found.HasField("weight"):
        kept.weight = found.weight
    return kept
