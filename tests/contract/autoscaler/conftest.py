"""One autoscaler for the tables of a module."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.asking_autoscaler import Asking, asking


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    """It only answers questions: nothing is left of one table for the next."""
    async with asking(tmp_path_factory.mktemp("autoscaler")) as found:
        yield found
