"""Walking the pages shows every item once, whatever the keys (which are never empty), the size and the direction."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.api.allocator import v1 as api
from gpuscale.common.filters import listed

KEYS = st.lists(
    st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()), unique=True, max_size=40
)


def quota(tenant: str) -> api.Quota:
    return api.Quota(tenant=tenant)


@given(keys=KEYS, size=st.integers(1, 12), descending=st.booleans())
def test_walking_the_pages_shows_every_item_once_and_in_order(
    keys: list[str], size: int, descending: bool
) -> None:
    items = sorted(keys, reverse=descending)
    seen: list[str] = []
    token = ""
    for _ in range(len(items) + 1):
        request = api.ListQuotasRequest(page_size=size, page_token=token)
        shown, token = listed(items, request, api.Quota, key=str, encode=quota, descending=descending)
        assert len(shown) <= size
        seen += [one.tenant for one in shown]
        assert bool(token) is (len(seen) < len(items))
        if not token:
            break
    assert seen == items
