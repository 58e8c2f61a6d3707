"""What a client does against services of another release: run by a test as a program of one of the two, `calls.py ADDRESS`.

It reads steps, and writes what each comes to, a line for each.
"""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import Client, connect
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, NotFoundError

Facts = dict[str, object]
ENDPOINT = "endpoints/workers"


def nodes(client: Client) -> Facts:
    found = client.fleet.ListNodes(monitor_api.ListNodesRequest()).nodes
    shown = [(one.name, monitor_api.NodeState.Name(one.state), len(one.snapshot.gpus)) for one in found]
    return {"nodes": shown}


def reserve(client: Client) -> Facts:
    """Two reservations: one is renewed and given back, one is kept."""
    facts: Facts = {}
    for holder in ("brief", "lasting"):
        wanted = allocator_api.ReserveRequest(
            request_id=str(uuid.uuid4()), holder=holder, ask={"gpu_count": 1}
        )
        wanted.ttl.seconds = 3600
        granted = client.allocator.Reserve(wanted)
        again = client.allocator.Reserve(wanted)
        held = granted.reservation
        renewal = allocator_api.RenewReservationRequest(name=held.name, fence=held.fence)
        client.allocator.RenewReservation(renewal)
        facts[holder] = held.name if again.reservation.name == held.name else "granted twice"
        if holder == "brief":
            release = allocator_api.ReleaseReservationRequest(name=held.name, fence=held.fence)
            client.allocator.ReleaseReservation(release)
    return facts


def held(client: Client) -> Facts:
    found = client.allocator.ListReservations(allocator_api.ListReservationsRequest()).reservations
    return {"holders": sorted(one.holder for one in found), "gpus": [len(one.gpus) for one in found]}


def scale(client: Client) -> Facts:
    endpoint = autoscaler_api.Endpoint(name=ENDPOINT)
    endpoint.spec.min_replicas = endpoint.spec.max_replicas = 1
    endpoint.spec.template.template = "worker"
    wanted = autoscaler_api.CreateEndpointRequest(endpoint=endpoint, request_id=str(uuid.uuid4()))
    return {"created": client.endpoints.CreateEndpoint(wanted).endpoint.name}


def replicas(client: Client) -> Facts:
    request = autoscaler_api.ListReplicasRequest(parent=ENDPOINT)
    found = client.endpoints.ListReplicas(request).replicas
    return {"states": [autoscaler_api.Replica.State.Name(one.state) for one in found]}


def decisions(client: Client) -> Facts:
    """Whether each decision that was evaluated comes to the same again."""
    request = autoscaler_api.ListDecisionsRequest(parent=ENDPOINT)
    equal: list[bool] = []
    for one in client.decisions.ListDecisions(request).decisions:
        try:
            verdict = client.decisions.VerifyDecision(autoscaler_api.VerifyDecisionRequest(name=one.name))
        except FailedPreconditionError:  # an order, or what was done about an evaluation
            continue
        equal.append(verdict.equal)
    return {"equal": equal}


def unknown(client: Client) -> Facts:
    """An error reaches a client of the other release as what it is."""
    try:
        client.endpoints.GetEndpoint(autoscaler_api.GetEndpointRequest(name="endpoints/none"))
    except NotFoundError as error:
        return {"error": type(error).__name__}
    return {}


def backtest(_: Client) -> Facts:
    """By the CLI, which falls back on what an older service has."""
    program = [sys.executable, "-c", "from gpuscale.cli import start; start()", "--address", sys.argv[1]]
    load = [f"--preset={name}" for name in ("hpa", "keda")]
    command = [*program, "backtest", *load, "--trace", "-", "--slo", "5s", "-o", "json"]
    trace = "arrival_seconds,service_seconds\n" + "".join(f"{second},4\n" for second in range(100))
    ran = subprocess.run(command, input=trace, capture_output=True, text=True, timeout=60, check=True)
    return {"policies": [one["name"] for one in json.loads(ran.stdout)["reports"]]}


STEPS: dict[str, Callable[[Client], Facts]] = {
    one.__name__: one for one in (nodes, reserve, held, scale, replicas, decisions, unknown, backtest)
}

if __name__ == "__main__":
    for line in sys.stdin:
        try:
            with connect(sys.argv[1]) as connected:
                answer = STEPS[line.strip()](connected)
        except GpuscaleError as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)
