"""Who is wired to whom by NVLink, from what each GPU says of its own links."""

from gpuscale.monitor.agent.gpus import wire


def test_links_between_two_gpus_are_counted() -> None:
    assert wire({"a": ("b", "b", "c"), "b": ("a", "a"), "c": ("a",)}) == {
        "a": (("b", 2), ("c", 1)),
        "b": (("a", 2),),
        "c": (("a", 1),),
    }


def test_through_a_switch_each_reaches_each_over_the_fewer_of_their_links() -> None:
    assert wire({"a": (None,) * 4, "b": (None,) * 2, "c": (None,) * 4, "d": ()}) == {
        "a": (("b", 2), ("c", 4)),
        "b": (("a", 2), ("c", 2)),
        "c": (("a", 4), ("b", 2)),
        "d": (),
    }
