"""The banner says what there is, and simulated GPUs loudly."""

from pathlib import Path

import pytest

from gpuscale.api.types.v1 import Gpu, Snapshot
from gpuscale.up.app import Running
from gpuscale.up.main import banner, gpus, hints
from gpuscale.up.settings import UpSettings
from tests.support.cli import Ran, python


def test_banner() -> None:
    running = Running("127.0.0.1:7070", Snapshot(simulated=True, gpus=[Gpu(), Gpu()]))
    first, *rest = banner(running, UpSettings(data_dir=Path("/data")))
    assert first.startswith("gpuscale ")
    assert first.endswith(" is up at 127.0.0.1:7070")
    simulated = "2 SIMULATED: no hardware stands behind them"
    assert rest == ["  dashboard  gpuscalectl dashboard", "  data       /data", f"  GPUs       {simulated}"]


def test_the_banner_has_the_link_to_the_dashboard() -> None:
    running = Running("127.0.0.1:7070", Snapshot(), "http://127.0.0.1:7080/open/x")
    assert "  dashboard  http://127.0.0.1:7080/open/x" in banner(running, UpSettings(data_dir=Path("/data")))


@pytest.mark.parametrize(
    "asked",
    [{"dashboard": False}, {"tokens_file": "t"}, {"tls_cert_file": "c", "tls_key_file": "k"}],
    ids=str,
)
def test_no_link_lets_in_where_tokens_or_certificates_are_asked_for(asked: dict[str, object]) -> None:
    assert UpSettings().serves_dashboard()
    assert not UpSettings.model_validate(asked).serves_dashboard()


def test_gpus() -> None:
    real = Snapshot(gpus=[Gpu(model="NVIDIA H100"), Gpu(model="NVIDIA H100"), Gpu(model="NVIDIA L4")])
    assert gpus(real) == "2 x NVIDIA H100, 1 x NVIDIA L4"
    assert gpus(Snapshot(gpu_problem="NVML: driver not loaded")) == "none: NVML: driver not loaded"
    assert gpus(Snapshot()) == "none: the driver reports none"


def test_hints_name_another_address() -> None:
    assert hints(Running("127.0.0.1:7070", Snapshot()))[0] == "next:  gpuscalectl get gpus"
    assert "--address 127.0.0.1:9" in hints(Running("127.0.0.1:9", Snapshot()))[0]


def test_it_loads_nothing_that_it_may_never_need() -> None:
    program = (
        "import sys; from gpuscale.cli import deferred; deferred.defer(); from gpuscale.up import app; app.open_all; "
        "from gpuscale.allocator.placing.placer import Placer, Use; Placer(Use()).set_cordons(frozenset({'nodes/a'})); "
        "late = ('rich', 'sqlalchemy.dialects.postgresql', 'httpx._client', 'aio_pika', 'alembic', 'psycopg', 'cryptography.x509.base', 'nicegui', 'numpy._core', 're2._re2'); "
        "print([name for name in late if name in sys.modules])"
    )
    assert python(program) == Ran(0, "[]\n", "")
