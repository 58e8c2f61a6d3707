"""Walking the pages shows every item once, whatever the keys (which are never empty), the size, the order and the direction."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.api.allocator import v1 as api
from gpuscale.common.filters import listed

KEYS = st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable())


def quota(pair: tuple[str, int]) -> api.Quota:
    return api.Quota(tenant=pair[0], gpu_milli_held=pair[1])


@given(
    held=st.dictionaries(KEYS, st.integers(0, 3), max_size=40),
    size=st.integers(1, 12),
    descending=st.booleans(),
    order=st.sampled_from(["", "gpu_milli_held", "gpu_milli_held desc"]),
)
def test_walking_the_pages_shows_every_item_once_and_in_order(
    held: dict[str, int], size: int, descending: bool, order: str
) -> None:
    items = sorted(held.items(), reverse=descending)
    wanted = [tenant for tenant, _ in items]
    if order:
        wanted.sort(key=lambda tenant: -held[tenant] if order.endswith("desc") else held[tenant])
    seen: list[str] = []
    token = ""
    for _ in range(len(items) + 1):
        request = api.ListQuotasRequest(page_size=size, page_token=token, order_by=order)
        shown, token = listed(
            items, request, api.Quota, key=lambda pair: pair[0], encode=quota, descending=descending
        )
        assert len(shown) <= size
        seen += [one.tenant for one in shown]
        assert bool(token) is (len(seen) < len(items))
        if not token:
            break
    assert seen == wanted
