"""What is written can be read again, and nothing else is accepted by accident."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.cli.grammar.parameters import format_duration, format_size
from gpuscale.common.sizes import duration_text, parse_duration, parse_size


@given(st.integers(0, 2**63 - 1))
def test_a_plain_number_of_bytes_is_itself(size: int) -> None:
    assert parse_size(str(size)) == size


@given(st.integers(0, 2**62))
def test_a_formatted_size_reads_back_within_its_rounding(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= max(0.05 * size, 0)


@given(st.integers(0, 10**9), st.sampled_from(["B", "KB", "KiB", "MB", "MiB", "GB", "GiB"]))
def test_units_multiply(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * parse_size(f"1{unit}")


@given(st.integers(1, 10**9))
def test_a_formatted_duration_reads_back_as_no_more_and_not_much_less(seconds: int) -> None:
    read = parse_duration(format_duration(seconds))
    assert read <= seconds < read * 1.05 + 1
    assert parse_duration(duration_text(seconds)) == seconds


@given(st.text(max_size=20))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0
