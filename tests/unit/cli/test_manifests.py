"""Manifests become resources, and each complaint names file, line and column."""

import json

import pytest
from google.protobuf.json_format import MessageToDict

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.manifests import ManifestError, parse

GOOD = """\
# what the workers read
kind: QueueWatcher
name: jobs
spec: {broker: default, queue: no}
---
kind: Endpoint
name: endpoints/jobs
spec:
  minReplicas: 0
  max_replicas: 4
  tick: 1s
  paused: true
  signals:
    - id: depth
      queue: {watcher: watchers/jobs, count: QUEUE_COUNT_TOTAL}
      maxAge: ~
  rules:
    - {id: up, signal: depth, step: {comparator: COMPARATOR_GREATER_THAN, threshold: 1e1, step: 1}, cooldown: 5s}
  template: {template: worker, parameters: {queue: 1e3}, gpuCount: 1, minMemoryBytes: "8589934592"}
---
"""


def test_documents_become_resources() -> None:
    watcher, endpoint = parse(GOOD, "f.yaml")
    assert (watcher.name, watcher.spec.queue) == ("watchers/jobs", "no")
    assert endpoint.spec.max_replicas == 4
    assert endpoint.spec.paused
    assert endpoint.spec.tick.seconds == 1
    assert endpoint.spec.signals[0].queue.count == api.QueueCount.QUEUE_COUNT_TOTAL
    assert not endpoint.spec.signals[0].HasField("max_age")
    assert endpoint.spec.rules[0].step.threshold == 10.0
    assert dict(endpoint.spec.template.parameters) == {"queue": "1e3"}
    assert endpoint.spec.template.min_memory_bytes == 8 << 30


@pytest.mark.parametrize(("text", "nanos"), [("40ms", 40_000_000), ("0.5ms", 500_000), ("0.04s", 40_000_000)])
def test_goals_of_latency_may_be_in_milliseconds(text: str, nanos: int) -> None:
    [endpoint] = parse(E + f"spec: {{rules: [{{id: goal, slo: {{itl: {text}}}}}]}}", "f")
    assert endpoint.spec.rules[0].slo.itl.nanos == nanos


def test_what_get_prints_can_be_applied() -> None:
    resources = parse(GOOD, "f.yaml")
    listed = {
        "queueWatchers": [MessageToDict(resources[0])],
        "endpoints": [MessageToDict(resources[1], always_print_fields_with_no_presence=True)],
    }
    assert parse(json.dumps(listed), "f.json") == resources
    assert parse(json.dumps(MessageToDict(resources[1])), "f.json") == [resources[1]]


E = "kind: Endpoint\nname: x\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "kind: Foo\nname: x",
            "f:1:7: kind must be QueueWatcher or Endpoint or UsePolicy or NotificationTarget or PowerBudget, not Foo",
        ),
        ("name: x", "f:1:1: kind must be QueueWatcher or Endpoint or UsePolicy or NotificationTarget"),
        ("kind: Endpoint", "f:1:1: name is missing"),
        ("kind: Endpoint\nname: A B", "f:2:7: 'A B' is not a valid name"),
        ("kind: Endpoint\nname: watchers/x", "f:2:7: 'watchers/x' is not a valid name"),
        (E + "spec:\n  minReplica: 1", "f:4:3: unknown field 'minReplica'; did you mean minReplicas?"),
        (E + "spec: {zz: 1}", "f:3:8: unknown field 'zz'; choose from minReplicas, maxReplicas, tick"),
        (E + "spec:\n  minReplicas: x", "f:4:16: minReplicas must be a whole number"),
        (E + "spec: {minReplicas: 99999999999}", "f:3:21: minReplicas must be a whole number"),
        (E + "spec:\n  tick: 5m1h", "f:4:9: tick must be a duration, such as 60s, 500ms or 1h30m"),
        (E + "spec: {paused: yes}", "f:3:16: paused must be true or false"),
        (E + "spec: {paused: [1]}", "f:3:16: must be a single value"),
        (E + "spec: [1]", "f:3:7: must be a mapping"),
        (E + "spec: {signals: {a: 1}}", "f:3:17: must be a list"),
        (E + "name: y", "f:3:1: name is given twice"),
        (E + "spec: {minReplicas: 1, min_replicas: 2}", "f:3:24: minReplicas is given twice"),
        (E + "spec: &a {}", "f:3:7: anchors and aliases are not allowed"),
        (
            E + "spec: {rules: [{step: {comparator: UP}}]}",
            "f:3:36: comparator must be one of COMPARATOR_LESS_THAN,",
        ),
        ("- 1", "f:1:1: must be a mapping"),
        ("{}", "f:1:1: kind must be"),
        ("a: [", "f:1:5: expected the node content"),
        ("? [a]\n: b", "f:1:3: a key must be a single value"),
        ("a: \x00", "f:1:1: unacceptable character"),
    ],
)
def test_complaints(text: str, complaint: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(text, "f")
    assert caught.value.message.startswith(complaint)


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing\n"])
def test_an_empty_file_is_no_resource(text: str) -> None:
    assert parse(text, "f") == []


def test_a_file_that_would_blow_up_the_reader_is_refused() -> None:
    for text, complaint in (("[" * 1_000, "nested too deeply"), ("x" * (1 << 21), "more than")):
        with pytest.raises(ManifestError, match=f"f:1:1: {complaint}"):
            parse(text, "f")
