"""Sizes and durations as people write them."""

import pytest

from gpuscale.cli.grammar.parameters import format_duration, format_size
from gpuscale.common.sizes import counted, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 1024**3),
        ("1.5TiB", 1_649_267_441_664),
        ("0.1KiB", 102),
        ("5gib", 5 * 1024**3),
        ("7", 7),
        (" 80 GiB ", 80 * 1024**3),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1..5GiB", "8 Gibi", "1e3", "9223372036854775808", "9EiB"]
)
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("250ms", 0.25), ("1.5h", 5400), ("7", 7), ("1m5ms", 60.005)]
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5s1h", "1h1h", "5 m", "inf", "nan", "9" * 400])
def test_parse_duration_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (85_899_345_920, "80GiB"),
        (2**60, "1024PiB"),
    ],
)  # fmt: skip
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0ms"), (0, "0ms"), (0.85, "850ms"), (1, "1s"), (59.9, "59s"), (185, "3m5s"), (7620, "2h7m"),
        (349_200, "4d1h"),
    ],
)  # fmt: skip
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_one_of_something_is_no_plural() -> None:
    assert [counted(count, "GPU") for count in (0, 1, 1.0, 1.5)] == ["0 GPUs", "1 GPU", "1 GPU", "1.5 GPUs"]
    assert [counted(count, "copy is", "copies are") for count in (1, 2)] == ["1 copy is", "2 copies are"]
