"""What an update takes of a resource: what its mask names and no more, cleared where it is unset; without a mask all of it."""

from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import MessageToDict, ParseDict

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc.validation import merged

BEFORE: dict[str, Any] = {
    "maxReplicas": 4,
    "tick": "5s",
    "template": {"template": "worker", "minMemoryBytes": "5"},
}
BEFORE["rules"] = [{"id": "up"}, {"id": "down"}]
UNSET = {"template": {"template": "worker"}}


def updated(changed: dict[str, Any], *paths: str) -> dict[str, Any]:
    """The spec after an update of an endpoint with the one above."""
    current, given = (
        ParseDict({"spec": spec}, api.Endpoint(name="endpoints/e")) for spec in (BEFORE, changed)
    )
    found: dict[str, Any] = MessageToDict(merged(current, given, FieldMask(paths=paths)).spec)
    return found


@pytest.mark.parametrize(
    ("changed", "path", "after"),
    [
        ({"maxReplicas": 9, "tick": "7s"}, "max_replicas", {"maxReplicas": 9}),
        (
            zero := {"template": {**UNSET["template"], "minMemoryBytes": "0"}},
            "template.min_memory_bytes",
            zero,
        ),
        (UNSET, "template.min_memory_bytes", UNSET),
        ({}, "template.min_memory_bytes", UNSET),
        ({"rules": [{"id": "other"}]}, "rules", {"rules": [{"id": "other"}]}),
    ],
    ids=["what is named", "zero is a value", "unset", "unset as is all around it", "a list"],
)
def test_an_update_takes_what_its_mask_names(
    changed: dict[str, Any], path: str, after: dict[str, Any]
) -> None:
    assert updated(changed, f"spec.{path}") == BEFORE | after
    assert updated(changed) == changed


@pytest.mark.parametrize("path", ["status", "name", "spec.nothing", "etag", "spec.rules.id", "specs"])
def test_what_is_no_part_of_the_spec_cannot_be_named(path: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        updated({}, path)
    assert [one.field for one in refused.value.violations] == ["update_mask"]


def test_what_comes_of_it_keeps_the_rules_of_the_contract() -> None:
    with pytest.raises(InvalidArgumentError, match=r"spec\.max_replicas"):
        updated({"maxReplicas": -1}, "spec.max_replicas")
