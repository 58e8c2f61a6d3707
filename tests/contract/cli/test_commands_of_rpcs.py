"""What an operator may need has a command: each RPC is called by one, or stands here with the reason why not."""

from __future__ import annotations

import ast
from pathlib import Path

from gpuscale import cli
from gpuscale.cli.commands import apply
from tests.contract.descriptors import rpcs

PROGRAMS = "called by programs of ours, which the commands show the state of"
LIBRARIES = "of use to programs: the typed clients have it"
LISTED = "the list has it"
KEDA = "KEDA's contract, called by KEDA"
WITHOUT = {
    "NodeService/GetCordon": LISTED,
    "MetricService/GetMetric": LISTED,
    "PresetService/GetPreset": LISTED,
    "AgentService/WatchSnapshots": "the fleet has the same: get gpus --watch",
    "WorkService/AdmitWork": PROGRAMS,
    "AllocatorService/CheckLease": PROGRAMS,
    "PolicyService/TakeKillOrders": PROGRAMS,
    "PowerService/TakePowerCaps": PROGRAMS,
    "CertificateService/RenewCertificate": PROGRAMS,
    "TelemetryService/StreamTelemetry": PROGRAMS,
    "ServicesHostService/FollowFiles": PROGRAMS,
    "AdapterStreamService/Connect": PROGRAMS,
    "DecisionService/QuerySignals": "curves, which the dashboard draws; explain endpoint has the newest values",
    "MetricService/ReportMetrics": LIBRARIES,
    "AllocatorService/KeepAlive": LIBRARIES,
    "AllocatorService/BatchReserve": LIBRARIES,
    "AllocatorService/BatchRelease": LIBRARIES,
    "ExternalScaler/GetMetricSpec": KEDA,
    "ExternalScaler/GetMetrics": KEDA,
    "ExternalScaler/IsActive": KEDA,
    "ExternalScaler/StreamIsActive": KEDA,
    "ExternalScaler/StreamMetricSpec": KEDA,
}


def called() -> set[str]:
    """Names of all methods that the commands' code takes from a stub, or from anything else; a list is called and watched, and a resource deleted, by its request.

    `_reader` makes the requests of the nouns it is given, and `apply` those of its kinds.
    """
    [folder] = cli.__path__
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_reader":
            noun, *nouns = (one.value for one in node.args[3:] if isinstance(one, ast.Constant))
            names |= {f"Get{noun}Request", f"List{nouns[0] if nouns else f'{noun}s'}Request"}
    names |= {f"{verb}{kind}" for verb in ("Create", "Update") for kind in apply._SERVICES}
    listed = {
        name.removesuffix("Request") for name in names if name.startswith(("Get", "List", "Delete", "Cancel"))
    }
    return (
        names | listed | {name.replace("List", "Watch").replace("HealthEvents", "Health") for name in listed}
    )


def test_every_rpc_has_a_command_or_a_reason() -> None:
    names = {rpc.path.split(".")[-1]: rpc.method.name for rpc in rpcs()}
    by_a_command = called()
    missing = {name for name, method in names.items() if method not in by_a_command}
    assert missing - WITHOUT.keys() == set(), "neither a command nor a reason"
    assert WITHOUT.keys() - missing == set(), "has a command, or is no RPC"
