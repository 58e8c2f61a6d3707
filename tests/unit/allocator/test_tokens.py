"""Tokens of pages: they lead on from a fence, and tell it to nobody."""

from base64 import urlsafe_b64decode

import pytest

from gpuscale.allocator.domain.ledger import Tokens
from gpuscale.common.errors import InvalidArgumentError

TOKENS = Tokens([1, 2, 3, 4])


@pytest.mark.parametrize("fence", [1, 7, 2**40, 2**62])
def test_a_page_token_leads_back_to_its_fence_by_its_key_alone(fence: int) -> None:
    token = TOKENS.of_page(fence)
    assert TOKENS.fence_of_page(token) == fence
    assert TOKENS.of_page(fence) == token, "the same page has the same token"
    raw = urlsafe_b64decode(token + "==")
    assert str(fence).encode() not in raw
    assert fence.to_bytes(8, "big") not in raw
    with pytest.raises(InvalidArgumentError):
        Tokens([4, 3, 2, 1]).fence_of_page(token)


@pytest.mark.parametrize(
    "token", ["forged", "", "?", "A" * 22, TOKENS.of_page(7)[:-2], "a" + TOKENS.of_page(7)]
)
def test_a_token_that_was_not_given_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        TOKENS.fence_of_page(token)
    assert [one.field for one in caught.value.violations] == ["page_token"]


def test_tokens_that_follow_each_other_have_nothing_in_common() -> None:
    raw = [urlsafe_b64decode(TOKENS.of_page(fence) + "==") for fence in range(1, 200)]
    assert len({one[:8] for one in raw}) == len({one[8:] for one in raw}) == 199
