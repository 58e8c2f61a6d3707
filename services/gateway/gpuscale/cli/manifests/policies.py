"""Policies to run a backtest with, from files.

    kind: Policy
    name: ours
    preset: {preset: gpuscale, slots: 8, goal: 5s}
    ---
    kind: Endpoint
    name: jobs
    spec: {minReplicas: 1, ...}

A policy is a preset or a spec, by the protobuf JSON mapping; an endpoint, as `apply` takes it, stands for its spec.
"""

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.manifests.documents import fill
from gpuscale.cli.manifests.yaml_tree import Entries, Scalar, Tree, read_documents

KINDS = ("Policy", "Endpoint")


def parse_policies(text: str, source: str) -> list[api.BacktestPolicy]:
    """The policies of all documents of a text; `source` is what to call it in complaints.

    Raises:
        ManifestError: it is not YAML, or not what the contract allows.
    """
    return [_policy(document) for document in read_documents(text, source)]


def _policy(document: Tree) -> api.BacktestPolicy:
    if not isinstance(document, Entries):
        raise document.place.error("must be a mapping")
    by_key = {key.text: value for key, value in document.entries}
    given = by_key.get("kind")
    kind = given.text if isinstance(given, Scalar) else ""
    if kind not in KINDS:
        place = (given or document).place
        raise place.error(f"kind must be {' or '.join(KINDS)}" + (f", not {kind}" if kind else ""))
    rest = Entries(document.place, [entry for entry in document.entries if entry[0].text != "kind"])
    policy = api.BacktestPolicy()
    if kind == "Endpoint":
        endpoint = api.Endpoint()
        fill(endpoint, rest)
        policy.name = endpoint.name.removeprefix("endpoints/")
        policy.spec.CopyFrom(endpoint.spec)
    else:
        fill(policy, rest)
    if not policy.name:
        raise document.place.error("name is missing")
    if policy.WhichOneof("policy") is None:
        raise document.place.error("preset is missing, or spec")
    return policy
