"""The few calls of the Kubernetes API that the adapter makes, and what may go wrong with them.

Everything is asked of one namespace, with a time-out. What the API server does not answer, or refuses, is an
`EngineUnavailableError`; what it answers is knowledge, also that something is not there.
"""

# lightkube writes `dict` where it means dict[str, str].
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, ConfigError, KubeConfig
from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.resources.apps_v1 import Deployment, StatefulSet
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
from lightkube.resources.core_v1 import Pod as ClusterPod
from lightkube.types import PatchType

from gpuscale.autoscaler.adapters.engines.kubernetes.model import (
    ADAPTER,
    COST,
    ENDPOINT,
    REPLICA,
    STOPPING,
    Kind,
    Pod,
    Workload,
)
from gpuscale.autoscaler.adapters.engines.kubernetes.sightings import LOWEST_COST, to_pod, to_workload
from gpuscale.autoscaler.adapters.engines.model import EngineUnavailableError
from gpuscale.common import names
from gpuscale.common.errors import FailedPreconditionError

TIMEOUT = 10.0
"""Seconds that an answer may take."""
FIELD_MANAGER = "gpuscale"
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, INVALID = 400, 401, 403, 404, 409, 422


class NotAllowedError(EngineUnavailableError):
    """The adapter's account may not do what it must; the text says what."""


class RefusedError(Exception):
    """The API server understood a request and refuses it; asking again would change nothing."""


class Cluster:
    """One namespace of a cluster.

    Args:
        client: of that namespace.
        adapter: id of the adapter, by which its pods are found.
        gpu_resource: the resource that counts GPUs.
    """

    def __init__(self, client: AsyncClient, adapter: str, gpu_resource: str) -> None:
        self._client = client
        self._adapter = adapter
        self._gpu_resource = gpu_resource
        self._version = ""

    async def workload(self, kind: Kind, name: str) -> Workload:
        """A Deployment (also for `Kind.PODS`) or a StatefulSet; one that is not there has that as its problem.

        Raises:
            EngineUnavailableError: nobody knows.
        """
        stateful = kind is Kind.STATEFUL_SET
        what = f"{'StatefulSet' if stateful else 'Deployment'} {name}"
        found: Deployment | StatefulSet
        with _errors(f"read {what}"):
            try:
                if stateful:
                    found = await self._client.get(StatefulSet, name)
                else:
                    found = await self._client.get(Deployment, name)
            except ApiError as error:
                if error.status.code != NOT_FOUND:
                    raise
                return Workload(
                    kind, name, problem=f"there is no {what} in namespace {self._client.namespace}"
                )
            return to_workload(kind, found, self._adapter, self._gpu_resource)

    async def pod_template(self, deployment: str) -> Deployment:
        """A Deployment as a whole.

        Raises:
            EngineUnavailableError: nobody knows.
        """
        with _errors(f"read Deployment {deployment}"):
            return await self._client.get(Deployment, deployment)

    async def pods(self) -> list[Pod]:
        """Every pod with the label of this adapter that something of ours may have made.

        Raises:
            EngineUnavailableError: nobody knows.
        """
        with _errors("list pods"):
            answer = self._client.list(ClusterPod, labels={ADAPTER: self._adapter}, chunk_size=500)
            found = [one async for one in answer]
            self._version = answer.resourceVersion
        return [pod for one in found if (pod := to_pod(one)) is not None]

    async def changed(self, seconds: float) -> None:
        """Wait until a pod changes after the last `pods`, or for so long.

        Raises:
            EngineUnavailableError: the pods cannot be watched.
        """
        events = self._client.watch(
            ClusterPod,
            labels={ADAPTER: self._adapter},
            resource_version=self._version,
            server_timeout=int(seconds) + 1,
        )
        if not isinstance(events, AsyncGenerator):
            raise TypeError
        with _errors("watch pods"):
            async with aclosing(events):
                try:
                    async with asyncio.timeout(seconds):
                        await anext(events, None)
                except TimeoutError:
                    return

    async def check_right(self, verb: str, resource: str) -> None:
        """Check that the adapter's account may do this in the namespace.

        Raises:
            NotAllowedError: it may not.
            EngineUnavailableError: nobody knows.
        """
        asked = ResourceAttributes(verb=verb, resource=resource, namespace=self._client.namespace)
        with _errors(f"say whether {resource} may be used"):
            answer = await self._client.create(
                SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=asked))
            )
        if answer.status is None or not answer.status.allowed:
            raise NotAllowedError(
                f"the account must have the right to {verb} {resource} in namespace {self._client.namespace}"
            )

    async def mark(self, pod: Pod) -> bool:
        """Write down on a pod which replica it is, and whether it is to be ended first; False where it is gone.

        Raises:
            EngineUnavailableError: nobody knows whether that is done.
        """
        ids = names.match(names.REPLICA, pod.replica)
        patch = {
            "metadata": {
                "uid": pod.uid,  # a pod of that name that was made since is another one
                "labels": {ENDPOINT: ids["endpoint"] if ids else None},
                "annotations": {
                    REPLICA: pod.replica or None,
                    STOPPING: "true" if pod.stopping else None,
                    COST: None if pod.costly else LOWEST_COST,
                },
            }
        }
        with _errors(f"mark pod {pod.name}"):
            try:
                await self._client.patch(ClusterPod, pod.name, patch, patch_type=PatchType.MERGE)
            except ApiError as error:
                if error.status.code not in {NOT_FOUND, CONFLICT}:
                    raise
                return False
        return True

    async def scale(self, workload: Workload, replicas: int, *, dry_run: bool = False) -> bool:
        """Ask for so many pods, unless the workload was changed since it was read; False where it was.

        Raises:
            EngineUnavailableError: nobody knows whether that is done.
        """
        resource = StatefulSet.Scale if workload.kind is Kind.STATEFUL_SET else Deployment.Scale
        patch = {"metadata": {"resourceVersion": workload.version}, "spec": {"replicas": replicas}}
        with _errors(f"scale {workload.kind.value} {workload.name}"):
            try:
                await self._client.patch(
                    resource, workload.name, patch, patch_type=PatchType.MERGE, dry_run=dry_run
                )
            except ApiError as error:
                if error.status.code not in {NOT_FOUND, CONFLICT}:
                    raise
                return False
        return True

    async def create(self, pod: ClusterPod, *, dry_run: bool = False) -> None:
        """Make a pod; harmless where there is one of that name.

        Raises:
            RefusedError: the cluster does not take it.
            EngineUnavailableError: nobody knows whether that is done.
        """
        with _errors("create a pod"):
            try:
                await self._client.create(pod, dry_run=dry_run)
            except ApiError as error:
                # A webhook that denies it without saying more makes it a bad request.
                if error.status.code in {BAD_REQUEST, FORBIDDEN, INVALID}:
                    raise RefusedError(error.status.message or str(error)) from error
                if error.status.code != CONFLICT or error.status.reason != "AlreadyExists":
                    raise

    async def delete(self, pod: Pod, grace: int | None) -> None:
        """Ask a pod to end within `grace` seconds, by default its own; harmless where it is gone.

        Raises:
            EngineUnavailableError: nobody knows whether that is done.
        """
        with _errors(f"delete pod {pod.name}"):
            try:
                await self._client.delete(ClusterPod, pod.name, grace_period=grace)
            except ApiError as error:
                if error.status.code not in {NOT_FOUND, CONFLICT}:
                    raise


@asynccontextmanager
async def open_cluster(
    kubeconfig: Path | None, context: str, namespace: str, *, adapter: str, gpu_resource: str
) -> AsyncGenerator[Cluster]:
    """A cluster, by a kubeconfig file or, without one, as a pod inside of it.

    Raises:
        FailedPreconditionError: the file, or the pod's service account, cannot be used.
    """
    try:
        if kubeconfig is None:
            found = KubeConfig.from_service_account().get()
        else:
            found = KubeConfig.from_file(kubeconfig).get(context or None)
        client = AsyncClient(
            found,
            namespace=namespace or None,
            timeout=httpx2.Timeout(TIMEOUT),
            field_manager=FIELD_MANAGER,
            trust_env=False,
        )
    except (ConfigError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        where = f"{kubeconfig}" if kubeconfig else "the pod's service account"
        raise FailedPreconditionError(
            f"cannot use {where} to reach the cluster: {error}", reason="KUBECONFIG_UNUSABLE"
        ) from error
    async with client:
        yield Cluster(client, adapter, gpu_resource)


@contextmanager
def _errors(doing: str) -> Generator[None]:
    """Whatever is wrong with an answer means that nobody knows."""
    try:
        yield
    except ApiError as error:
        why = f"the cluster refuses to {doing}: {error.status.message}"
        if error.status.code in {UNAUTHORIZED, FORBIDDEN}:
            raise NotAllowedError(why) from error
        raise EngineUnavailableError(why) from error
    except (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        msgspec.MsgspecError,
        ConfigError,
        OSError,
        ValueError,
    ) as error:
        raise EngineUnavailableError(f"cannot {doing}: {str(error) or type(error).__name__}") from error
