"""What is checked before the adapter starts: each template, by a dry run of what it will be used for."""

from collections.abc import Mapping

from gpuscale.autoscaler.adapters.engines.kubernetes.bare import BarePods
from gpuscale.autoscaler.adapters.engines.kubernetes.cluster import Cluster, NotAllowedError
from gpuscale.autoscaler.adapters.engines.kubernetes.model import Kind, Workload
from gpuscale.autoscaler.adapters.engines.kubernetes.template import KubernetesTemplate
from gpuscale.autoscaler.adapters.engines.model import EngineUnavailableError
from gpuscale.autoscaler.adapters.templates import (
    BUILTIN,
    LaunchRefusedError,
    Placeholder,
    ReplicaOrder,
)
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger

_log = get_logger(__name__)


async def check_templates(
    cluster: Cluster, templates: Mapping[str, KubernetesTemplate], bare: BarePods
) -> Mapping[str, Workload]:
    """Find out, without changing anything, whether every template can be used.

    Returns:
        The workloads by template; none where the cluster does not answer: it may do so later.

    Raises:
        FailedPreconditionError: a template, or a right of the adapter's account, is not as it must be.
    """
    found: dict[str, Workload] = {}
    name = ""
    try:
        await cluster.pods()
        await cluster.check_right("watch", "pods")
        await cluster.check_right("patch", "pods")
        for name, template in sorted(templates.items()):
            found[name] = await _check(cluster, template, bare)
    except (NotAllowedError, LaunchRefusedError) as error:
        where = f"template {name}: " if name else ""
        raise FailedPreconditionError(f"{where}{error}", reason="TEMPLATE_UNUSABLE") from error
    except EngineUnavailableError as error:
        _log.warning("templates are not checked, the cluster does not answer", why=str(error))
        return {}
    return found


async def _check(cluster: Cluster, template: KubernetesTemplate, bare: BarePods) -> Workload:
    workload = await cluster.workload(template.kind, template.workload)
    if workload.problem:
        raise LaunchRefusedError(workload.problem)
    if template.kind is Kind.PODS:
        await cluster.check_right("delete", "pods")
        await bare.start(template, _sample(template), dry_run=True)
        return workload
    await cluster.scale(workload, workload.replicas, dry_run=True)
    return workload


def _sample(template: KubernetesTemplate) -> ReplicaOrder:
    """An order that fills every placeholder."""
    used = {part.name for one in template.arguments for part in one if isinstance(part, Placeholder)}
    parameters = dict.fromkeys(sorted(used - BUILTIN), "0")
    return ReplicaOrder("endpoints/dry-run/replicas/dry-run", "endpoints/dry-run", parameters, gpu_count=1)
