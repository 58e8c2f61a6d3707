"""Pages of a list."""

import base64

import pytest

from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.wire import page

ITEMS = [f"{number:05}" for number in range(2500)]


def pages_of(
    items: list[str], size: int = 0, token: str = "", descending: bool = False
) -> tuple[list[str], str]:
    return page(items, key=lambda item: item, page_size=size, page_token=token, descending=descending)


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 100), (1, 1), (1000, 1000), (1001, 1000), (2**31 - 1, 1000)]
)
def test_page_size_has_a_default_and_a_limit(asked: int, given: int) -> None:
    assert len(pages_of(ITEMS, asked)[0]) == given


def test_negative_page_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pages_of(ITEMS, -1)
    assert caught.value.violations[0].field == "page_size"


def test_the_last_page_has_no_token() -> None:
    assert pages_of(ITEMS[:100])[1] == ""
    assert pages_of(ITEMS[:101])[1] != ""
    assert pages_of([]) == ([], "")


def test_items_that_come_and_go_between_pages_move_nothing() -> None:
    first, token = pages_of(["b", "d", "f"], 2)
    assert first == ["b", "d"]
    assert pages_of(["a", "c", "e", "f"], 2, token) == (["e", "f"], "")


def test_newest_first() -> None:
    first, token = pages_of(["c", "b", "a"], 2, descending=True)
    assert (first, pages_of(["d", "c", "b", "a"], 2, token, descending=True)) == (["c", "b"], (["a"], ""))


def _forged() -> list[str]:
    token = pages_of(ITEMS, 2)[1]
    return [
        "x",
        "?",
        "ä",
        token[:-1],
        token + "A",
        token.swapcase(),
        token + "=",
        base64.urlsafe_b64encode(b"00001").decode(),
        base64.urlsafe_b64encode(b"\xff" * 20).decode(),
    ]


@pytest.mark.parametrize("token", _forged())
def test_forged_tokens_are_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pages_of(ITEMS, 2, token)
    assert caught.value.violations[0].field == "page_token"


def test_a_token_of_the_other_direction_is_refused() -> None:
    token = pages_of(ITEMS, 2)[1]
    with pytest.raises(InvalidArgumentError):
        pages_of(ITEMS[::-1], 2, token, descending=True)
