"""One program for every engine, and an engine that another package brings."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters import main as program
from tests.support.scripted_autoscaler import replica, scripted_autoscaler

ONE = replica(1)
ENGINE = """
from contextlib import asynccontextmanager
from typing import ClassVar

from pydantic import BaseModel

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import Remove, Sighting, Start, WorkerLife
from gpuscale.autoscaler.adapters.settings import EngineSettings, OpenEngine
from tests.support.fake_engine import FakeEngine


class Memory(FakeEngine):
    async def apply(self, steps):
        for step in steps:
            if isinstance(step, Start):
                self.show(step.replica, Sighting(WorkerLife.READY, pid=4711))
        return {}


class Template(BaseModel):
    size: int


class MemorySettings(EngineSettings):
    section: ClassVar[str] = "memory_adapter"
    kind: ClassVar[str] = "memory"
    description: ClassVar[str] = "Keeps replicas in mind."
    templates_field: ClassVar[str] = "memory_templates"

    memory_templates: dict[str, Template]

    @asynccontextmanager
    async def open_engine(self, host, /):
        yield OpenEngine(Memory(), api.AdapterCapabilities(gives_gpus=True))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a package that brings an engine, as pip leaves it."""
    (tmp_path / "memory_engine.py").write_text(ENGINE)
    info = tmp_path / "memory_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memory-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gpuscale.engines]\nmemory = memory_engine:MemorySettings\n")
    return tmp_path


@asynccontextmanager
async def adapter(*words: str, path: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    root = Path(__file__).resolve().parents[4]
    environment = {**os.environ, "PYTHONPATH": f"{path}:{root}"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program.__name__, *words), env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_an_engine_of_another_package_is_found_by_its_entry_point(installed: Path) -> None:
    config = installed / "adapter.toml"
    async with scripted_autoscaler() as (autoscaler, address):
        config.write_text(
            f'[memory_adapter]\nautoscaler_address = "{address}"\nadapter = "m"\ndata_dir = "{installed}/data"\n'
            "[memory_templates.worker]\nsize = 1\n"
        )
        async with adapter("memory", "--config", str(config), path=installed):
            await autoscaler.run(ONE, "worker")
            report = await autoscaler.shows(ONE, api.Replica.STATE_READY)
            assert report.pid == 4711
            [register] = autoscaler.registered
            assert (register.adapter, register.kind, list(register.templates)) == ("m", "memory", ["worker"])


def test_an_engine_that_nobody_brings_is_named_with_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpuscale-adapter", "nomad"])
    assert program.main() == 2
    assert capsys.readouterr().err == (
        "gpuscale-adapter nomad: error: no engine nomad is installed;"
        " there are container, ecs, kubernetes, process, ray, slurm\n"
    )


@pytest.mark.parametrize(
    ("called", "words", "section"),
    [
        ("gpuscale-adapter", ["--data-dir=d"], "adapter"),
        ("gpuscale-adapter", ["slurm", "--data-dir=d"], "slurm_adapter"),
        ("gpuscale-slurm-adapter", ["--data-dir=d"], "slurm_adapter"),
    ],
)
def test_the_name_of_the_program_or_its_first_word_says_which_engine(
    called: str, words: list[str], section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, list[str]]] = []
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{called}", *words])
    monkeypatch.setattr(program, "hide_memory", lambda: None)
    monkeypatch.setattr(
        program,
        "run_program",
        lambda settings, serve, argv, *, program, description: asked.append(
            (settings.section, program, argv)
        ),
    )
    program.main()
    name = "gpuscale-adapter slurm" if len(words) == 2 else called
    assert asked == [(section, name, ["--data-dir=d"])]
