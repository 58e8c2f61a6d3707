"""Selectors, and the order in which things are listed."""

import random

import pytest

from gpuscale.cli.grammar.selecting import order, parse_selector

LABELS = {"zone": "a", "app.kubernetes.io/name": "x"}
DATA = {
    "name": "nodes/n1",
    "state": "NODE_STATE_ONLINE",
    "fence": "41",
    "status": {"readyReplicas": 2},
    "memory": "85899345920",
    "left": "90s",
    "share": 0.6,
}


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ("zone=a", True),
        ("zone==a", True),
        ("zone=b", False),
        ("zone!=b", True),
        ("zone!=a", False),
        ("zone", True),
        ("!zone", False),
        ("rack", False),
        ("!rack", True),
        ("rack!=3", True),
        ("zone=a,fence=41", True),
        ("zone=a,fence=42", False),
        ("state=online", True),
        ("state=ONLINE", True),
        ("state=NODE_STATE_ONLINE", True),
        ("state=LINE", False),
        ("status.ready_replicas=2", True),
        ("app.kubernetes.io/name=x", True),
        ("name=n1", False),
        ("status.readyReplicas>=2", True),
        ("status.readyReplicas > 2", False),
        ("status.readyReplicas<=2,fence<42", True),
        ("fence>41.5", False),
        ("fence<41.5", True),
        ("memory>=79GiB", True),
        ("memory>80GiB", False),
        ("left<2m", True),
        ("left<1m", False),
        ("share>=0.5", True),
        ("share>0.7", False),
        ("zone>=1", False),
        ("absent<1", False),
    ],
)
def test_a_selector(selector: str, *, fits: bool) -> None:
    assert all(condition.fits(LABELS, DATA) for condition in parse_selector(selector)) is fits


@pytest.mark.parametrize("text", ["", "=", "=a", "!zone=a", "zone=a,,b=c", "a b=c"])
def test_what_is_no_condition_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_selector(text)


@pytest.mark.parametrize("text", ["fence>", "fence>=many", "zone<b"])
def test_an_amount_is_compared_with_an_amount(text: str) -> None:
    with pytest.raises(ValueError, match="not a number, size or duration"):
        parse_selector(text)


def test_amounts_stand_in_order_then_texts_then_what_is_absent() -> None:
    wanted = [
        "0",
        "0.2",
        "0.7",
        "9",
        10,
        "37%",
        "1m30s",
        "210W",
        "512MiB",
        "12GiB/80GiB",
        "a",
        "b1",
        "zz",
        "-",
        "",
        None,
    ]
    mixed = list(wanted)
    random.Random(1).shuffle(mixed)
    ordered = sorted(mixed, key=order)
    assert [order(one) for one in ordered] == [order(one) for one in wanted]
    assert ordered[:13] == wanted[:13]
