"""The fixture `nvml_double`: a machine with two idle GPUs that this process finds in the place of a driver."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nvml_double import NvmlDouble, in_process, why_unavailable


@pytest.fixture
def nvml_double(tmp_path: Path) -> Iterator[NvmlDouble]:
    """Change `gpus` and `write`; after the test the library is "not found" again, as without a driver."""
    reason = why_unavailable()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with in_process(NvmlDouble(tmp_path)) as double:
        yield double
