"""`gpuscalectl top`: what is drawn."""

import pytest

from gpuscale.api.allocator.v1 import Reservation, ReservedGpu
from gpuscale.api.monitor.v1 import Node
from gpuscale.api.types.v1 import Gpu, GpuProcess, GpuReading, HostReading, Snapshot
from gpuscale.client import connect_async
from gpuscale.client.states import NO_MARKS
from gpuscale.dashboard import answers, rows
from gpuscale.dashboard.terminal import TABLES, Top, load_lines


def test_the_load_is_drawn_between_0_and_100_percent_whatever_it_has_been() -> None:
    assert load_lines([0, 6.25, 50, 56.25, 100, 140]) == ("   ▁██", " ▁████")
    assert load_lines([40, 41]) == ("  ", "▆▇"), "a small change does not fill the screen"


def test_processes_are_told_with_their_gpu_and_user() -> None:
    top = Top(connect_async)
    train = GpuProcess(pid=7, user="ann", program="train.py", reservation="reservations/r1")
    gpu = Gpu(index=3, reading=GpuReading(processes=[train, GpuProcess(pid=8, user="guy")]))
    top._facts.nodes["nodes/atlas"] = Node(name="nodes/atlas", snapshot=Snapshot(gpus=[gpu]))
    shown = [[row[column] for column in TABLES["processes"]] for row in top._rows("processes", [])]
    told = [(row[0], row[1], row[5], row[6]) for row in shown]
    assert told == [("atlas/3", "ann", "7", "r1"), ("atlas/3", "guy", "8", "none")]


def test_the_row_of_a_host_tells_its_cpu_and_memory_and_nothing_that_is_not_known() -> None:
    read = HostReading(
        cpu_percent=0, memory_used_bytes=1 << 30, memory_total_bytes=4 << 30, load_1m=1.5, cpu_count=8
    )
    row = rows.host_row(Node(name="nodes/atlas", snapshot=Snapshot(host_reading=read)), NO_MARKS)
    assert (row["gpu"], row["util"], row["memory"]) == ("atlas", "0 %", "1.0 / 4.0 GiB")
    assert row["model"] == "load 1.5 on 8 cores"
    row = rows.host_row(Node(name="nodes/atlas"), NO_MARKS)
    assert (row["util"], row["memory"], row["model"]) == ("-", "- / -", "")


HELD = Reservation(name="reservations/r1", holder="ann", gpus=[ReservedGpu(uuid="GPU-1")])
JOB = Reservation(name="reservations/r2", holder="ann", job={"title": "night"})
REPLICA = Reservation(name="reservations/r3", holder="endpoints/chat/replicas/a")


@pytest.mark.parametrize(
    ("table", "row", "held", "why", "logs", "end"),
    [
        ("gpus", {"gpu": "a/0", "uuid": "GPU-1"}, HELD, "explain reservation r1", "", "release r1"),
        ("gpus", {"gpu": "a/1", "uuid": "GPU-2"}, None, "describe gpu GPU-2", "", ""),
        ("gpus", {"gpu": "a"}, None, "describe node a", "", ""),
        ("reservations", {"name": "r2"}, JOB, "explain reservation r2", "logs r2 --follow", "stop job r2"),
        ("reservations", {"name": "gone"}, None, "", "", ""),
        ("reservations", {"name": "r3"}, REPLICA, "explain reservation r3", "logs chat/a --follow", "release r3"),
        ("endpoints", {"name": "chat"}, None, "explain endpoint chat", "logs chat --follow", ""),
        ("decisions", {"name": "endpoints/chat/decisions/7"}, None, "explain decision chat/7", "logs chat --follow", ""),
        ("health", {"uuid": "GPU-1", "where": "a/0"}, None, "describe gpu GPU-1", "", ""),
        ("health", {"uuid": "", "where": "a"}, None, "describe node a", "", ""),
        ("processes", {"gpu": "a/1", "reservation": "none"}, None, "describe gpu a/1", "", ""),
        ("processes", {"gpu": "a/1", "reservation": "r2"}, JOB, "explain reservation r2", "logs r2 --follow", "stop job r2"),
    ],
)  # fmt: skip
def test_what_is_typed_about_a_row(
    table: str, row: rows.Row, held: Reservation | None, why: str, logs: str, end: str
) -> None:
    assert answers.of_row(table, row, [REPLICA, JOB, HELD]) == held
    assert " ".join(answers.why(table, row, held)) == why
    assert " ".join(answers.logs(table, row, held)) == logs
    assert " ".join(answers.end(held) if held else ()) == end
