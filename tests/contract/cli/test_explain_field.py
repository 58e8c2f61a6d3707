"""`explain` knows every field of the contract, with its comment and its bounds, as the .proto files state them."""

from __future__ import annotations

import json

import pytest

from gpuscale.cli.grammar.nouns import NOUNS
from gpuscale.cli.views import contract_docs
from tests.support.cli import run_cli


def test_a_field_is_explained_by_its_comment_and_bounds() -> None:
    assert run_cli("explain", "endpoint.spec.min_replicas").out == (
        "endpoint.spec.min_replicas   int32   in JSON: minReplicas\n"
        "Fewest replicas, whatever the rules say.\n"
        "Bounds: min 0, max 100000.\n"
    )
    found = json.loads(run_cli("explain", "ep.spec.minReplicas", "-o", "json").out)
    assert (found["type"], found["jsonName"]) == ("int32", "minReplicas")
    assert found["bounds"] == "min 0, max 100000"


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.plural)
def test_every_kind_has_all_of_its_fields_explained(noun: tuple[str, ...]) -> None:
    for name in filter(None, noun[1:]):
        found = json.loads(run_cli("explain", name, "-o", "json").out)
        assert found["description"]
        assert len(found["parts"]) > 1
        assert [part["name"] for part in found["parts"] if not part["description"]] == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ep.spec.mode", "SCALING_MODE_SHADOW"),
        ("Ask.node_labels", "map<string, string>"),
        ("rule.step.threshold", "double"),
        ("endpoint.spec.rules", "Rule[]"),
        ("reservation.ttl", "Duration"),
    ],
)
def test_every_sort_of_field(path: str, said: str) -> None:
    assert said in run_cli("explain", path).out


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("endpoint.spec.min_replica", "did you mean min_replicas?"),
        ("endpont.spec", "did you mean endpoint?"),
        ("endpoint.etag.x", "has no fields"),
        ("Nothing", "unknown kind 'Nothing'"),
    ],
)
def test_what_there_is_not_is_3_and_offers_the_near_miss(path: str, said: str) -> None:
    ran = run_cli("explain", path)
    assert (ran.code, ran.out) == (3, "")
    assert said in ran.err


def test_every_comment_of_the_contract_is_shipped() -> None:
    """The generated descriptor set lags behind nothing: each field of gpuscale's own messages has its comment."""
    pool, comments = contract_docs.contract()
    own = [name for name in comments if name.startswith("gpuscale.api.") and ".v1." in name]
    assert len(own) > 1000
    files = {pool.FindFileContainingSymbol(name).name for name in own if name.count(".") == 4}
    messages = [one for file in files for one in pool.FindFileByName(file).message_types_by_name.values()]
    assert len(messages) > 100
    missing = [field.full_name for one in messages for field in one.fields if field.full_name not in comments]
    assert missing == []


def test_a_tree_of_fields_has_a_line_for_each() -> None:
    for noun in NOUNS:
        assert run_cli("explain", noun.plural, "--recursive").code == 0, "a message is in itself"
    lines = run_cli("explain", "endpoint", "--recursive").out.splitlines()
    assert lines[0] == "endpoint   Endpoint"
    assert lines.index("    min_replicas   int32") < lines.index("    template   ReplicaTemplate")
    assert "      nanos   int32" not in lines
    shown = run_cli("explain", "ep.spec", "--recursive", "-o", "json")
    assert {part["name"] for part in json.loads(shown.out)["parts"]} >= {"rules", "template"}
