"""Any text becomes an id, and two texts stay two ids."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from gpuscale.common import names
from gpuscale.common.wire import seconds, to_duration

# TEXT_FORMAT_ID, as options.proto words it: an independent reading of the rule.
ID = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?\Z")


def is_an_id(text: str) -> bool:
    return 1 <= len(text) <= 63 and ID.match(text) is not None


@given(st.text(alphabet="ab01.-_ A\n/", max_size=70))
def test_is_id_says_what_the_contract_says(text: str) -> None:
    assert names.is_id(text) == is_an_id(text)


@given(st.text())
@example("")
@example("-" * 63)
@example("\ud800")
def test_any_text_becomes_an_id_that_stays_the_same(text: str) -> None:
    made = names.to_id(text)
    assert is_an_id(made)
    assert names.to_id(made) == made


@given(st.text(max_size=80), st.text(max_size=80))
def test_two_texts_are_two_ids(first: str, second: str) -> None:
    assert (names.to_id(first) == names.to_id(second)) == (first.lower() == second.lower())


@given(st.from_regex(ID, fullmatch=True).filter(is_an_id), st.from_regex(ID, fullmatch=True).filter(is_an_id))
def test_a_name_gives_back_the_ids_it_was_made_of(node: str, gpu: str) -> None:
    assert names.match(names.GPU, names.gpu_name(node, gpu)) == {"node": node, "gpu": gpu}


@given(st.floats(min_value=-3e8, max_value=3e8, allow_nan=False))
def test_seconds_survive_the_wire_to_the_nanosecond(value: float) -> None:
    assert abs(seconds(to_duration(value)) - value) <= 1e-9 + abs(value) * 2**-52
