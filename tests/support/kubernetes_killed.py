"""A crew of the Kubernetes adapter that wants two replicas, for a test that kills it: KUBECONFIG DATA."""

import asyncio
import sys
from pathlib import Path

from tests.support.kubernetes_adapter import desired, running


async def main(kubeconfig: str, data: str) -> None:
    """Go on until somebody ends it."""
    async with running(Path(kubeconfig), Path(data), adapter="kubernetes") as site:
        site.want([desired(replica) for replica in "ab"])
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
