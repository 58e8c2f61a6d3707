"""The GPUs of a replica are asked for with the allocator's own ask: what fits, and what is reserved, with a real allocator."""

import uuid
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.replicas import ReplicaLease
from gpuscale.autoscaler.domain.spec import ReplicaTemplate
from gpuscale.autoscaler.loop.hub import Wakes
from gpuscale.autoscaler.loop.leases import Reservations
from gpuscale.autoscaler.signals.polling import room_for
from gpuscale.autoscaler.wire.specs import ask_to_wire, template_from_wire, template_to_wire
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc.channel import open_channel
from tests.support.allocator import allocator
from tests.support.autoscaler_app import endpoint, running
from tests.support.autoscaler_values import endpoint as stored_endpoint
from tests.support.autoscaler_values import replica
from tests.support.fake_fleet import FakeFleet, GpuState, gpu_message, node_message, serving
from tests.support.waiting import eventually

Ask = allocator_api.Ask
NODES = ("divided", "mute", "named", "plain")
ENDPOINT = stored_endpoint()


def fleet() -> FakeFleet:
    """Four nodes: with MIG instances, with an unknown utilization, with labels and another model, and a plain one."""
    whole = gpu_message("divided-0", state=GpuState.GPU_STATE_DIVIDED)
    parts = [gpu_message(f"divided-{index}", index, utilization=None) for index in (1, 2)]
    for part in parts:
        part.parent_uuid, part.mig_profile = whole.uuid, "1g.10gb"
    other = gpu_message("named-0")
    other.model = "NVIDIA A100-SXM4-80GB"
    named = node_message("named", other)
    named.snapshot.host.labels["pool"] = "batch"
    mute = gpu_message("mute-0", utilization=None)
    return FakeFleet(
        node_message("divided", whole, *parts),
        node_message("mute", mute),
        named,
        node_message("plain", count=1),
    )


def template(ask: Ask) -> ReplicaTemplate:
    return template_from_wire(api.ReplicaTemplate(template="worker", ask=ask))


async def granted(channel: grpc.aio.Channel, wanted: ReplicaTemplate) -> set[str]:
    """The GPUs of as many replicas as there is room for, all of which are given back."""
    reservations, held = Reservations(channel, Wakes()), set[str]()
    leases = list[ReplicaLease]()
    ask = ask_to_wire(wanted, NODES).SerializeToString()
    for _ in range(await room_for(allocator_api.CapacityServiceStub(channel), ask)):
        one = replace(replica(), request_id=str(uuid.uuid4()), template=wanted, nodes=NODES)
        grant = await reservations.reserve(one, ENDPOINT)
        assert grant is not None
        leases.append(grant.lease)
        held.update(grant.lease.gpu_uuids)
    for lease in leases:
        await reservations.release(lease)
    return held


async def test_replicas_get_only_such_gpus(tmp_path: Path) -> None:
    async with (
        serving(fleet()) as fleet_address,
        allocator(tmp_path, fleet_address) as address,
        open_channel(address) as channel,
    ):
        capacity = allocator_api.CapacityServiceStub(channel)
        await eventually(
            lambda: capacity.RankNodes(allocator_api.RankNodesRequest()),
            lambda found: len(found.nodes) == len(NODES),
            retry_on=(grpc.aio.AioRpcError,),
        )
        for ask, gpus in (
            (Ask(gpu_count=1), {"named-0", "plain-0"}),
            (Ask(gpu_count=1, allow_unknown_utilization=True), {"named-0", "plain-0", "mute-0"}),
            (Ask(gpu_count=1, mig_profile="1g.10gb"), {"divided-1", "divided-2"}),
            (Ask(gpu_count=1, models=["A100"]), {"named-0"}),
            (Ask(gpu_count=1, node_labels={"pool": "batch"}), {"named-0"}),
            (Ask(gpu_count=1, excluded_gpus=["nodes/plain/gpus/plain-0"]), {"named-0"}),
            (Ask(gpu_count=1, models=["H100"]), set[str]()),
        ):
            assert await granted(channel, template(ask)) == gpus
        nobody = replace(replica(), template=template(Ask(gpu_count=1, models=["H100"])), nodes=NODES)
        with pytest.raises(FailedPreconditionError):
            await Reservations(channel, Wakes()).reserve(nobody, ENDPOINT)


async def test_a_spec_shows_the_ask_that_it_was_given_and_keeps_it_over_a_restart(tmp_path: Path) -> None:
    ask = Ask(gpu_count=2, models=["A100"], node_labels={"pool": "batch"}, gpu_milli=500)
    wanted = endpoint()
    wanted.spec.template.ask.CopyFrom(ask)
    short = endpoint(name="short", gpus=2)
    async with running(tmp_path, "127.0.0.1:1") as autoscaler:
        await autoscaler.create(wanted)
        await autoscaler.create(short)
    async with running(tmp_path, "127.0.0.1:1") as autoscaler:
        assert (await autoscaler.get()).spec.template.ask == ask
        found = (await autoscaler.get("endpoints/short")).spec.template
        assert found.gpu_count == 2
        assert not found.HasField("ask")
        wanted.spec.template.ask.gpu_count = 0
        with pytest.raises(grpc.aio.AioRpcError, match=r"spec\.template\.ask\.gpu_count") as refused:
            await autoscaler.update(wanted)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        wanted.spec.template.ask.MergeFrom(Ask(gpu_count=2, gpu_milli=1000, gpu_memory_bytes=1))
        new = endpoint(name="new")
        new.spec.template.ask.CopyFrom(wanted.spec.template.ask)
        for dry in (False, True):
            for call in (
                autoscaler.update(wanted, validate_only=dry),
                autoscaler.create(new, validate_only=dry),
            ):
                with pytest.raises(
                    grpc.aio.AioRpcError, match=r"spec\.template\.ask\.gpu_memory_bytes is for a"
                ):
                    await call


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (api.ReplicaTemplate(gpu_count=1, ask=Ask(gpu_count=1)), "gpu_count"),
        (api.ReplicaTemplate(min_memory_bytes=0, ask=Ask(gpu_count=1)), "min_memory_bytes"),
        (api.ReplicaTemplate(max_utilization_percent=9, ask=Ask(gpu_count=1)), "max_utilization_percent"),
        (api.ReplicaTemplate(ask=Ask(gpu_count=1, member_count=2)), "ask.member_count"),
        (api.ReplicaTemplate(ask=Ask(gpu_count=1, nodes=["nodes/plain"])), "ask.nodes"),
        (api.ReplicaTemplate(ask=Ask(gpu_count=1, gpus=["nodes/plain/gpus/plain-0"])), "ask.gpus"),
        (api.ReplicaTemplate(ask=Ask(gpu_count=1, excluded_nodes=["nodes/plain"])), "ask.excluded_nodes"),
        (api.ReplicaTemplate(ask=Ask(gpu_count=1, gang_strategy=1)), "ask.gang_strategy"),
    ],
)
def test_what_no_replica_can_ask_is_refused_by_name(wire: api.ReplicaTemplate, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        template_from_wire(wire)
    assert [one.field for one in refused.value.violations] == [f"endpoint.spec.template.{field}"]


REFUSED = {"member_count", "gang_strategy", "nodes", "excluded_nodes", "gpus"}
REST = Ask(
    gpu_count=2, min_memory_bytes=1, max_utilization_percent=1, allow_unknown_utilization=True, gpu_milli=500,
    gpu_memory_bytes=1, mig_profile="a", models=["a"], cpu_milli=1, host_memory_bytes=1, excluded_gpus=["a"],
    node_labels={"a": "b"}, apart_from={"a": "b"}, gpu_set=1, policy=1, weights={}, power_limit_watts=1,
)  # fmt: skip


def test_every_other_part_of_an_ask_reaches_the_allocator() -> None:
    assert {one.name for one, _ in REST.ListFields()} | REFUSED == {*Ask.DESCRIPTOR.fields_by_name}
    wire = api.ReplicaTemplate(ask=REST)
    made = template_from_wire(wire)
    assert (template_to_wire(made), ask_to_wire(made)) == (wire, REST)


def test_the_short_fields_are_the_same_ask() -> None:
    wire = api.ReplicaTemplate(gpu_count=2, min_memory_bytes=5, max_utilization_percent=7)
    assert ask_to_wire(template_from_wire(wire), ["n"]) == Ask(
        gpu_count=2, min_memory_bytes=5, max_utilization_percent=7, nodes=["nodes/n"]
    )
