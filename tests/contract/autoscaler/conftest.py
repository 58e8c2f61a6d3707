"""One autoscaler for the tables of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.asking_autoscaler import Asking, asking


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asking]:
    async with asking(tmp_path) as found:
        yield found
