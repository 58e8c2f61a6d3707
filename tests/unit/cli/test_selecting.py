"""Selectors, and the order in which things are listed."""

import random
from typing import Any

import pytest

from gpuscale.api.allocator.v1 import Reservation
from gpuscale.api.autoscaler.v1 import Endpoint
from gpuscale.api.monitor.v1 import Node
from gpuscale.api.types.v1 import Gpu
from gpuscale.cli.console.output import Chosen
from gpuscale.cli.grammar.selecting import order, parse_selector
from gpuscale.cli.views.allocator import JOBS
from gpuscale.cli.views.autoscaler import ENDPOINTS
from gpuscale.cli.views.monitor import gpus, nodes
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import compile_filter

NODE: Any = {
    "name": "nodes/n1",
    "state": "NODE_STATE_ONLINE",
    "agent_version": 'a "new" one',
    "snapshot": {
        "seq": 41,
        "age": {"seconds": 90},
        "host": {"labels": {"zone": "a", "app.kubernetes.io/name": "x"}},
        "host_reading": {"cpu_count": 2, "load_1m": 0.6, "memory_total_bytes": 85899345920},
        "gpus": [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}],
    },
}


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ("zone=a", True),
        ("zone==a", True),
        ("zone=b", False),
        ("zone!=a", False),
        ("zone", True),
        ("!zone", False),
        ("!rack", True),
        ("zone=a,snapshot.seq=41", True),
        ("zone=a,snapshot.seq=42", False),
        ("state=online", True),
        ("state=STALE", False),
        ("app.kubernetes.io/name=x", True),
        ("name=n1", False),
        ("name=nodes/*", True),
        ('agentVersion=a "new" one', True),
        ("snapshot.host.labels.zone=a", True),
        ("snapshot.host_reading.cpuCount>=2", True),
        ("snapshot.hostReading.cpuCount<=2,snapshot.seq<42", True),
        ("snapshot.seq<41.5", True),
        ("snapshot.hostReading.memoryTotalBytes>=79GiB", True),
        ("snapshot.hostReading.memoryTotalBytes=80GiB", True),
        ("snapshot.age<2m", True),
        ("snapshot.hostReading.load1m>=0.5", True),
        ("snapshot.hostReading.load5m<1", False),
        ("snapshot.gpus.uuid=GPU-2", True),
        ("snapshot.gpus[*].uuid=GPU-3", False),
    ],
)
def test_a_selector_is_a_filter_of_the_api(selector: str, *, fits: bool) -> None:
    text = Chosen(parse_selector(selector)).to_filter(Node.DESCRIPTOR, nodes())
    assert compile_filter(text, Node)(Node(**NODE)) is fits, text


def test_columns_are_not_sent_and_what_was_typed_as_a_filter_is() -> None:
    chosen = Chosen(parse_selector("agent=x,name=a"), "state = ONLINE OR state = STALE")
    assert chosen.to_filter(Node.DESCRIPTOR, nodes()) == 'state = ONLINE OR state = STALE AND name="a"'


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        ("state=running", 'job.state="running"'),
        ("exit_code>0,holder=ann", 'job.exit_code>"0" AND holder="ann"'),
        ("node=beta", ""),
        ("team=x", 'labels.team="x"'),
        ("user=ann", 'labels.user="ann"'),
        ("state=active,state=leaving", 'state="active"'),
    ],
)
def test_of_a_job_its_state_is_asked_and_not_that_of_its_reservation(selector: str, text: str) -> None:
    assert Chosen(parse_selector(selector)).to_filter(Reservation.DESCRIPTOR, JOBS) == text
    assert text == "" or compile_filter(text, Reservation) is not None


@pytest.mark.parametrize(
    ("selector", "kept"),
    [
        ("model=h100", "ab"),
        ("model=NVIDIA H100 80GB HBM3", "ab"),
        ("model!=H100", "c"),
        ("model=H", ""),
        ("model", "abc"),
        ("state=cordoned", "b"),
        ("state!=CORDONED", "ac"),
        ("state=ok", "ab"),
        ("holder=ann", "a"),
    ],
)
def test_gpus_are_selected_by_what_their_table_shows_too(selector: str, kept: str) -> None:
    found = [
        Gpu(name=f"nodes/n/gpus/{name}", uuid=name, model=model, state=state)
        for name, model, state in (
            ("a", "NVIDIA H100 80GB HBM3", "GPU_STATE_OK"),
            ("b", "NVIDIA H100 80GB HBM3", "GPU_STATE_OK"),
            ("c", "NVIDIA L40S", "GPU_STATE_LOST"),
        )
    ]
    view, chosen = gpus({"a": "ann"}, {found[1].name: "CORDONED"}), Chosen(parse_selector(selector))
    meets = compile_filter(chosen.to_filter(Gpu.DESCRIPTOR, view), Gpu)
    assert "".join(one.name[-1] for one in chosen.pick([*filter(meets, found)], view)[0]) == kept


@pytest.mark.parametrize(
    ("selector", "of", "said"),
    [
        ("nmae=x", Endpoint, "unknown field 'nmae'; did you mean name?"),
        ("readyy>1", Endpoint, "did you mean READY?"),
        ("name>=3", Endpoint, "name has no amount: compare it with = or !="),
        ("zone>=3", Node, "zone has no amount"),
        ("state=runing", Reservation, "unknown value 'runing'; did you mean RUNNING?"),
        ("state=onlin", Node, "unknown value 'onlin'; did you mean ONLINE?"),
    ],
)
def test_what_cannot_be_asked_is_said(selector: str, of: Any, said: str) -> None:
    view: Any = {Node: nodes(), Reservation: JOBS, Endpoint: ENDPOINTS}[of]
    with pytest.raises(InvalidArgumentError, match=f"--selector: .*{said}".replace("?", "[?]")):
        Chosen(parse_selector(selector)).to_filter(of.DESCRIPTOR, view)


@pytest.mark.parametrize("text", ["", "=", "=a", "!zone=a", "zone=a,,b=c", "a b=c"])
def test_what_is_no_condition_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_selector(text)


@pytest.mark.parametrize("text", ["fence>", "fence>=many", "zone<b"])
def test_an_amount_is_compared_with_an_amount(text: str) -> None:
    with pytest.raises(ValueError, match="not a number, size or duration"):
        parse_selector(text)


def test_amounts_stand_in_order_then_texts_then_what_is_absent() -> None:
    amounts = ["0", "0.2", "0.7", "9", 10, "37%", "1m30s", "210W", "512MiB", "12GiB/80GiB"]
    wanted = [*amounts, "a", "b1", "zz", "-", "", None]
    mixed = list(wanted)
    random.Random(1).shuffle(mixed)
    ordered = sorted(mixed, key=order)
    assert [order(one) for one in ordered] == [order(one) for one in wanted]
    assert ordered[:13] == wanted[:13]
