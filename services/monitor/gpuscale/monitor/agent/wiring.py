"""Which GPUs of a host are wired to each other, from what each says of its own NVLinks. Pure."""

from collections import Counter
from collections.abc import Mapping


def wire(ends: Mapping[str, tuple[str | None, ...]]) -> dict[str, tuple[tuple[str, int], ...]]:
    """How many NVLinks lead from each GPU to each other one, by UUID.

    Through a switch every GPU reaches every other that has links to one, over as many as the one with fewer has.

    Args:
        ends: for each GPU, the GPU at the other end of each of its links; None where that is a switch.
    """
    switched = {uuid: found.count(None) for uuid, found in ends.items()}
    peers: dict[str, tuple[tuple[str, int], ...]] = {}
    for uuid, found in ends.items():
        counts = Counter(end for end in found if end is not None)
        for other, links in switched.items():
            if other != uuid:
                counts[other] += min(links, switched[uuid])
        peers[uuid] = tuple(sorted((other, count) for other, count in counts.items() if count))
    return peers
