"""`apply` shows its plan, checks files before it asks anybody, and says where the fault is; `diff` changes nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common import errors
from tests.contract.cli import canned_gateway as canned
from tests.support.cli import Ran

MANIFEST = """\
kind: Endpoint
name: jobs
spec:
  minReplicas: 1
  maxReplicas: 4
  template: {template: worker, gpuCount: 1}
---
kind: QueueWatcher
name: more
spec: {broker: default, queue: more}
"""
SAME = """\
kind: Endpoint
name: jobs
spec: {minReplicas: 0, maxReplicas: 4, template: {template: worker, gpuCount: 1}}
---
kind: QueueWatcher
name: jobs
spec: {broker: default, queue: jobs}
"""
CHANGING = {"Create", "Update", "Delete"}


@pytest.fixture
def ctl(ctl: Any) -> Any:
    return partial(ctl, stdin=MANIFEST)


def asked(world: canned.World) -> list[str]:
    """The requests that would change something."""
    names = [
        type(request).__name__ for request in world.requests if not getattr(request, "validate_only", False)
    ]
    return [name for name in names if any(name.startswith(verb) for verb in CHANGING)]


def test_the_plan_is_said_before_it_is_carried_out(ctl: Any) -> None:
    ran = ctl("apply", "-f", "-")
    assert ran.out == "watchers/more created\nendpoints/jobs configured\n"
    told = "  + watchers/more\n  ~ endpoints/jobs\n      spec.minReplicas: - -> 1\n"
    assert ran.err == "plan: 1 created, 1 configured\n" + told
    assert ctl("apply", "-f", "-", "-o", "json").err.count("plan") == 0


def test_a_dry_run_over_the_past_shows_what_policies_would_have_done(ctl: Any, world: canned.World) -> None:
    text = "kind: UsePolicy\nname: idle\nspec: {condition: USE_CONDITION_IDLE, stages: [{after: 60s}]}\n"
    ran = ctl("apply", "-f", "-", "--dry-run=past", "--since", "2d", stdin=text)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[1].split()[-2:] == ["r1", "idle"]
    assert "in steps of 1m: 1 act, 2 reservations; unknown of the time they were held: 25%" in ran.err
    [request] = [one for one in world.requests if isinstance(one, allocator_api.DryRunUsePolicyRequest)]
    assert request.use_policy.spec.stages[0].after.seconds == 60
    assert request.HasField("start_time")
    other = ctl("apply", "-f", "-", "--dry-run=past", stdin=MANIFEST)
    assert (other.code, other.out) == (2, "")
    assert "--dry-run past is for use policies" in other.err


@pytest.mark.parametrize("mode", ["client", "server"])
def test_a_dry_run_changes_nothing(ctl: Any, world: canned.World, mode: str) -> None:
    before = dict(world.things)
    every_way = (
        f"{MANIFEST}---\n{MANIFEST.replace('name: jobs', 'name: new').replace('name: more', 'name: jobs')}"
    )
    ran = ctl("apply", "-f", "-", f"--dry-run={mode}", stdin=every_way)
    assert ran.code == 0, ran.err
    assert ran.out.count("(dry run)") == 4
    assert world.things == before
    assert asked(world) == []
    assert (world.requests == []) == (mode == "client")
    json.loads(ctl("apply", "-f", "-", f"--dry-run={mode}", "-o", "json").out)


def test_diff_says_what_would_change_and_changes_nothing(ctl: Any, world: canned.World) -> None:
    ran = ctl("diff", "-f", "-")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert lines[:2] == ["--- live/watchers/more", "+++ file/watchers/more"]
    assert "+  minReplicas: 1" in lines
    assert asked(world) == []
    found = json.loads(ctl("diff", "-f", "-", "-o", "json").out)["changes"]
    did = {one["name"]: one["action"] for one in found}
    assert did == {"watchers/more": "created", "endpoints/jobs": "configured"}


def test_the_tenant_of_an_endpoint_is_that_of_its_creation(ctl: Any, world: canned.World) -> None:
    made = SAME.partition("---")[0].replace("name: jobs\n", "name: mine\ntenant: ml\n")
    assert "+tenant: ml" in ctl("diff", "-f", "-", stdin=made).out.splitlines()
    assert ctl("apply", "-f", "-", stdin=made).out == "endpoints/mine created\n"
    assert world.things["endpoints/mine"].tenant == "ml"
    assert ctl("get", "endpoints", "mine", "-o", "wide", "--sort-by", "TENANT").out.split().count("ml") == 1
    assert "; bounds 0-4; tenant ml\n" in ctl("explain", "endpoint", "mine").out
    for kept in (made, made.replace("tenant: ml\n", "")):
        assert ctl("apply", "-f", "-", stdin=kept).out == "endpoints/mine unchanged\n"
        changed = ctl("apply", "-f", "-", stdin=kept.replace("maxReplicas: 4", "maxReplicas: 5"))
        assert changed.err.splitlines()[2:] == ["      spec.maxReplicas: 4 -> 5"]
        assert ctl("apply", "-f", "-", stdin=kept).code == 0
    world.requests.clear()
    for verb in ("apply", "diff"):
        ran = ctl(verb, "-f", "-", stdin=made.replace("tenant: ml", "tenant: vision"))
        assert (ran.code, asked(world)) == (2, [])
        assert "error: <stdin>:3:9: tenant is ml and stays: delete endpoints/mine first, or leave" in ran.err


def test_an_endpoint_may_read_a_watcher_that_the_same_files_make(ctl: Any, world: canned.World) -> None:
    """The server cannot check the endpoint then, since it has not that watcher yet."""
    del world.things["watchers/jobs"], world.things["endpoints/jobs"]
    world.refuse["CreateEndpoint"] = errors.FailedPreconditionError(
        "there is no watchers/jobs", reason="UNKNOWN_WATCHER", metadata={"names": "watchers/jobs"}
    )
    ran = ctl("diff", "-f", "-", stdin=SAME)
    assert (ran.code, ran.err) == (1, "")
    headings = [line for line in ran.out.splitlines() if line.startswith("+++")]
    assert headings == ["+++ file/watchers/jobs", "+++ file/endpoints/jobs"]
    dry = ctl("apply", "-f", "-", "--dry-run=server", stdin=SAME)
    assert dry.out == "watchers/jobs created (dry run)\nendpoints/jobs created (dry run)\n"
    only = SAME.partition("---")[0]
    assert ctl("diff", "-f", "-", stdin=only).code == 4, "nobody makes the watcher"
    there = autoscaler_api.Endpoint(name="endpoints/jobs", tenant="ml", etag="e1")
    world.things["endpoints/jobs"], world.refuse["UpdateEndpoint"] = there, world.refuse["CreateEndpoint"]
    assert "tenant" not in "".join(
        line for line in ctl("diff", "-f", "-", stdin=SAME).out.splitlines() if line.startswith(("+", "-"))
    )


def test_diff_is_0_where_nothing_differs_and_more_than_1_where_it_cannot_tell(
    ctl: Any, world: canned.World
) -> None:
    same = ctl("diff", "-f", "-", "--prune", stdin=SAME)
    assert (same.code, same.out) == (0, "")
    assert ctl("diff", "-f", "-", stdin="kind: Nothing\n").code == 2
    world.refuse["GetEndpoint"] = errors.InternalError("incident 12")
    assert ctl("diff", "-f", "-").code == 2
    world.refuse["GetEndpoint"] = errors.PermissionDeniedError("no")
    assert ctl("diff", "-f", "-").code == 8


def test_prune_deletes_what_the_files_do_not_name(ctl: Any, world: canned.World) -> None:
    only = "kind: QueueWatcher\nname: jobs\nspec: {broker: default, queue: jobs}\n"
    refused = ctl("apply", "-f", "-", "--prune", stdin=only)
    assert (refused.code, asked(world)) == (2, [])
    why = "standard input is not a terminal; pass --yes"
    assert f"cannot ask whether to delete endpoints/jobs: {why}" in refused.err
    assert ctl("diff", "-f", "-", "--prune", stdin=only).out.splitlines()[0] == "--- live/endpoints/jobs"
    dry = ctl("apply", "-f", "-", "--prune", "--dry-run=server", stdin=only)
    assert dry.out == "watchers/jobs unchanged (dry run)\nendpoints/jobs deleted (dry run)\n"
    assert asked(world) == []
    done = ctl("apply", "-f", "-", "--prune", "--yes", stdin=only)
    assert done.out == "watchers/jobs unchanged\nendpoints/jobs deleted\n"
    assert asked(world) == ["DeleteEndpointRequest"]


@pytest.mark.parametrize("words", [("apply",), ("diff",), ("apply", "--prune", "--yes")], ids=" ".join)
@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n---\n"])
def test_an_empty_file_is_an_error(ctl: Any, world: canned.World, words: tuple[str, ...], text: str) -> None:
    """And never taken for the wish to delete everything."""
    ran = ctl(*words, "-f", "-", stdin=text)
    assert (ran.code, ran.out, world.requests) == (2, "", [])
    assert "error: -: nothing to apply; nothing was changed" in ran.err


def filled_in(request: Any, context: Any) -> Any:
    """As a server answers that fills in what a spec leaves out."""
    del context
    spec = autoscaler_api.QueueWatcherSpec(virtual_host="/")
    spec.MergeFrom(request.queue_watcher.spec)
    changed = autoscaler_api.QueueWatcher(name=request.queue_watcher.name, spec=spec, etag="w1")
    return autoscaler_api.UpdateQueueWatcherResponse(queue_watcher=changed)


def test_what_the_server_fills_in_is_no_change(ctl: Any, world: canned.World) -> None:
    spec = autoscaler_api.QueueWatcherSpec(broker="default", queue="jobs", virtual_host="/")
    world.things["watchers/jobs"] = autoscaler_api.QueueWatcher(name="watchers/jobs", spec=spec, etag="w1")
    world.overrides["UpdateQueueWatcher"] = filled_in
    for mode in ((), ("--dry-run=server",)):
        ran = ctl("apply", "-f", "-", *mode, stdin=SAME)
        assert (ran.code, ran.err) == (0, "")
        assert {line.split()[1] for line in ran.out.splitlines()} == {"unchanged"}
    assert ctl("diff", "-f", "-", stdin=SAME).code == 0
    more = SAME.replace("queue: jobs}", "queue: more}")
    ran = ctl("apply", "-f", "-", "--dry-run=server", stdin=more)
    assert ran.err == "plan: 1 configured, 1 unchanged\n  ~ watchers/jobs\n      spec.queue: jobs -> more\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{template: nothing}", "endpoints/jobs: no adapter has a template 'nothing'; known: worker"),
        (
            "{template: worker, adapter: adapters/gone}",
            "endpoints/jobs: adapters/gone is not known; replicas wait until it connects",
        ),
        (
            "{template: worker, tiers: [{adapter: adapters/host-1}, {adapter: adapters/gone}]}",
            "endpoints/jobs: adapters/gone is not known; replicas wait until it connects",
        ),
    ],
)
@pytest.mark.parametrize("mode", [(), ("--dry-run=server",)])
def test_what_nobody_can_start_is_said(ctl: Any, mode: tuple[str, ...], template: str, said: str) -> None:
    ran = ctl("apply", "-f", "-", *mode, stdin=MANIFEST.replace("{template: worker, gpuCount: 1}", template))
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == f"warning: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Endpoint\nname: x\nspec:\n  maxReplicas: 200000\n", "<stdin>:4:16: spec.max_replicas "),
        (
            "kind: Endpoint\nname: x\nspec:\n  signals:\n  - {id: a}\n  - {id: 'Ä'}\n",
            "<stdin>:6:10: spec.signals[1].id ",
        ),
        ("kind: QueueWatcher\nname: x\nspec:\n  queue: x\n", "<stdin>:4:3: spec.broker "),
        (SAME + "---\n" + SAME, "<stdin>:9:1: endpoints/jobs is declared twice"),
        (
            "kind: Endpoint\nname: x\nspec: {minReplica: 1}\n",
            "<stdin>:3:8: unknown field 'minReplica'; did you mean",
        ),
    ],
)
def test_what_breaks_a_rule_is_found_in_its_file(ctl: Any, world: canned.World, text: str, said: str) -> None:
    ran = ctl("apply", "-f", "-", "--dry-run=client", stdin=text)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert world.requests == []


def test_what_the_server_refuses_is_found_in_its_file(ctl: Any, world: canned.World, tmp_path: Path) -> None:
    """A fault that only the server can see, such as two fields that contradict each other."""
    field = "endpoint.spec.min_replicas"
    world.refuse["UpdateEndpoint"] = errors.InvalidArgumentError(
        f"{field} is above max_replicas", field=field
    )
    file = tmp_path / "jobs.yaml"
    file.write_text(MANIFEST)
    ran = ctl("apply", "-f", str(file))
    assert ran.code == 2
    assert f"error: {file}:4:16: spec.min_replicas is above max_replicas" in ran.err


def test_what_get_prints_is_applied_unchanged_by_every_way_back(ctl: Any) -> None:
    for wanted in ("yaml", "json"):
        printed = ctl("get", "endpoints", "-o", wanted).out + ("---\n" if wanted == "yaml" else "")
        assert ctl("apply", "-f", "-", stdin=printed).out == "endpoints/jobs unchanged\n"
        assert ctl("diff", "-f", "-", stdin=printed).code == 0
        for kind, name in (("qw", "watchers/jobs"), ("budget", canned.BUDGET.name)):
            one = ctl("get", kind, name.partition("/")[2], "-o", wanted).out
            assert ctl("apply", "-f", "-", stdin=one).out == f"{name} unchanged\n"


def test_edit_opens_the_manifest_until_it_can_be_applied_and_undoes_no_other_change(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The editor is a script; each of its runs takes the next line of what a person types."""
    typed, opened = tmp_path / "typed", tmp_path / "opened"
    editor = tmp_path / "editor"
    editor.write_text(
        f'#!/bin/sh\ncat "$1" >> {opened}\nsed -i -e "$(head -n 1 {typed})" "$1"\nsed -i 1d {typed}\n'
    )
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def edit(*lines: str) -> Ran:
        typed.write_text("".join(f"{line}\n" for line in lines))
        opened.write_text("")
        return ctl("edit", "ep", "jobs")

    read = list[str]()

    def changed_meanwhile(request: Any, _: Any) -> autoscaler_api.GetEndpointResponse:
        found = autoscaler_api.Endpoint()
        found.CopyFrom(world.things[request.name])
        found.etag = f"e{len(read)}"
        read.append(found.etag)
        return autoscaler_api.GetEndpointResponse(endpoint=found)

    world.overrides["GetEndpoint"] = changed_meanwhile
    ran = edit("s/maxReplicas: 4/maxReplicas: x/", "s/maxReplicas: x/maxReplicas: 6/")
    assert (ran.code, ran.out) == (0, "endpoints/jobs configured\n")
    assert opened.read_text().count("# Save it to change endpoints/jobs.") == 2
    assert "maxReplicas must be a whole number" in opened.read_text()
    sent = [one for one in world.requests if isinstance(one, autoscaler_api.UpdateEndpointRequest)][-1]
    assert (sent.endpoint.etag, sent.endpoint.spec.max_replicas, len(read)) == ("e0", 6, 2)
    assert edit("").err == "nothing was changed\n"
    ran = edit("s/maxReplicas: 6/maxReplicas: x/", "")
    kept = next(tmp_path.glob("gpuscale-edit-*.yaml"))
    assert (ran.code, str(kept) in ran.err, "maxReplicas: x" in kept.read_text()) == (2, True, True)
    world.refuse["UpdateEndpoint"] = errors.AbortedError("it has changed meanwhile", reason="ETAG_MISMATCH")
    assert edit("s/maxReplicas: 6/maxReplicas: 5/").code == 4
    assert edit("s/name: .*/name: other/", "").code == 2


def test_a_target_with_another_address_is_changed_though_no_answer_shows_it(
    ctl: Any, gateway: tuple[str, canned.World]
) -> None:
    target = "kind: NotificationTarget\nname: lab\nspec: {url: 'https://chat.example/other'}\n"
    assert ctl("apply", "-f", "-", stdin=target).out == "targets/lab configured\n"
    assert asked(gateway[1]) == ["UpdateNotificationTargetRequest"]
