"""Which versions work together."""

import pytest

from gpuscale.cli.commands.upgrade import fits


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("0.1.0", "0.1.9", True),
        ("0.2.0", "0.1.0", True),
        ("0.1.0rc1", "0.2.0.dev3", True),
        ("0.3.0", "0.1.0", False),
        ("1.1.0", "0.1.0", False),
        ("1.10.0", "1.9.2", True),
        ("1.10.0", "1.1.0", False),
        ("", "0.1.0", False),
        ("unknown", "unknown", False),
    ],
)
def test_minor_versions_are_one_apart_at_most(one: str, other: str, expected: bool) -> None:
    assert (fits(one, other), fits(other, one)) == (expected, expected)
