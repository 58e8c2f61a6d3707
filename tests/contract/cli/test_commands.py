"""What scripts rely on: standard output is the payload, exit codes are from the one table, errors go to stderr."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from ruamel.yaml import YAML

from gpuscale.cli.console.lookup import MOMENT
from gpuscale.cli.grammar.nouns import NOUNS
from gpuscale.client.asks import default_holder
from gpuscale.common import errors
from gpuscale.common.rpc.status import LEADER_KEY, PROBLEM_KEY, VERSION_KEY, VIA_KEY
from gpuscale.testing import FakeServer
from tests.contract.cli import canned_gateway as canned
from tests.support.cli import leaves, run_cli
from tests.support.ports import silent_port

MANIFEST = """\
kind: Endpoint
name: jobs
spec: {minReplicas: 1, maxReplicas: 4, template: {template: worker}}
---
kind: QueueWatcher
name: more
spec: {broker: default, queue: more}
"""
TRACE = "arrival_seconds,service_seconds\n0,1\n5,2\n"

GETS = ("nodes", "gpus", "reservations", "endpoints", "replicas", "watchers", "decisions", "adapters")
KEYS = {noun: noun for noun in GETS} | {"watchers": "queueWatchers"}
NAMES = {
    "nodes": "host-1", "gpus": canned.UUIDS[1], "reservations": "r1", "endpoints": "jobs",
    "replicas": "jobs/p1", "watchers": "watchers/jobs", "decisions": "jobs/d1", "adapters": "host-1",
}  # fmt: skip
COMMANDS: list[tuple[str, ...]] = [
    *(("get", noun) for noun in GETS),
    *(("get", noun, name) for noun, name in NAMES.items()),
    ("reserve", "--gpus", "1", "--ttl", "60s", "--min-memory", "8GiB", "--holder", "me", "--node", "host-1"),
    ("check", "--gpus", "2"),
    ("plan", "rebalance"),
    ("plan", "rebalance", "--apply", "--yes"),
    ("plan", "rebalance", "--gpus", "2"),
    ("check", "--gpus", "2", "--wait", "5s"),
    ("estimate", "llama-3-70b", "-p", "tp-size=[1,2,4]", "--dtype", "bf16"),
    ("rank", "nodes", "--gpus", "2"),
    ("explain", "placement", "--gpus", "2"),
    ("explain", "reservation", "r1"),
    ("get", "cordons"),
    ("get", "cordons", "host-1"),
    ("get", "quotas"),
    ("get", "quotas", "vision"),
    ("report", "--by", "label=team", "--since", "30d"),
    ("report", "--by", "endpoint"),
    ("stats", "r1"),
    ("get", "bookings", "-a"),
    ("reserve", "--gpus", "2", "--at", "Mon 14:00", "--for", "2h", "--name", "demo"),
    ("reserve", "--booking", "demo", "--time-limit", "1h"),
    ("delete", "booking", "demo", "--yes"),
    ("set", "quota", "vision", "--gpus", "2.5", "--weight", "2"),
    ("set", "quota", "vision", "--no-limit"),
    ("delete", "quota", "vision", "--yes"),
    ("cordon", "host-1", "--reason", "fan"),
    ("uncordon", "host-1"),
    ("drain", "host-1", "--grace", "5m"),
    ("renew", "r1", "--ttl", "5m"),
    ("release", "reservations/r1", "--fence", "41"),
    ("apply", "-f", "-"),
    ("delete", "endpoint", "jobs", "--yes"),
    ("delete", "watcher", "jobs", "-y"),
    ("forget", "adapter", "process-1", "--yes"),
    ("scale", "endpoint", "jobs", "--replicas", "4", "--current-replicas", "3"),
    ("explain", "endpoint", "jobs"),
    ("explain", "decision", "jobs/d1"),
    ("explain", "policy", "idle"),
    ("explain", "exit-codes"),
    ("explain", "endpoint.spec"),
    ("wait", "endpoint", "jobs", "--for", "status.desired_replicas=3"),
    ("events", "--since", "100000d"),
    ("evaluate", "endpoint", "jobs", "--signal", "depth=50@3s", "--signal", "other=?", "--changed", "up=4m"),
    ("create", "rule", "jobs/up", "--set", "signal=depth", "--set", "step.comparator=>"),
    ("get", "rules"),
    ("get", "rules", "jobs/up"),
    ("update", "rule", "jobs/up", "--set", "step.threshold=20", "--clear", "cooldown", "--disable"),
    ("delete", "rule", "endpoints/jobs/rules/up", "-y"),
    ("preset", "list"),
    ("preset", "show", "keda", "--watcher", "jobs", "--set", "value=5"),
    ("backtest", "--preset", "keda", "--trace", "-"),
    ("tune", "--slo", "5s", "--trace", "-"),
    ("top", "--once"),
    ("status",),
    ("get", "all"),
    ("get", "audit", "--limit", "5"),
    *(("get", noun) for noun in ("health", "recordings", "processes", "jobs", "metrics", "policies")),
    *(("get", noun) for noun in ("acts", "targets", "notifications", "budgets", "changes", "backtests")),
    ("describe", "node", "host-1"),
    ("describe", "policy", "idle"),
    ("explain", "field", "Endpoint"),
    ("topology", "host-1"),
    ("delete", "policy", "idle", "--yes"),
    ("delete", "target", "lab", "--yes"),
    ("delete", "budget", "rack", "--yes"),
    ("forget", "node", "host-1"),
    ("version",),
    ("api-resources",),
]
FILES = "of files of this host: test_tokens_and_certs.py, test_contexts.py, test_first_host.py"
RUNS = "runs until something ends, over real servers: tests/integration/cli, tests/e2e"
CHANGES_HOSTS = "changes a host, over the fleet or files of it: tests/integration, tests/fault/hosts"
ELSEWHERE = {
    **dict.fromkeys(("config", "token", "certs", "join-token", "login-code", "login", "logout"), FILES),
    **dict.fromkeys(("init", "join", "leave", "upgrade", "doctor", "support-bundle", "completion"), FILES),
    **dict.fromkeys(("run", "attach", "logs", "adopt", "up", "dashboard", "record", "start", "stop"), RUNS),
    **dict.fromkeys(("edit", "diff"), RUNS),
    **dict.fromkeys(("clear", "driver", "probe", "snapshot", "history"), CHANGES_HOSTS),
    "get certs": FILES,
    **dict.fromkeys(("delete recording", "delete backtest"), "of streams and of runs: tests/integration/cli"),
}
"""Commands, or the first words of them, that COMMANDS does not have, and where they are tried."""
CHANGING = {"apply", "delete", "forget", "scale", "set", "update", "create"}
ALONE = {"explain exit-codes", "explain endpoint.spec", "explain field Endpoint", "version", "api-resources"}
"""What asks no server, or answers without one too."""
ASKS = [one for one in COMMANDS if " ".join(one) not in ALONE]

GOLDEN = {
    ("get", "nodes"): """\
NAME     STATE             GPUS                     CPU   MEMORY       LOAD             POWER   AGE
host-1   ONLINE,DRAINING   2 x Test GPU SIMULATED   12%   4GiB/64GiB   0.50 0.25 0.12   -       1s
""",
    ("get", "gpus"): """\
NODE     GPU   MODEL                STATE         UTIL   MEMORY        FREE    TEMP   POWER   HOLDER     AGE   UUID
host-1   0     Test GPU SIMULATED   OK,DRAINING   37%    20GiB/80GiB   60GiB   55C    210W    training   1s    GPU-0000000a-0000-0000-0000-000000000000
host-1   1     Test GPU SIMULATED   OK,DRAINING   -      -/80GiB       -       -      -       -          1s    GPU-0000000b-0000-0000-0000-000000000000
""",
    ("backtest", "--preset", "keda", "--trace", "-"): """\
POLICY   LATE    GPU-HOURS   X-WORK   P50    P95    P99    FLAPS   CHANGES   MOST   PENDING-HOURS
keda     2.50%   3.00        2.00     0.0s   0.0s   0.0s   0       0         0      0.00
work alone: 1.50 GPU hours; no policy can need less
""",
    ("get", "audit", "--limit", "5"): """\
TIME                      CALLER   ROLE    METHOD      RESOURCE       CODE   TOOK   BY      FROM
2023-11-14 22:13:20 UTC   ann      ADMIN   DrainNode   nodes/host-1   OK     2ms    token   ipv4:10.0.0.9:53114
""",
    ("get", "watchers", "--no-headers"): "jobs   default   jobs   OK   12   -   -   1s   -\n",
    ("forget", "adapter", "process-1", "--yes"): (
        "adapters/process-1 is forgotten; replicas that ended with it: endpoints/jobs/replicas/r1\n"
    ),
    ("get", "quotas"): """\
TENANT   GPUS HELD   LIMIT   HOURS USED   HOURS LIMIT   WEIGHT   WAITING
vision   1.5         8       0.0          -             1        2
""",
    ("rank", "nodes"): """\
NAME     IDLE   ENOUGH   UTIL   MEMORY   BECAUSE
host-1   1/2    yes      -      -        1 of 2 GPUs idle
""",
    ("drain", "host-1"): "nodes/host-1 is draining; to leave: r1 of training\n",
    ("explain", "placement", "--gpus", "2"): """\
no room now

What would help:
  wait for r1

GPUs that each constraint removes, after those above it, and alone:
  HELD       1       1

Nodes, nearest first (1 of 1):
  nodes/host-1: 1 of 2 GPUs fit
    gpu-0000000a-0000-0000-0000-000000000000   HELD: Held by r1.
    gpu-0000000b-0000-0000-0000-000000000000   score 0.500
""",
}


def input_of(command: Sequence[str]) -> str:
    return TRACE if "--trace" in command else MANIFEST


@pytest.fixture
def ctl(ctl: Any) -> Any:
    return lambda *arguments, stdin="": ctl(*arguments, stdin=stdin or input_of(arguments))


def test_no_command_is_forgotten() -> None:
    """Each is among COMMANDS, in every form of output, or stands in ELSEWHERE with where it is tried."""
    tried = [" ".join(command) for command in COMMANDS]
    paths = (" ".join(words) for words, _ in leaves())
    missing = {path for path in paths if not any(f"{one} ".startswith(f"{path} ") for one in tried)}
    elsewhere = {path for path in missing if {path, path.split()[0]} & ELSEWHERE.keys()}
    assert missing - elsewhere == set()
    unknown = {one for one in ELSEWHERE if not any(f"{path} ".startswith(f"{one} ") for path in missing)}
    assert unknown == set(), "is tried here, or is no command"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_is_json_and_other_forms_are_the_same_data(ctl: Any, command: tuple[str, ...]) -> None:
    ran = ctl(*command, "-o", "json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    if command[0] not in CHANGING:
        assert YAML(typ="safe", pure=True).load(ctl(*command, "-o", "yaml").out) == data
        assert json.loads(ctl(*command, "-o", "jsonpath={}").out) == data
        assert "" not in ctl(*command, "-o", "name").out.splitlines(), "what has no name"
        rows = list(csv.reader(ctl(*command, "-o", "csv").out.splitlines(keepends=True)))
        assert len({len(row) for row in rows}) <= 1
        assert not {"True", "False"} & {cell for row in rows for cell in row}


@pytest.mark.parametrize("command", GOLDEN, ids=" ".join)
def test_tables_look_like_this(ctl: Any, command: tuple[str, ...]) -> None:
    """An absent reading is a dash, a simulated GPU says so."""
    assert ctl(*command).out == GOLDEN[command]


@pytest.mark.parametrize("verb", ["check", "reserve", "run"])
def test_a_number_of_gpus_under_the_name_of_one_is_understood(verb: str) -> None:
    ran = run_cli(verb, "--gpu", "2", *(("--", "true") if verb == "run" else ()))
    assert (ran.code, ran.out) == (2, "")
    assert "did you mean --gpus 2?" in ran.err


@pytest.mark.parametrize("command", ASKS, ids=" ".join)
def test_nothing_listens(command: tuple[str, ...]) -> None:
    with silent_port() as port:
        ran = run_cli("--address", f"127.0.0.1:{port}", *command, "-o", "json", stdin=input_of(command))
    assert (ran.code, ran.out) == (7, "")
    assert "nothing answers at 127.0.0.1:" in ran.err
    assert "gpuscalectl up" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("noun", GETS)
def test_a_list_is_under_its_key_and_one_name_gives_the_object(ctl: Any, noun: str) -> None:
    listed = json.loads(ctl("get", noun, "-o", "json").out)
    assert list(listed) == [KEYS[noun]]
    one = json.loads(ctl("get", noun, NAMES[noun], "-o", "json").out)
    assert one in listed[KEYS[noun]]
    several = json.loads(ctl("get", noun, NAMES[noun], NAMES[noun], "-o", "json").out)
    assert several == {KEYS[noun]: [one, one]}


@pytest.mark.parametrize("noun", GETS)
def test_what_is_not_there_is_3(ctl: Any, noun: str) -> None:
    missing = "nobody/nothing" if noun in {"gpus", "replicas", "decisions"} else "nothing"
    ran = ctl("get", noun, missing, "-o", "json")
    assert (ran.code, ran.out) == (3, "")
    assert "not found" in ran.err


WRONG = """
update rule jobs/up | update rule jobs/up --set step.threshold | update rule jobs/up --set step.treshold=1 |
update rule jobs/up --set step.threshold=much | create rule up | evaluate endpoint |
evaluate endpoint jobs --signal depth | evaluate endpoint jobs --signal depth=much |
evaluate endpoint jobs --signal depth=1@soon | evaluate endpoint jobs --changed up |
preset show keda --set value | preset show keda --set value=much | backtest --preset keda |
backtest --trace - | backtest --preset keda --trace - --cold-start 60s..10s |
backtest --preset keda --trace no-such-file.csv | reserve --gpus 0 | reserve --gpus 1 --min-memory 8Gibi |
reserve --gpus 1 --share 1.5 | reserve --gpus 1 --share half | reserve --gpus 1 --nvlink --balanced |
reserve --gpus 1 --label team | reserve --gpus 1 --gpu no-node | run --gpus 1 | check | estimate x -p tp |
cordon | cordon a/b/c | drain host-1 --grace soon | get nodes A/B |
delete endpoint jobs | forget adapter process-1 | apply -f /no/such/file |
--request-timeout never get nodes | --token-file /no/such/file get nodes |
--ca-file /no/such/file get nodes | check --gpus 99999999999 | check --gpus 1 --members 99999999999 |
check --gpus 1 --cpus inf | check --gpus 1 --cpus 1e300 | check --gpus 1 --share 1.0001 |
check --gpus 1 --node-label a=b --node-label a=c | check --gpus 1 --apart-from a=b --apart-from a=c |
reserve --gpus 1 --priority 99999999999 | reserve --gpus 1 --label a=b --label a=c |
run --gpus 1 --on-move USR1 true | renew r1 --fence 99999999999999999999 | set quota vision |
set quota vision --gpus -1 | set quota vision --gpus some | set quota vision --gpus nan |
set quota vision --gpus 1e300 | set quota vision --gpus 1.7e308 | set quota vision --gpus 1 --no-limit |
estimate x -p tp=2 -p tp=4 | estimate x --dtype fp8 --kv-cache-tokens 99999999999999999999
"""
"""Commands that are typed wrongly, between bars."""


@pytest.mark.parametrize("command", [one.split() for one in WRONG.split("|")], ids=" ".join)
def test_usage_errors_are_2_and_write_nothing(ctl: Any, world: canned.World, command: list[str]) -> None:
    ran = ctl(*command)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.strip()
    assert "Traceback" not in ran.err
    assert [one for one in world.requests if not type(one).__name__.startswith(("Get", "List"))] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ResourceExhaustedError("none left", reason="NO_CAPACITY"), 5),
        (errors.UnavailableError("the disk is full", reason="DISK_FULL"), 7),
        (errors.InvalidArgumentError("wrong", field="gpu_count"), 2),
    ],
)
def test_errors_of_the_server(ctl: Any, world: canned.World, error: errors.GpuscaleError, code: int) -> None:
    world.refuse["Reserve"] = error
    ran = ctl("reserve", "--gpus", "2", "-o", "json")
    assert (ran.code, ran.out) == (code, "")
    found = json.loads(ran.err)["error"]
    assert (found["message"], found["reason"], found["exitCode"]) == (error.message, error.reason, code)
    assert found.get("fields") == ([{"field": "gpu_count", "description": "wrong"}] if code == 2 else None)
    in_words = ctl("reserve", "--gpus", "2").err
    assert f"error: {error.message}" in in_words
    assert ("--gpus: wrong" in in_words) == (code == 2)


def test_reserve_sends_what_was_typed(ctl: Any, world: canned.World) -> None:
    ran = ctl("reserve", "--gpus", "2", "--min-memory", "8GiB", "--max-utilization", "20", "--ttl", "1m30s",
              "--holder", "me", "--node", "a", "--node", "nodes/b", "--request-id", "00000000-0000-0000-0000-0000000000ff")  # fmt: skip
    assert ran.code == 0
    [request] = world.requests
    assert (request.ask.gpu_count, request.holder, request.ask.min_memory_bytes) == (2, "me", 8 << 30)
    assert (request.ask.max_utilization_percent, request.ttl.seconds) == (20, 90)
    assert list(request.ask.nodes) == ["nodes/a", "nodes/b"]
    assert request.request_id.endswith("ff")
    assert f"CUDA_VISIBLE_DEVICES={canned.UUIDS[0]}" in ran.err


def test_what_is_not_typed_is_left_to_the_server(ctl: Any, world: canned.World) -> None:
    ctl("reserve", "--gpus", "1")
    [request] = world.requests
    assert [field.name for field, _ in request.ask.ListFields()] == ["gpu_count"]
    assert {field.name for field, _ in request.ListFields()} == {"request_id", "holder", "ask"}
    assert "@" in request.holder


def test_every_wish_can_be_typed(ctl: Any, world: canned.World) -> None:
    typed = (
        "--share 0.5 --gpu-memory 4GiB --model A100 --mig-profile 1g.10gb --cpus 2.5 --host-memory 1GiB"
        " --exclude-node c --gpu a/GPU-1 --exclude-gpu a/GPU-2 --node-label zone=x --apart-from job=y --nvlink"
        " --members 2 --power-limit 300W --strategy strict-spread --policy pack --allow-unknown-utilization --min-memory 1GiB"
        " --max-utilization 9 --node a --label team=v=1 --tenant t --priority -3 --preemptible --preempt"
        " --ttl 60s --holder me --owner ada --time-limit 1h --booking demo"
    )
    assert ctl("reserve", "--gpus", "1", *typed.split()).code == 0
    [request] = world.requests
    said = {field.name for field, _ in request.ask.ListFields()}
    assert set(type(request.ask).DESCRIPTOR.fields_by_name) - said == {"weights"}
    said = {field.name for field, _ in request.ListFields()}
    assert set(type(request).DESCRIPTOR.fields_by_name) - said == {"wait", "job", "keep_place", "movable"}
    ask = request.ask
    assert (ask.gpu_milli, ask.cpu_milli, [*ask.gpus]) == (500, 2500, ["nodes/a/gpus/gpu-1"])
    assert dict(request.labels) == {"team": "v=1"}


def test_no_room_is_5_and_said(ctl: Any) -> None:
    ran = ctl("check", "--gpus", "9", "-o", "json")
    assert (ran.code, json.loads(ran.out)["available"]) == (5, False)


def test_gpus_to_partition_anew_come_with_what_is_typed_for_it(ctl: Any) -> None:
    ran = ctl("plan", "rebalance", "--gpus", "1", "--mig-profile", "3g.40gb")
    assert ran.code == 5
    assert ran.out.splitlines()[:-2] == [
        "it would fit",
        "",
        "gpuscalectl cordon n2/gpu-1",
        "then, as root on n2:",
        "  nvidia-smi mig -i 3 -dci; nvidia-smi mig -i 3 -dgi",
        "  nvidia-smi mig -i 3 -cgi 3g.40gb,1g.10gb -C",
        "gpuscalectl uncordon n2/gpu-1",
        "",
    ]


@pytest.mark.parametrize(
    ("typed", "why"),
    [("--node a", "Missing option '--gpus'"), ("--apply --yes --node a", "leave out which GPUs")],
)
def test_no_option_of_a_plan_is_passed_over(ctl: Any, world: canned.World, typed: str, why: str) -> None:
    ran = ctl("plan", "rebalance", *typed.split())
    assert (ran.code, why in ran.err, world.requests) == (2, True, [])


def test_gpus_that_are_partitioned_are_named_with_what_tells_how_it_ends(ctl: Any) -> None:
    ran = ctl("plan", "rebalance", "--apply", "--yes")
    told = "nodes/n2/gpus/gpu-1 gets 3g.40gb, 1g.10gb: gpuscalectl get power-changes"
    assert (ran.code, ran.out.splitlines()[-2:]) == (0, [told, ""])


def test_parameters_are_what_json_says(ctl: Any, world: canned.World) -> None:
    ctl("estimate", "x", "-p", "tp=[1,2]", "-p", "pp=auto", "-p", "dp=2", "-p", "cp=NaN")
    [request] = world.requests
    assert [value.number_value for value in request.parameters["tp"].values] == [1, 2]
    assert [request.parameters[one] for one in ("pp", "dp", "cp")] == ["auto", 2, "NaN"]


def test_the_fence_is_looked_up(ctl: Any, world: canned.World) -> None:
    for words, fence in (("release r1", 41), ("renew r1 --fence 7", 7)):
        ctl(*words.split())
        assert world.requests[-1].fence == fence


def test_apply_says_what_it_did(ctl: Any, world: canned.World, tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(MANIFEST)
    (tmp_path / "a.yml").write_text("kind: Endpoint\nname: new\nspec: {template: {template: t}}\n")
    (tmp_path / "notes.txt").write_text("not a manifest")
    first = ctl("apply", "-f", str(tmp_path))
    told = "watchers/more created\nendpoints/new created\nendpoints/jobs configured\n"
    assert first.out == told
    second = ctl("apply", "-f", str(tmp_path))
    assert [line.split()[1] for line in second.out.splitlines()] == ["unchanged"] * 3
    update = next(request for request in world.requests if type(request).__name__ == "UpdateEndpointRequest")
    assert update.endpoint.etag == "e1", "what was read must not have changed meanwhile"


def test_apply_reads_everything_before_it_changes_anything(ctl: Any, world: canned.World) -> None:
    ran = ctl("apply", "-f", "-", stdin=MANIFEST + "---\nkind: Endpoint\nname: x\nspec: {bogus: 1}\n")
    assert ran.code == 2
    assert "<stdin>:11:8: unknown field 'bogus'" in ran.err
    assert world.requests == []


def test_apply_does_nothing_where_the_server_refuses_a_part_of_it(ctl: Any, world: canned.World) -> None:
    world.refuse["UpdateEndpoint"] = errors.FailedPreconditionError("no such template")
    ran = ctl("apply", "-f", "-", "-o", "json")
    assert (ran.code, ran.out) == (4, "")
    assert "created" not in ran.err
    assert "watchers/more" not in world.things


def test_apply_says_what_was_done_before_it_failed(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server could not know beforehand."""
    answers = world.answer

    def answer(method: str, request: Any, context: Any) -> None:
        if method == "UpdateEndpoint" and not request.validate_only:
            world.refuse[method] = errors.AbortedError("changed meanwhile")
        answers(method, request, context)

    monkeypatch.setattr(world, "answer", answer)
    ran = ctl("apply", "-f", "-", "-o", "json")
    assert (ran.code, ran.out) == (4, "")
    assert "watchers/more created" in ran.err


def test_explain_says_why(ctl: Any) -> None:
    out = ctl("explain", "endpoint", "jobs").out
    assert "endpoints/jobs: 3 desired, 2 granted, 2 ready; bounds 0-4" in out
    assert "2 -> 3 wanted, 2 granted, limited by NO_CAPACITY" in out
    assert "saw   depth = 12 OK, 1s old" in out
    assert "saw   other = - MISSING (the broker is unreachable)" in out
    assert "rule up" in out
    assert "3 -> 2   NO_CAPACITY      one GPU missing" in out
    assert "evaluated now: 3 -> 4 wanted: from 3 to 4: max_replicas is 4" in out
    assert "would be 6 if max_replicas were not 4" in out
    assert out.endswith("to 3 in 43s if signals do not change\n")


def test_explain_says_when_what_failed_is_tried_again(ctl: Any, world: canned.World) -> None:
    decision = deepcopy(canned.DECISION)
    decision.last_time.FromSeconds(int(time.time()) - 3)
    text = "replicas failed (boom: no model): the next one starts in 8.0 s"
    decision.steps.add(stage="STAGE_ACT", code="DECISION_CODE_BACK_OFF", text=text)
    world.things[decision.name] = decision
    last = ctl("explain", "endpoint", "jobs").out.splitlines()[-1]
    assert re.fullmatch(r"what failed is tried again: the next one starts in 8\.0 s, as of [345]s ago", last)


def test_who_holds_a_gpu_is_told_where_it_is_known(ctl: Any, world: canned.World) -> None:
    of_node = ctl("describe", "node", "host-1").out.partition("\n\nNODE")[2].splitlines()
    assert ["training" in line for line in of_node[1:3]] == [True, False]
    assert "HOLDER" not in ctl("snapshot").out, "an agent does not know"
    held = deepcopy(canned.RESERVATION)
    held.gpus[0].name = held.gpus[0].name.replace("host-1", "before")  # as its host was called
    world.things[held.name] = held
    assert "training" in ctl("get", "gpus", canned.UUIDS[0]).out


AWAY = errors.UnavailableError("the allocator is down", reason="UPSTREAM_UNAVAILABLE")
FROZEN = errors.DeadlineExceededError("no answer within 10 s")


@pytest.mark.parametrize("error", [AWAY, FROZEN], ids=["away", "frozen"])
def test_the_allocator_away_or_frozen_does_not_hide_the_gpus(
    ctl: Any, world: canned.World, error: errors.GpuscaleError
) -> None:
    world.refuse.update(dict.fromkeys(("ListReservations", "ListCordons"), error))
    for words, what, code in (
        ("get gpus", "holders", 0),
        ("get nodes", "cordons", 0),
        ("get all", "reservations", 7),
        ("status", "reservations and cordons", 7),
    ):
        ran = ctl(*words.split())
        lines = ran.err.splitlines()
        assert (ran.code, f"{what} are unknown: {error.message}" in lines) == (code, True)
        assert (ran.err.count("gpuscalectl doctor"), len({*lines})) == (error is FROZEN, len(lines))
    assert "2 GPUs: use unknown\n" in ran.out
    assert "reservations unknown, 1 endpoint, " in ran.out
    assert "reservations" not in json.loads(ctl("status", "-o", "json").out), "absent, and not none"


def test_a_service_that_goes_away_after_its_list_does_not_hide_that(ctl: Any, world: canned.World) -> None:
    """What else it tells is asked for with a page of one."""
    world.overrides["ListHealthEvents"] = lambda *_: canned.monitor_api.ListHealthEventsResponse()

    def listed(request: Any, context: Any) -> Any:
        if request.page_size == 1:
            canned.fail(context, AWAY)
        return canned.allocator_api.ListReservationsResponse(reservations=[canned.RESERVATION])

    world.overrides["ListReservations"] = listed
    ran = ctl("status")
    assert (ran.code, "training" in ran.out, "nothing is wrong" in ran.out) == (7, True, False)
    assert f"problems of the allocator are unknown: {AWAY.message}" in ran.err


def test_a_plan_of_an_upgrade_shows_what_answers(ctl: Any, world: canned.World) -> None:
    world.refuse["ListReservations"] = AWAY
    ran = ctl("upgrade", "--plan", "-o", "json")
    steps = {one["what"]: one for one in json.loads(ran.out)["steps"]}
    assert (ran.code, steps.keys() >= {"fleet", "nodes/host-1", "this host"}) == (7, True)
    assert (steps["services"]["state"], steps["services"]["found"]) == ("FAIL", AWAY.message)
    assert AWAY.message in ran.err


def test_one_slow_list_does_not_hide_the_others_of_its_service(ctl: Any, world: canned.World) -> None:
    world.refuse["ListReservations"] = FROZEN
    ran = ctl("get", "all", "-o", "json")
    assert ran.code == 7
    assert {"quotas", "bookings"} < {*json.loads(ran.out)}
    assert re.findall(r"(\w+) are unknown", ran.err) == ["reservations", "jobs"]


@pytest.mark.parametrize("error", [AWAY, FROZEN], ids=["away", "frozen"])
def test_the_fleet_away_or_frozen_does_not_hide_what_is_held(
    ctl: Any, world: canned.World, error: errors.GpuscaleError, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.refuse.update(dict.fromkeys(("ListNodes", "ListHealthEvents"), error))
    ran = ctl("status")
    assert ran.code == 7
    assert ran.out.startswith("GPUs unknown\nnodes unknown\n1 reservation, 1 endpoint, health events unknown")
    assert "training" in ran.out
    assert f"nodes are unknown: {error.message}" in ran.err
    assert ran.err.count("gpuscalectl doctor") == (error is FROZEN)
    assert [*json.loads(ctl("status", "-o", "json").out)] == ["reservations", "endpoints"]
    monkeypatch.setattr("gpuscale.cli.commands.top.sys", MagicMock())  # on a terminal
    monkeypatch.setattr("gpuscale.dashboard.terminal.Top", live := MagicMock())
    assert ctl("top").code == 0
    live.return_value.run.assert_called_once_with()


def test_a_server_without_a_method_is_told_once(ctl: Any, world: canned.World) -> None:
    """As an agent has none of `get all`, and an older server not each."""
    error = errors.UnimplementedError("Method not found!")
    world.refuse = dict.fromkeys(("ListNodes", "ListEndpoints", "ListReplicas"), error)
    ran = ctl("get", "all")
    assert (ran.code, ran.out, ran.err.count("not found!"), ran.err.count("upgrade --plan")) == (1, "", 1, 1)
    assert ctl("status").err == ran.err
    del world.refuse["ListNodes"]
    ran = ctl("get", "all")
    assert (ran.code, ran.err.count("not found!"), ran.err.count("upgrade --plan")) == (1, 2, 1)


def test_all_is_what_one_may_see(ctl: Any, world: canned.World) -> None:
    """An operator may not read where notifications go."""
    world.refuse["ListNotificationTargets"] = errors.PermissionDeniedError(
        "ann has operator", reason="ROLE_TOO_LOW"
    )
    ran = ctl("get", "all", "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert {"nodes", "usePolicies", "backtests"} < json.loads(ran.out).keys()
    assert ctl("get", "nodes,targets").code == 8
    world.refuse["ListNodes"] = errors.PermissionDeniedError("no host of ann", reason="OTHER_NODE")
    assert ctl("get", "all").code == 8, "another reason hides nothing"
    low = world.refuse["ListNotificationTargets"]
    world.refuse = MagicMock(**{"__contains__.return_value": True, "__getitem__.return_value": low})
    ran = ctl("get", "all")
    assert (ran.code, ran.out, "ann has operator" in ran.err) == (8, "", True)


def test_an_empty_list_is_a_list(ctl: Any, world: canned.World) -> None:
    world.things.clear()
    assert json.loads(ctl("get", "nodes", "-o", "json").out) == {"nodes": []}
    ran = ctl("get", "nodes")
    assert ran.err.startswith("none: no agent reports")
    assert (ctl("get", "nodes,ep").out, ctl("get", "nodes,ep").err) == ("", "none\n")
    for form in ("csv", "name", "jsonl", "jsonpath={.nodes[*].name}"):
        assert ctl("get", "nodes", "-o", form).out == ""
    assert ctl("get", "nodes", "--no-headers").out == ""


def test_version_names_every_program_and_is_said_where_nothing_answers(ctl: Any) -> None:
    records = json.loads(ctl("version", "-o", "json").out)["versions"]
    programs = {one["name"]: one["program"] for one in records}
    known = {"gpuscalectl": "client", "nodes/host-1": "agent", "adapters/host-1": "adapter"}
    assert programs.items() >= known.items()
    alone = run_cli("version", "--client", "-o", "json")
    assert json.loads(alone.out)["versions"] == records[:2]
    with silent_port() as port:
        away = run_cli("--address", f"127.0.0.1:{port}", "version", "-o", "json")
    assert (away.code, away.out) == (7, alone.out)


def test_an_explained_reservation_that_waits_has_no_table_of_gpus(ctl: Any, world: canned.World) -> None:
    assert "BECAUSE" in ctl("explain", "reservation", "r1").out
    waiting = canned.allocator_api.Reservation(name="reservations/r9", holder="ann")
    waiting.job.queue_reason, waiting.job.queue_position = "no room", 2
    world.things[waiting.name] = waiting
    said = ctl("explain", "reservation", "r9").out
    assert "BECAUSE" not in said
    assert said.endswith("\n\nwaits, 2 before it: no room\n")
    waiting.job.queue_position = 0
    assert "\nwaits, next in the queue: no room\n" in ctl("explain", "reservation", "r9").out, (
        "as `reserve` says"
    )


def test_version_names_the_programs_of_the_services_that_answer(ctl: Any, world: canned.World) -> None:
    world.refuse["ListReservations"] = AWAY
    ran = ctl("version", "-o", "json")
    names = {one["name"] for one in json.loads(ran.out)["versions"]}
    assert (ran.code, names & {"fleet", "allocator"}) == (7, {"fleet"})
    assert names > {"autoscaler", "nodes/host-1", "adapters/host-1"}
    assert "the allocator is down" in ran.err
    world.refuse["ListNodes"] = AWAY
    tell(world, (VIA_KEY, "0.4.0"), method="ListEndpoints")  # the gateway, beside answers of any service
    assert "0.4.0" in {one["version"] for one in json.loads(ctl("version", "-o", "json").out)["versions"]}


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("get all", (7, 7)),
        ("status", (7, 7)),
        ("version", (6, 7)),
        ("doctor --only fleet", (1, 1)),
        ("support-bundle --write PLACE", (0, 0)),
    ],
)
@pytest.mark.parametrize(
    "error", [FROZEN, errors.UnavailableError("nobody leads", reason="NOT_LEADER")], ids=str
)
def test_services_that_all_hang_or_that_nobody_leads_are_waited_for_once(
    ctl: Any,
    world: canned.World,
    words: str,
    codes: tuple[int, int],
    error: errors.GpuscaleError,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As where the gateway hangs, or looks for a leader for as long as it may: `get all` took minutes while the database was away."""
    heard, waits = world.answer, list[float]()

    def answer(method: str, request: Any, context: Any) -> None:
        heard(method, request, context)
        if error is FROZEN or ".monitor." not in request.DESCRIPTOR.full_name:
            waits.append(context.time_remaining() or 60.0)
            canned.fail(context, error)

    monkeypatch.setattr(world, "answer", answer)
    ran = ctl(*words.replace("PLACE", str(tmp_path / "bundle.tar.gz")).split())
    assert ran.code == codes[error is not FROZEN]
    assert ran.code == 0 or error.message in ran.err + ran.out
    assert (len(waits) <= 9, sum(one > 2 * MOMENT for one in waits)) == (True, 2), "of two services"


@pytest.mark.parametrize(("limit", "most"), [("10s", 10), ("60s", 60), ("500ms", 0.5)])
def test_a_service_that_hangs_takes_no_time_from_another(
    ctl: Any, world: canned.World, limit: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator that answered in 2.5 s read as unknown while the fleet hung."""
    world.refuse |= dict.fromkeys(("ListNodes", "ListHealthEvents"), FROZEN)
    ran = ctl("--request-timeout", limit, "status")
    assert (ran.code, "reservations" in ran.err) == (7, False), ran.err
    waits = dict(zip([type(one).__name__ for one in world.requests[:4]], world.waits, strict=False))
    assert waits["ListReservationsRequest"] == pytest.approx(most, abs=most / 4)
    assert waits["ListHealthEventsRequest"] == pytest.approx(min(MOMENT, most), abs=most / 4)
    assert "events are unknown" in ran.err


def test_what_is_not_asked_for_says_so(ctl: Any, world: canned.World) -> None:
    world.refuse |= dict.fromkeys(("ListNodes", "ListHealthEvents"), FROZEN)
    said = ctl("get", "nodes,health,processes").err
    assert f"ListNodes was not answered: {FROZEN.message}" in said


@pytest.mark.parametrize(
    "words",
    [("explain", "reservation"), ("get", "reservations"), ("release",), ("renew",), ("stats",)],
    ids=" ".join,
)
def test_a_reservation_is_known_by_the_title_of_its_job(
    ctl: Any, world: canned.World, words: tuple[str, ...]
) -> None:
    """As by `get job`, `stop` and `logs`. Where several that are open have it, none is taken."""
    one = deepcopy(canned.RESERVATION)
    one.name, one.job.title = "reservations/rabcdefghijk2", "night run"
    world.things[one.name] = one
    ran = ctl(*words, "night run")
    assert (ran.code, ran.err) == (0, "")
    assert {request.name for request in world.requests if hasattr(request, "name")} == {one.name}
    other = deepcopy(one)
    other.name = "reservations/rabcdefghijk3"
    world.things[other.name] = other
    ran = ctl(*words, "night run")
    assert ran.code == 2
    assert "2 jobs are titled 'night run': rabcdefghijk2, rabcdefghijk3; use the id" in ran.err
    one.holder = default_holder()
    world.requests.clear()
    assert ctl(*words, "night run").code == 0, "one's own"
    assert {request.name for request in world.requests if hasattr(request, "name")} == {one.name}


def test_text_that_is_not_utf_8_is_refused(ctl: Any) -> None:
    """As of an old file name, or of a locale of another encoding; it was a traceback."""
    ran = ctl("reserve", "--gpus", "1", "--label", "a=b\udcff")
    assert (ran.code, ran.err) == (2, "error: 'b\\udcff' is not UTF-8: write it in another way\n")


def test_other_letters_are_sent_from_a_locale_without_utf_8(ctl: Any, world: canned.World) -> None:
    """Python reads a typed ö as two surrogates there."""
    for words in (("--label", "a=b\udcc3\udcb6"), ("--holder", "b\udcc3\udcb6")):
        assert ctl("reserve", "--gpus", "1", *words).code == 0
    labelled, held = [one for one in world.requests if hasattr(one, "labels")]
    assert (labelled.labels["a"], held.holder) == ("bö", "bö")
    titles = [one for _, command in leaves() for one in command.params if one.name == "title"]
    assert {one.type.convert("b\udcc3\udcb6", one, None) for one in titles} == {"bö"}
    ctl("cordon", "host-1", "--reason", "b\udcc3\udcb6")
    assert world.requests[-1].reason == "bö"
    ctl("get", "reservations", "--holder", "b\udcc3\udcb6", "--filter", "holder = b\udcc3\udcb6")
    ctl("report", "--filter", "user = b\udcc3\udcb6")
    listed, reported = world.requests[-2:]
    assert (listed.holder, listed.filter, reported.filter) == ("bö", "holder = bö", "user = bö")


def test_nothing_is_reserved_from_a_directory_that_was_deleted(
    ctl: Any, world: canned.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host, or detached, it failed once the GPUs were granted."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    ran = ctl("run", "--gpus", "1", "--", "true")
    assert (ran.code, [one for one in world.requests if hasattr(one, "request_id")]) == (4, [])
    assert "the current directory was deleted" in ran.err


# In a locale without UTF-8 Python reads a typed ö so.
@pytest.mark.parametrize(
    ("title", "typed"), [("rabcdefghijk7", "rabcdefghijk7"), ("größe", "gr\udcc3\udcb6\udcc3\udc9fe")]
)
@pytest.mark.parametrize("words", ["get job", "release", "logs", "wait"])
def test_a_title_may_look_like_an_id_or_have_other_letters(
    ctl: Any, world: canned.World, words: str, title: str, typed: str
) -> None:
    one = deepcopy(canned.RESERVATION)
    one.name, one.job.title = "reservations/rabcdefghijk2", title
    one.job.state, one.job.exit_code = one.job.STATE_SUCCEEDED, 0
    one.end_time.CopyFrom(one.create_time)
    world.things[one.name] = one
    ran = ctl(*words.split(), typed)
    asked = {getattr(request, "name", "") for request in world.requests}
    assert one.name in asked or "rabcdefghijk2" in ran.out, ran.err


@pytest.mark.parametrize(
    "words", ["get job", "describe job", "wait", "stats", "renew", "logs", "attach", "stop"]
)
def test_a_title_with_a_slash_is_that_of_no_other_job(ctl: Any, world: canned.World, words: str) -> None:
    for number, title in enumerate(("vision/3", "3"), 2):
        one = deepcopy(canned.RESERVATION)
        one.name, one.job.title = f"reservations/rabcdefghijk{number}", title
        one.job.state, one.job.exit_code = one.job.STATE_SUCCEEDED, 0
        one.end_time.CopyFrom(one.create_time)
        del one.gpus[:]
        world.things[one.name] = one
    ran = ctl(*words.split(), "vision/3")
    names = {name for one in world.requests if "reservations/" in (name := getattr(one, "name", ""))}
    assert names <= {"reservations/rabcdefghijk2"}, ran.err
    assert names or "rabcdefghijk2" in ran.out, ran.err


LABEL = "must be 1-253 printable characters without spaces at the ends"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("login-code create ann --valid-for 0s", "--valid-for must be at least 1m"),
        (f"login-code create ann --tenant {'x' * 254}", f"--tenant {LABEL}"),
        ("login-code create ann --valid-for 400d", "--valid-for must be at most 397d"),
        ("login-code create ann --expires-in 0s", "--expires-in must be at least 1s"),
        ("join-token create --node x --expires-in 0s", "--expires-in must be at least 1s"),
        ("reserve --gpus 99999999", "--gpus must be at most 4096"),
        ("reserve --gpus 1 --wait 9999d", "--wait must be at most 7d"),
        ("run --gpus 1 --env =x -- true", "--env =x: '' is not the name of a variable"),
        (f"reserve --gpus 1 --model A100 --model {'x' * 254}", f"--model {LABEL}"),
        ("reserve --gpus 1 --members 5000", "--members must be at most 1000"),
        ("set quota vision --hours -1", "--hours must be at least 0"),
        ("reserve --gpus 1 --time-limit 0s", "--time-limit must be at least 1s"),
        ("reserve --gpus 1 --at 2h --for 1s", "--for must be at least 1m"),
        ("start recording r1 --for 0s --node host-1", "--for must be greater than 0s"),
    ],
)
def test_a_wrong_value_is_told_by_its_option(words: str, told: str) -> None:
    """Not by the field of the request, which nobody typed."""
    with FakeServer() as server:
        ran = run_cli("--address", server.address, *words.split())
    assert (ran.code, ran.err) == (2, f"error: {told}\n")


def test_a_probe_says_ok_of_nothing_that_it_may_not_test(ctl: Any, world: canned.World) -> None:
    """A viewer may not reserve."""
    world.refuse["Reserve"] = errors.PermissionDeniedError("it takes an operator", reason="ROLE_TOO_LOW")
    found = json.loads(ctl("probe", "-o", "json").out)["gpus"]
    assert {one["state"] for one in found} == {"WARN", "UNTESTED"}
    assert "not tested: it takes an operator" in [one["found"] for one in found]


def tell(world: canned.World, *told: tuple[str, str], method: str = "ListReservations") -> None:
    """Have a service, by default the allocator, tell this beside its answers."""
    room = {"ListNodes": canned.monitor_api, "ListEndpoints": canned.autoscaler_api}

    def answer(_: Any, context: Any) -> Any:
        context.set_trailing_metadata(told)
        return getattr(room.get(method, canned.allocator_api), f"{method}Response")()

    world.overrides[method] = answer


def test_version_and_doctor_name_the_allocator_that_leads(ctl: Any, world: canned.World) -> None:
    """To those who may know: it tells admins only."""
    tell(world, (VERSION_KEY, "0.4.0"), (LEADER_KEY, "a.example:7073"))
    records = json.loads(ctl("version", "-o", "json").out)["versions"]
    program = "process that leads, a.example:7073"
    assert {"name": "allocator", "program": program, "version": "0.4.0"} in records
    findings = json.loads(ctl("doctor", "--only", "fleet", "-o", "json").out)["findings"]
    assert "answers; a.example:7073 leads" in [one["found"] for one in findings]


@pytest.mark.parametrize(
    ("service", "method"),
    [("allocator", "ListReservations"), ("autoscaler", "ListEndpoints"), ("fleet", "ListNodes")],
)
def test_doctor_and_status_tell_of_a_service_that_cannot_write(
    ctl: Any, world: canned.World, service: str, method: str
) -> None:
    problem = f"the {service} cannot write its state: the disk of the state is full"
    tell(world, (PROBLEM_KEY, problem), method=method)
    ran = ctl("doctor", "--only", "fleet", "-o", "json")
    found = {one["subject"]: (one["state"], one["found"]) for one in json.loads(ran.out)["findings"]}
    assert (ran.code, found[service]) == (1, ("FAIL", problem))
    assert f"health event\n{problem}\n" in ctl("status").out
    world.overrides["ListHealthEvents"] = lambda *_: canned.monitor_api.ListHealthEventsResponse()
    assert f"0 health events\n{problem}\n" in ctl("status").out


def test_a_host_whose_clock_is_far_off_has_a_problem(ctl: Any, world: canned.World) -> None:
    node = deepcopy(canned.NODE)
    node.snapshot.sample_time.FromSeconds(int(time.time()) - 300)
    node.snapshot.age.FromSeconds(1)
    world.things[node.name] = node
    world.overrides["ListHealthEvents"] = lambda *_: canned.monitor_api.ListHealthEventsResponse()
    status = ctl("status").out
    for out in (status, ctl("get", "nodes").out):
        assert re.search("its clock is (299|300) s behind this host's", out)
    assert "nothing is wrong" not in status


def test_every_kind_is_listed_with_the_commands_that_know_it(ctl: Any) -> None:
    listed = json.loads(ctl("api-resources", "-o", "json").out)["resources"]
    assert {one["name"] for one in listed} == {noun.plural for noun in NOUNS}
    for one in listed:
        assert {"describe", "get"} <= set(one["verbs"])
        for verb in one["verbs"]:
            assert run_cli(verb, one["short"][0], "--help").code == 0, (verb, one)


def test_topology_is_a_matrix_of_links_and_bridges(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal that is too narrow, in blocks of columns."""
    node = deepcopy(canned.NODE)
    first, second = node.snapshot.gpus
    first.nvlinks.add(uuid=second.uuid, link_count=18)
    first.numa_node = 1
    first.pci_path, second.pci_path = "pci0000:16/port/gpu0", "pci0000:16/port/gpu1"
    node.snapshot.host.network_adapters.add(name="mlx5_0", pci_path="pci0000:16/other/card")
    node.snapshot.host.network_adapters.add(name="eth0")
    world.things[node.name] = node
    whole = [
        "       GPU0 GPU1 mlx5_0 eth0 NUMA", "GPU0   X    NV18 PHB    -    1",
        "GPU1   NV18 X    PHB    -    -", "mlx5_0 PHB  PHB  X      -    -", "eth0   -    -    -      X    -",
    ]  # fmt: skip
    assert ctl("topology", "host-1").out.splitlines()[:6] == [*whole, ""]
    data = json.loads(ctl("topology", "host-1", "-o", "json").out)
    assert [one["name"] for one in data["devices"]] == ["GPU0", "GPU1", "mlx5_0", "eth0"]
    links = [(one["from"], one["to"], one["by"]) for one in data["links"][:2]]
    assert links == [("GPU0", "GPU1", "NV18"), ("GPU0", "mlx5_0", "PHB")]
    monkeypatch.setattr("gpuscale.cli.commands.topology.terminal_width", lambda: 30)
    blocks = ctl("topology", "host-1").out.split("\n\n")[:2]
    assert [block.splitlines()[0] for block in blocks] == ["       GPU0 GPU1 NUMA", "       mlx5_0 eth0 NUMA"]


def test_a_report_says_who_local_is_and_tells_endpoints_apart(ctl: Any, world: canned.World) -> None:
    usage = canned.allocator_api.QueryUsageResponse(rows=[{"user": "local"}], total={})
    world.overrides["QueryUsage"] = lambda request, context: usage
    assert "--by endpoint tells endpoints apart" in ctl("report").err
    usage.rows[0].user = "ann"
    assert "local" not in ctl("report").err
    ctl("report", "--by", "endpoint")
    asked = world.requests[-1]
    assert (asked.group_by, asked.label_key) == (asked.GROUP_BY_LABEL, "endpoint")


@pytest.mark.parametrize(
    "typed",
    ["jobs", "endpoint jobs", "endpoint/jobs", "endpoints/jobs", canned.REPLICA.name, "replica jobs/p1"],
)
def test_logs_are_those_of_a_replica_or_of_all_of_an_endpoint(ctl: Any, typed: str) -> None:
    assert ctl("logs", *typed.split()).out == f"of {canned.REPLICA.name}\n"


def test_logs_of_nothing_name_both_kinds_that_have_some(ctl: Any) -> None:
    ran = ctl("logs", "nobody")
    assert (ran.code, ran.err) == (3, "error: no endpoint or job nobody: see gpuscalectl get jobs -a\n")
