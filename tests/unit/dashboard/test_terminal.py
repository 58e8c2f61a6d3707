"""`gpuscalectl top`: what is drawn."""

from gpuscale.api.monitor.v1 import Node
from gpuscale.api.types.v1 import Gpu, GpuProcess, GpuReading, Snapshot
from gpuscale.client import connect_async
from gpuscale.dashboard.terminal import TABLES, Top, load_lines


def test_the_load_is_drawn_between_0_and_100_percent_whatever_it_has_been() -> None:
    assert load_lines([0, 6.25, 50, 56.25, 100, 140]) == ("   ▁██", " ▁████")
    assert load_lines([40, 41]) == ("  ", "▆▇"), "a small change does not fill the screen"


def test_processes_are_told_with_their_gpu_and_user() -> None:
    top = Top(connect_async)
    train = GpuProcess(pid=7, user="ann", program="train.py", reservation="reservations/r1")
    gpu = Gpu(index=3, reading=GpuReading(processes=[train, GpuProcess(pid=8, user="guy")]))
    top._facts.nodes["nodes/atlas"] = Node(name="nodes/atlas", snapshot=Snapshot(gpus=[gpu]))
    shown = [[row[column] for column in TABLES["processes"]] for row in top._rows("processes")]
    assert [(row[0], row[1], row[5], row[6]) for row in shown] == [
        ("atlas/3", "ann", "7", "r1"),
        ("atlas/3", "guy", "8", "none"),
    ]
