"""A filter says the same as the same question in Python, and no text breaks it."""

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import compile_filter

Question = tuple[str, Callable[[api.Quota], bool]]
TENANTS = st.sampled_from(["a", "ab", "b*", 'c"', "\\"])
HELD = st.integers(-2, 2)
LIMITS = st.none() | HELD
QUOTAS = st.builds(api.Quota, tenant=TENANTS, gpu_milli_held=HELD, gpu_milli_limit=LIMITS)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\{one}" if one in '\\"*' else one for one in text) + '"'


def atoms() -> st.SearchStrategy[Question]:
    def of_text(text: str) -> list[Question]:
        return [
            (f"tenant = {quoted(text)}", lambda one: one.tenant == text),
            (f"tenant != {quoted(text)}", lambda one: one.tenant != text),
            (f"tenant:{quoted(text)}", lambda one: text in one.tenant),
            (f'tenant = {quoted(text)[:-1]}*"', lambda one: one.tenant.startswith(text)),
            (f"tenant<{quoted(text)}", lambda one: one.tenant < text),
        ]

    def of_number(number: int) -> list[Question]:
        def is_limited(one: api.Quota) -> bool:
            return one.HasField("gpu_milli_limit")

        return [
            (f"gpu_milli_held >= {number}", lambda one: one.gpu_milli_held >= number),
            (f"gpu_milli_limit < {number}", lambda one: is_limited(one) and one.gpu_milli_limit < number),
            (f"gpu_milli_limit!={number}", lambda one: not is_limited(one) or one.gpu_milli_limit != number),
            ("gpu_milli_limit:*", is_limited),
        ]

    return TENANTS.map(of_text).flatmap(st.sampled_from) | HELD.map(of_number).flatmap(st.sampled_from)


def negated(one: Question) -> Question:
    return f"NOT ({one[0]})", lambda quota: not one[1](quota)


def both(word: str, of: Callable[[list[bool]], bool]) -> Callable[[list[Question]], Question]:
    def join(parts: list[Question]) -> Question:
        text = f" {word} ".join(f"({one[0]})" for one in parts)
        return text, lambda quota: of([question(quota) for _, question in parts])

    return join


QUESTIONS = st.recursive(
    atoms(),
    lambda inner: (
        inner.map(negated)
        | st.lists(inner, min_size=2, max_size=3).map(both("AND", all))
        | st.lists(inner, min_size=2, max_size=3).map(both("OR", any))
    ),
    max_leaves=6,
)


@given(question=QUESTIONS, quota=QUOTAS)
def test_a_filter_says_what_python_says(question: Question, quota: api.Quota) -> None:
    text, expected = question
    assert compile_filter(text, api.Quota)(quota) == expected(quota), text


WORDS = ["tenant", "weight", "quota.x", "(", ")", '"', "\\", "NOT", "AND", "OR", "=", ":", "*", ",", "1"]


@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS)).map(" ".join))
@example("tenant:")
@example('tenant = "\\"')
@example("NOT")
def test_any_text_is_a_filter_or_is_refused_by_name(text: str) -> None:
    refused = ["filter"]
    try:
        compile_filter(text, api.Quota)(api.Quota(tenant="a"))
    except InvalidArgumentError as error:
        refused = [one.field for one in error.violations]
    assert refused == ["filter"]
