"""Rules one by one over gRPC: created, read, changed in parts, deleted, always as a part of their endpoint's spec."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.servicers import endpoint_servicer
from gpuscale.common.rpc.status import from_rpc_error
from gpuscale.common.wire import seconds
from tests.support.autoscaler_app import GREATER, TIMEOUT, Autoscaler, reason, running, scaling, step
from tests.support.waiting import eventually

UP, EXTRA = "endpoints/e/rules/up", "endpoints/e/rules/extra"


class Rules:
    """The service of rules, of an autoscaler with the endpoint `e` that has the rules `up` and `down`."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self.autoscaler = autoscaler
        self.stub = api.RuleServiceStub(autoscaler.channel)

    async def create(self, rule: api.Rule, **fields: Any) -> api.EndpointRule:
        request = api.CreateRuleRequest(parent="endpoints/e", rule=rule, **fields)
        return (await self.stub.CreateRule(request, timeout=TIMEOUT)).rule

    async def get(self, name: str = UP) -> api.EndpointRule:
        return (await self.stub.GetRule(api.GetRuleRequest(name=name), timeout=TIMEOUT)).rule

    async def list(self, **fields: Any) -> list[str]:
        request = api.ListRulesRequest(**fields)
        return [one.name for one in (await self.stub.ListRules(request, timeout=TIMEOUT)).rules]

    async def update(self, rule: api.Rule, *paths: str, **fields: Any) -> api.EndpointRule:
        mask = FieldMask(paths=paths) if paths else None
        request = api.UpdateRuleRequest(name=UP, rule=rule, update_mask=mask, **fields)
        return (await self.stub.UpdateRule(request, timeout=TIMEOUT)).rule

    async def delete(self, name: str = UP) -> None:
        await self.stub.DeleteRule(api.DeleteRuleRequest(name=name), timeout=TIMEOUT)


@pytest.fixture
async def rules(tmp_path: Path) -> AsyncIterator[Rules]:
    async with running(tmp_path, "127.0.0.1:1") as autoscaler:
        await autoscaler.create(scaling())
        yield Rules(autoscaler)


def extra(**fields: Any) -> api.Rule:
    return step("extra", GREATER, 50, 2, **fields)


async def refused(call: object) -> tuple[str, list[str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    violations = getattr(from_rpc_error(caught.value), "violations", ())
    return reason(caught.value)[0], [one.field for one in violations]


async def test_a_rule_is_created_in_its_endpoint_the_same_again_is_the_same_and_one_is_deleted(
    rules: Rules,
) -> None:
    before = (await rules.autoscaler.get()).etag
    made = await rules.create(extra(priority=-1))
    assert made.name == EXTRA
    endpoint = await rules.autoscaler.get()
    assert made.etag == endpoint.etag != before
    assert [one.id for one in endpoint.spec.rules] == ["up", "down", "extra"]
    assert (await rules.create(extra(priority=-1))).etag == made.etag
    assert await refused(rules.create(extra(priority=5))) == ("ALREADY_EXISTS", [])
    await rules.delete()
    assert [one.id for one in (await rules.autoscaler.get()).spec.rules] == ["down", "extra"]
    for gone in (rules.delete(), rules.get()):
        assert await refused(gone) == ("NOT_FOUND", [])


async def test_a_request_id_is_answered_the_same_whatever_became_of_the_rule(rules: Rules) -> None:
    key = str(uuid.uuid4())
    made = await rules.create(extra(), request_id=key)
    await rules.delete(EXTRA)
    assert await rules.create(extra(), request_id=key) == made
    with pytest.raises(grpc.aio.AioRpcError):
        await rules.get(EXTRA)
    up = (await rules.get()).rule  # which is there already
    same = str(uuid.uuid4())
    assert await rules.create(up, request_id=same) == await rules.create(up, request_id=same)
    for reused in (key, same):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rules.create(extra(disabled=True), request_id=reused)
        assert reason(caught.value) == ("ALREADY_EXISTS", "REQUEST_ID_REUSED")


async def test_rules_are_listed_in_the_order_in_which_they_are_read_and_filtered(rules: Rules) -> None:
    await rules.create(extra(priority=-1, disabled=True))
    await rules.create(
        api.Rule(
            id="night", schedule=api.ScheduleRule(periods=[{"start": "20:00", "end": "06:00", "replicas": 2}])
        )
    )
    down, night = "endpoints/e/rules/down", "endpoints/e/rules/night"
    assert await rules.list() == [EXTRA, down, night, UP]
    assert await rules.list(parent="endpoints/other") == []
    assert await rules.list(kind="schedule") == [night]
    assert await rules.list(signal="depth") == [EXTRA, down, UP]
    assert await rules.list(disabled=True) == [EXTRA]
    assert await rules.list(disabled=False, page_size=2) == [down, night]
    for number in range(9):
        await rules.autoscaler.create(scaling(name=f"e-{number}"))
    every, found, asked = await rules.list(), list[str](), api.ListRulesRequest(page_size=3)
    looked_at = patch.object(endpoint_servicer, "_views", side_effect=endpoint_servicer._views)
    while not found or asked.page_token:
        with looked_at as looks:
            page = await rules.stub.ListRules(asked, timeout=TIMEOUT)
        assert looks.call_count <= 3, "of ten endpoints"
        found, asked.page_token = found + [one.name for one in page.rules], page.next_page_token
    assert (found, len(every)) == (every, 4 + 9 * 2)


async def test_an_update_changes_what_it_names(rules: Rules) -> None:
    rule = (await rules.get()).rule
    rule.step.threshold, rule.min_replicas, rule.priority = 20, 3, 7
    changed = (await rules.update(rule, "step.threshold", "min_replicas")).rule
    assert (changed.step.threshold, changed.min_replicas, changed.priority) == (20, 3, 0)
    rule.disabled, rule.target.value = True, 9
    other = (await rules.update(rule)).rule
    assert (other.disabled, other.WhichOneof("kind")) == (True, "target")


async def test_when_a_rule_changed_the_count_is_told(rules: Rules) -> None:
    assert not (await rules.get()).HasField("since_change")
    rules.autoscaler.watchers.queues["jobs"] = (11, 0)
    await eventually(rules.get, lambda found: found.HasField("since_change"))
    assert seconds((await rules.get()).since_change) < 60


async def test_what_makes_no_sense_is_refused_with_the_field_of_the_rule(rules: Rules) -> None:
    rule = (await rules.get()).rule
    wrong = api.Rule(id="up")
    wrong.CopyFrom(rule)
    wrong.step.step = 0
    assert await refused(rules.update(wrong)) == ("INVALID_ARGUMENT", ["rule.step.step"])
    assert await refused(rules.create(extra(min_replicas=5, max_replicas=4))) == (
        "INVALID_ARGUMENT",
        ["rule.max_replicas"],
    )
    assert await refused(rules.create(api.Rule(id="none", signal="depth"))) == (
        "INVALID_ARGUMENT",
        ["rule.step"],
    )
    assert await refused(rules.update(rule, "nothing")) == ("INVALID_ARGUMENT", ["update_mask"])
    with pytest.raises(grpc.aio.AioRpcError, match=r"update_mask: id\.more is no field"):
        await rules.update(rule, "disabled", "id.more")
    renamed = api.Rule(id="other")
    renamed.MergeFrom(api.Rule(signal="depth", step=rule.step))
    assert await refused(rules.update(renamed)) == ("INVALID_ARGUMENT", ["rule.id"])
