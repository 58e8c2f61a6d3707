"""Every RPC with bodies that look right: each reaches OK, and whatever stands in its fields, none ends in INTERNAL.

Bodies are drawn from the descriptors and their rules, and are made of what is there: names, request ids, fences. So they pass
the checks of single fields and get to the code behind them. The draws are the same in every run.
"""

from __future__ import annotations

import json
import random
import re
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.common.security.certificate_authority import make_authority, make_request
from tests.contract.descriptors import FLOATS, Rpc, right, rpcs, rules_of
from tests.support.up import Up

RPCS = {rpc.path.rpartition("/")[2]: rpc for rpc in rpcs()}
DRAWS = 12
"""Bodies that are drawn for an RPC: half of them anew, half as one that is right with parts drawn."""
TIMEOUT = 0.5
"""Seconds for a call whose answer may take its time."""
UNREACHED = {
    "AdmitWork": "admits processes that exist, on an agent with a GPU driver",
    "ResetFences": "needs a GPU of the host, on an agent with a GPU driver",
    "ClearQuarantine": "needs a GPU that the checks have quarantined",
    "ReadReplicaLog": "needs a replica, and so a template",
    "VerifyDecision": "needs a decision that can be made again",
    "GetDecision": "needs a decision",
    "GetReplica": "needs a replica, and so a template",
    "GetHealthEvent": "nothing is wrong",
    "ForgetNode": "the only node is up",
    "RenewCertificate": "needs a client certificate",
    "FollowFiles": "needs a client certificate",
    "CreateLoginCode": "needs a tokens file that takes logins",
    "Login": "needs a one-time code",
    "ForgetAdapter": "the only adapter is connected",
}
TEXTS = (
    "", "a", "x" * 1024, "é" * 100, "-" * 480 + "1", "~" * 480 + "1", "(" * 200, "((a|a)*)*b", "1 if a else " * 80 + "1",
    "[]" * 400, "a." * 100, "9" * 300, "1e999", "nan", "0", "-1", "{python}", "%s%n", "/", "..", "\u202e", "depth", "alpha",
)  # fmt: skip
NEVER = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"}
EACH = pytest.mark.parametrize("method", RPCS)


def spec(**fields: Any) -> dict[str, Any]:
    """An endpoint that starts nothing."""
    step = {"comparator": "COMPARATOR_GREATER_THAN", "threshold": 5, "step": 1}
    rule = {"id": "up", "signal": "depth", "step": step}
    signal = {"id": "depth", "pushed": {"metric": "depth"}, "maxAge": "10s"}
    made = {"maxReplicas": 4, "signals": [signal], "rules": [rule], "template": {"template": "worker"}}
    return made | fields


BACKTEST: Mapping[str, Any] = {
    "spec": {"policies": [{"name": "p", "preset": {"preset": "keda"}}]},
    "workload": {"arrivals": [1], "serviceSeconds": [1]},
}


def policy(name: str) -> dict[str, Any]:
    """A use policy that does nothing."""
    stages = [{"after": "60s", "actions": ["POLICY_ACTION_NOTE"]}]
    return {"name": name, "spec": {"condition": "USE_CONDITION_IDLE", "stages": stages}}


def budget(name: str) -> dict[str, Any]:
    """A power budget of no node that there is."""
    return {"name": name, "spec": {"watts": 900, "nodes": ["nodes/none"], "per": "node"}}


def target(name: str) -> dict[str, Any]:
    """A notification target that nothing is sent to."""
    return {"name": name, "spec": {"url": "http://192.0.2.1/"}}


class World:
    """What there is in `gpuscalectl up`, by the pattern of its names."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.names: dict[str, list[str]] = {}
        self.fences: list[int] = []
        self.request_ids: list[str] = []
        self.hours = 0

    def send(self, method: str, body: Mapping[str, Any] | Message, timeout: float = 60) -> Any:
        rpc = RPCS[method]
        message = body if isinstance(body, Message) else ParseDict(dict(body), rpc.request_class())
        raw, read = message.SerializeToString(), GetMessageClass(rpc.method.output_type).FromString
        if not rpc.server_streaming:
            return self.channel.unary_unary(rpc.path, None, read)(raw, timeout=timeout)
        if rpc.client_streaming:
            answers = self.channel.stream_stream(rpc.path, None, read)(iter([raw]), timeout=timeout)
        else:
            answers = self.channel.unary_stream(rpc.path, None, read)(raw, timeout=timeout)
        try:
            return next(iter(answers), None)
        finally:
            answers.cancel()

    def status(self, method: str, body: Mapping[str, Any] | Message, timeout: float = 60) -> str:
        """How a call ends; a stream has ended well with its first answer."""
        try:
            self.send(method, body, timeout)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code.name
        return "OK"

    def reserve(self) -> Any:
        self.request_ids.append(str(uuid.uuid4()))
        ask = {"gpuCount": 1, "gpuMilli": 10}
        body = {"requestId": self.request_ids[-1], "holder": "me", "ask": ask, "ttl": "600s"}
        made = self.send("Reserve", body).reservation
        self._made("reservations/{reservation}", made.name)
        self.fences.append(made.fence)
        return made

    def endpoint(self) -> str:
        name = f"endpoints/e-{uuid.uuid4().hex[:8]}"
        self.send(
            "CreateEndpoint", {"endpoint": {"name": name, "spec": spec()}, "requestId": str(uuid.uuid4())}
        )
        self._made("endpoints/{endpoint}/rules/{rule}", f"{name}/rules/up")
        return self._made("endpoints/{endpoint}", name)

    def recording(self) -> str:
        body = {"names": self.names["nodes/{node}/gpus/{gpu}"][:1], "requestId": str(uuid.uuid4())}
        name: str = self.send("StartRecording", body).recording.name
        return self._made("recordings/{recording}", name)

    def watcher(self) -> str:
        """Make a watcher of a broker that is away."""
        name = f"watchers/w-{uuid.uuid4().hex[:8]}"
        body = {"name": name, "spec": {"broker": "b", "queue": "jobs"}}
        self.send("CreateQueueWatcher", {"queueWatcher": body, "requestId": str(uuid.uuid4())})
        return self._made("watchers/{watcher}", name)

    def backtest(self) -> str:
        """Begin a backtest, in place of those that wait for one of chance."""
        for one in self.send("ListBacktests", {"filter": "NOT state = SUCCEEDED"}).backtests:
            self.send("DeleteBacktest", {"name": one.name})
        made: str = self.send("CreateBacktest", {**BACKTEST, "requestId": str(uuid.uuid4())}).backtest.name
        return made

    def booking(self) -> str:
        """Book a GPU for an hour that nobody has booked."""
        self.hours += 1
        start = datetime.now(UTC) + timedelta(days=30, hours=self.hours)
        booking = {"ask": {"gpuCount": 1}, "startTime": f"{start:%Y-%m-%dT%H:%M:%SZ}", "duration": "3600s"}
        body = {"booking": booking, "requestId": str(uuid.uuid4())}
        return self._made("bookings/{booking}", self.send("CreateBooking", body).booking.name)

    def policy(self) -> str:
        body = {"usePolicy": policy(f"policies/{uuid.uuid4()}"), "requestId": str(uuid.uuid4())}
        return self._made("policies/{policy}", self.send("CreateUsePolicy", body).use_policy.name)

    def budget(self) -> str:
        body = {"powerBudget": budget(f"budgets/{uuid.uuid4()}"), "requestId": str(uuid.uuid4())}
        return self._made("budgets/{budget}", self.send("CreatePowerBudget", body).power_budget.name)

    def target(self) -> str:
        body = {"notificationTarget": target(f"targets/{uuid.uuid4()}"), "requestId": str(uuid.uuid4())}
        made = self.send("CreateNotificationTarget", body)
        return self._made("targets/{target}", made.notification_target.name)

    def quota(self) -> str:
        self.send("SetQuota", {"quota": {"tenant": "t", "weight": 2}})
        return "t"

    def _made(self, pattern: str, name: str) -> str:
        self.names.setdefault(pattern, []).append(name)
        return name

    def look(self) -> None:
        nodes = self.send("ListNodes", {}).nodes
        self.names["nodes/{node}"] = [node.name for node in nodes]
        self.names["nodes/{node}/gpus/{gpu}"] = [gpu.name for node in nodes for gpu in node.snapshot.gpus]


def right_with(rpc: Rpc, body: Mapping[str, Any]) -> Any:
    """The smallest request that keeps all rules, with other values."""
    message = right(rpc.request_class)
    stated = ParseDict(dict(body), rpc.request_class())
    for field, _ in stated.ListFields():
        message.ClearField(field.name)
    message.MergeFrom(stated)
    return message


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world of its own for the module."""
    folder = tmp_path_factory.mktemp("up")
    config = folder / "up.toml"
    make_authority("test").write(folder, "ca")
    authority = f"[fleet]\nauthority_dir = {json.dumps(str(folder))}\n"
    config.write_text(f'{authority}[brokers.b]\namqp_url = "amqp://u:p@127.0.0.1:1/"\n')
    config.chmod(0o600)
    with (
        Up(folder, simulate=4, arguments=("--config", str(config))) as up,
        grpc.insecure_channel(up.address) as channel,
    ):
        yield World(channel)


Body = Mapping[str, Any]


def bodies(world: World) -> Mapping[str, Callable[[], Body]]:
    """What methods answer with OK, where the smallest right body does not name anything that is there."""

    def lease() -> Body:
        made = world.reserve()
        return {"name": made.name, "fence": made.fence}

    def held() -> Body:
        made = world.reserve()
        node, uuids = made.gpus[0].node, [gpu.uuid for gpu in made.gpus]
        return {"name": made.name, "fence": made.fence, "node": node, "gpuUuids": uuids}

    def metric() -> Body:
        name = world.endpoint()
        world.send("ReportMetrics", {"name": name, "values": [{"metric": "depth", "value": 1}]})
        return {"name": name, "metric": "depth"}

    def named(pattern: str) -> Callable[[], Body]:
        return lambda: {"name": world.names[pattern][0]}

    def fresh(make: Callable[[], str]) -> Callable[[], Body]:
        return lambda: {"name": make()}

    def keda() -> Body:
        return {"scalerMetadata": {"endpoint": world.endpoint().rpartition("/")[2]}}

    node, gpu = named("nodes/{node}"), named("nodes/{node}/gpus/{gpu}")
    watcher = {"spec": {"broker": "b", "queue": "jobs"}}
    return {
        "Backtest": lambda: {
            "policies": [{"name": "p", "spec": spec()}],
            "arrivals": [1, 2],
            "serviceSeconds": [1, 1],
        },
        "CreateBacktest": lambda: {**BACKTEST, "requestId": str(uuid.uuid4())},
        "CancelBacktest": fresh(world.backtest),
        "DeleteBacktest": fresh(world.backtest),
        "GetBacktest": fresh(world.backtest),
        "ReadBacktestReports": fresh(world.backtest),
        "BatchRelease": lambda: {"requests": [lease()]},
        "CheckLease": held,
        "CancelBooking": fresh(world.booking),
        "CreateBooking": lambda: {
            "booking": {"ask": {"gpuCount": 1}, "startTime": "2100-01-01T00:00:00Z", "duration": "60s"}
        },
        "GetBooking": fresh(world.booking),
        "CordonNode": gpu,
        "CreateEndpoint": lambda: {"endpoint": {"name": f"endpoints/{uuid.uuid4()}", "spec": spec()}},
        "CreateNotificationTarget": lambda: {"notificationTarget": target(f"targets/{uuid.uuid4()}")},
        "GetNotificationTarget": fresh(world.target),
        "UpdateNotificationTarget": lambda: {"notificationTarget": target(world.target())},
        "DeleteNotificationTarget": fresh(world.target),
        "CreateUsePolicy": lambda: {"usePolicy": policy(f"policies/{uuid.uuid4()}")},
        "GetUsePolicy": fresh(world.policy),
        "UpdateUsePolicy": lambda: {"usePolicy": policy(world.policy())},
        "DeleteUsePolicy": fresh(world.policy),
        "CreatePowerBudget": lambda: {"powerBudget": budget(f"budgets/{uuid.uuid4()}")},
        "GetPowerBudget": fresh(world.budget),
        "UpdatePowerBudget": lambda: {"powerBudget": budget(world.budget())},
        "DeletePowerBudget": fresh(world.budget),
        "TakePowerCaps": lambda: {"node": node()["name"], "gpus": [{"uuid": "GPU-1", "watts": 60}]},
        "TakeKillOrders": lambda: {"node": node()["name"]},
        "DryRunUsePolicy": lambda: {"usePolicy": policy("policies/p")},
        "CreateQueueWatcher": lambda: {"queueWatcher": {"name": f"watchers/{uuid.uuid4()}", **watcher}},
        "CreateRule": lambda: {"parent": world.endpoint(), "rule": {**spec()["rules"][0], "id": "more"}},
        "DeleteEndpoint": fresh(world.endpoint),
        "DeleteJoinToken": lambda: {"name": world.send("CreateJoinToken", {}).join_token.name},
        "DeleteQueueWatcher": fresh(world.watcher),
        "DeleteQuota": lambda: {"name": f"quotas/{world.quota()}"},
        "DeleteRecording": fresh(world.recording),
        "DeleteRule": lambda: {"name": f"{world.endpoint()}/rules/up"},
        "DrainNode": lambda: {**gpu(), "grace": "600s"},
        "Evaluate": fresh(world.endpoint),
        "GetCordon": lambda: world.send("CordonNode", gpu()) and {"name": f"{gpu()['name']}/cordon"},
        "GetQuota": lambda: {"name": f"quotas/{world.quota()}"},
        "GetAdapter": lambda: {"name": world.send("ListAdapters", {}).adapters[0].name},
        "GetEndpoint": fresh(world.endpoint),
        "GetMetric": metric,
        "GetPreset": lambda: {"name": "presets/gpuscale"},
        "GetJoinToken": lambda: {"name": world.send("CreateJoinToken", {}).join_token.name},
        "GetMetricSpec": keda,
        "GetMetrics": lambda: {"scaledObjectRef": keda()},
        "GetNode": node,
        "GetQueueWatcher": fresh(world.watcher),
        "GetRecording": fresh(world.recording),
        "GetReservation": lambda: {"name": world.reserve().name},
        "GetReservationUsage": lambda: {"name": world.reserve().name},
        "GetRule": lambda: {"name": f"{world.endpoint()}/rules/up"},
        "IsActive": keda,
        "Join": lambda: {
            "token": world.send("CreateJoinToken", {}).token,
            "node": f"n-{uuid.uuid4()}",
            "csr": b64encode(make_request()[1]).decode(),
        },
        "QuerySignals": fresh(world.endpoint),
        "ReleaseReservation": lease,
        "QueryHistory": lambda: {"names": [gpu()["name"]], "metrics": [1]},
        "QueryTrends": lambda: {"names": [gpu()["name"]], "metrics": [1]},
        "RenderPreset": lambda: {
            "wish": {"preset": "gpuscale", "watcher": "watchers/w", "template": {"template": "w"}}
        },
        "RenewReservation": lease,
        "ReportMetrics": lambda: {"name": world.endpoint(), "values": [{"metric": "depth", "value": 1}]},
        "SetReplicas": fresh(world.endpoint),
        "SetQuota": lambda: {"quota": {"name": "quotas/t", "weight": 2}},
        "StartRecording": lambda: {"names": [gpu()["name"]]},
        "StopRecording": fresh(world.recording),
        "StreamIsActive": keda,
        "StreamMetricSpec": keda,
        "UncordonNode": gpu,
        "UpdateEndpoint": lambda: {"endpoint": {"name": world.endpoint(), "spec": spec(maxReplicas=5)}},
        "UpdateQueueWatcher": lambda: {"queueWatcher": {"name": world.watcher(), **watcher}},
        "UpdateRule": lambda: {
            "name": f"{world.endpoint()}/rules/up",
            "rule": {**spec()["rules"][0], "disabled": True},
        },
    }


def drawn(kind: type[Message], world: World, dice: random.Random, depth: int = 0) -> Any:
    """A message with some of its fields set, mostly within their rules; of a oneof one at most."""
    message = right(kind)
    chosen = {oneof: dice.choice(oneof.fields).name for oneof in kind.DESCRIPTOR.oneofs}
    for field in kind.DESCRIPTOR.fields:
        of = field.containing_oneof
        if dice.random() > 0.6 / (depth + 1) or (of is not None and chosen[of] != field.name):
            continue
        put(message, field, world, dice, depth)
    return message


def put(message: Any, field: FieldDescriptor, world: World, dice: random.Random, depth: int = 0) -> None:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        if entry.fields_by_name["value"].message_type is None:
            getattr(message, field.name)[dice.choice(TEXTS)[:60] or "k"] = value(
                entry.fields_by_name["value"], world, dice, depth
            )
    elif field.is_repeated:
        items = getattr(message, field.name)
        items.extend(value(field, world, dice, depth) for _ in range(dice.randrange(4)))
    elif entry is not None:
        getattr(message, field.name).CopyFrom(value(field, world, dice, depth))
    else:
        setattr(message, field.name, value(field, world, dice, depth))


def value(field: FieldDescriptor, world: World, dice: random.Random, depth: int) -> Any:
    """A value of a field: on or between its bounds, a thing that is there, or a text that is odd."""
    rules = rules_of(field)
    low = rules.min if rules.min is not None else -1.0 if rules.above is None else rules.above + 1e-3
    high = low + 1000 if rules.max is None else rules.max
    number = dice.choice([low, high, dice.uniform(low, high), 0.0, 1.0])
    kind = field.message_type
    if kind is Duration.DESCRIPTOR or kind is Timestamp.DESCRIPTOR:
        return GetMessageClass(kind)(
            seconds=int(number), nanos=dice.choice([0, 1_000_000]) if number >= 0 else 0
        )
    if kind is Struct.DESCRIPTOR:
        made = Struct()
        made.update({dice.choice(TEXTS)[:20]: dice.choice([1.5, "x", None, [1, {"a": [{}]}]])})
        return made
    if kind is not None:
        return drawn(GetMessageClass(kind), world, dice, depth + 1)
    if field.cpp_type in FLOATS:
        return number
    if field.cpp_type == field.CPPTYPE_BOOL:
        return dice.random() < 0.5
    if field.cpp_type == field.CPPTYPE_ENUM:
        return dice.choice(field.enum_type.values).number
    if field.type == field.TYPE_BYTES:
        return dice.randbytes(dice.randrange(20))
    if field.cpp_type != field.CPPTYPE_STRING:
        return dice.choice(world.fences) if field.name == "fence" and world.fences else int(number)
    if rules.format == "uuid":
        return dice.choice([str(uuid.UUID(int=dice.getrandbits(128))), *world.request_ids[-1:]])
    known = world.names.get(rules.resource) or [name for names in world.names.values() for name in names[-1:]]
    likely = 0.9 if rules.resource else 0.4
    return dice.choice(known if known and dice.random() < likely else TEXTS)


@pytest.fixture(autouse=True)
def things(world: World) -> None:
    """Something of each kind, whatever the calls before have taken away."""
    world.send("ResumeDriver", {})
    world.look()
    for cordon in world.send("ListCordons", {}).cordons:
        world.send("UncordonNode", {"name": cordon.name})
    for quota in world.send("ListQuotas", {}).quotas:
        world.status("DeleteQuota", {"tenant": quota.tenant})
    for one in world.send("ListReservations", {}).reservations:
        world.send("ReleaseReservation", {"name": one.name, "fence": one.fence})
    eventually_now(lambda: world.reserve())
    for pattern, get, make in (
        ("endpoints/{endpoint}", "GetEndpoint", world.endpoint),
        ("watchers/{watcher}", "GetQueueWatcher", world.watcher),
        ("recordings/{recording}", "GetRecording", world.recording),
    ):
        known = world.names.get(pattern)
        if not known or world.status(get, {"name": known[-1]}) != "OK":
            make()


def eventually_now(work: Callable[[], object]) -> None:
    """Do it as soon as the GPUs are there again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            work()
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@EACH
def test_a_body_that_is_right_is_answered(world: World, method: str) -> None:
    code = world.status(method, right_with(RPCS[method], bodies(world).get(method, dict)()))
    assert (code == "OK") is (method not in UNREACHED), code


@EACH
def test_no_body_is_a_fault_of_the_server(world: World, method: str) -> None:
    rpc, dice = RPCS[method], random.Random(method)
    for draw in range(DRAWS):
        if draw % 2:
            body = drawn(rpc.request_class, world, dice)
        else:
            body = right_with(rpc, bodies(world).get(method, dict)())
            put(
                body, dice.choice(rpc.method.input_type.fields), world, dice
            ) if rpc.method.input_type.fields else None
        code = world.status(method, body, TIMEOUT)
        assert code not in NEVER, f"{code}: {body}"


MOVING = {"ListAuditEvents", "ListDecisions"}
"""Lists that grow meanwhile."""
LISTS = [one for one in RPCS if one.startswith("List") and one not in MOVING]


@pytest.mark.parametrize("method", LISTS)
def test_a_list_has_pages_an_order_and_a_filter_and_its_names_are_those_to_get(
    world: World, method: str
) -> None:
    makers = world.watcher, world.policy, world.budget, world.target, world.booking, world.recording
    for make in (*makers, world.backtest, bodies(world)["GetMetric"], bodies(world)["GetJoinToken"]) * 2:
        make()  # two of a kind, which are pages

    def listed(**fields: Any) -> tuple[list[str], str]:
        answer = world.send(method, fields)
        items = next(getattr(answer, one.name) for one in answer.DESCRIPTOR.fields if one.is_repeated)
        return [getattr(one, "name", "") for one in items], answer.next_page_token

    found, _ = listed(pageSize=1000)
    pages, token = listed(pageSize=1)
    while token and len(pages) <= len(found):
        page, token = listed(pageSize=1, pageToken=token)
        pages += page
    assert pages == found
    if any(found):
        assert listed(orderBy="name desc", pageSize=1000)[0] == sorted(found, reverse=True)
        assert listed(filter=f'name = "{found[-1]}"')[0] == [found[-1]]
    assert world.status(method, {"filter": "nonsense = 1"}) == "INVALID_ARGUMENT"
    get = RPCS.get("Get" + re.sub("ies$", "y", method.removeprefix("List")).removesuffix("s"))
    for name in found[-1:] if get and method != "ListMetrics" else ():  # a metric has another part
        [(_, got), *_] = world.send(get.method.name, {"name": name}).ListFields()
        assert got.name == name


@pytest.mark.parametrize("sign", ["-", "~", "not "])
def test_a_formula_that_is_deep_is_refused_wherever_it_is_taken(world: World, sign: str) -> None:
    rule = {"id": "f", "formula": {"expression": sign * 480 + "1"}}
    name = world.names["endpoints/{endpoint}"][-1]
    for method, body in {
        "CreateEndpoint": {"endpoint": {"name": "endpoints/deep", "spec": spec(rules=[rule])}},
        "UpdateEndpoint": {"endpoint": {"name": name, "spec": spec(rules=[rule])}},
        "CreateRule": {"parent": name, "rule": rule},
        "UpdateRule": {"name": f"{name}/rules/up", "rule": {**rule, "id": "up"}},
        "Evaluate": {"spec": spec(rules=[rule])},
        "Backtest": {
            "policies": [{"name": "p", "spec": spec(rules=[rule])}],
            "arrivals": [1],
            "serviceSeconds": [1],
        },
    }.items():
        assert world.status(method, right_with(RPCS[method], body)) == "INVALID_ARGUMENT", method
