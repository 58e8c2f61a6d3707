"""Tables, colours, and what a terminal must never get."""

import io
import sys
from datetime import UTC, datetime, timedelta

import pytest
from google.protobuf.duration_pb2 import Duration

from gpuscale.api.allocator.v1 import JobMember, PolicyStanding, QueuePlace, Reservation, ReservedGpu
from gpuscale.api.audit.v1 import AuditEvent
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor.v1 import HealthEvent, MetricStats, Node, RecordedGpu
from gpuscale.api.types.v1 import Gpu, GpuReading
from gpuscale.cli.commands.describe import described
from gpuscale.cli.console import cells, output
from gpuscale.cli.console.cells import Column, View, counted_models
from gpuscale.cli.console.output import Output
from gpuscale.cli.console.terminal import TYPED, folded, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.parameters import local_text
from gpuscale.cli.views.allocator import JOB_MEMBERS, JOBS, RESERVATIONS, STANDINGS
from gpuscale.cli.views.autoscaler import ADAPTERS, ENDPOINTS, REPLICAS, RULES
from gpuscale.cli.views.monitor import AUDIT, HEALTH, RECORDED_GPUS
from gpuscale.client.states import estimate

VIEW = View[Node](
    "nodes",
    (
        Column("NAME", lambda node: cells.short(node.name)),
        Column("VERSION", lambda node: cells.text(node.agent_version)),
        Column("MORE", lambda node: "more", wide=True),
    ),
)
ITEMS = [Node(name="nodes/a", agent_version="1"), Node(name="nodes/longer")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_is_aligned_without_trailing_blanks() -> None:
    assert Output().table(ITEMS, VIEW) == ["NAME     VERSION", "a        1", "longer   -"]
    assert Output(Format.WIDE).table(ITEMS, VIEW)[0] == "NAME     VERSION   MORE"
    assert Output(headers=False).table(ITEMS, VIEW) == ["a        1", "longer   -"]
    assert Output(headers=False).table([], VIEW) == []


def test_control_characters_never_reach_a_terminal() -> None:
    [line] = Output(headers=False).table([Node(name="nodes/a", agent_version="\x1b[2J\u009b\n")], VIEW)
    assert line == "a   ?[2J??"


def test_uuids_are_cut_on_a_terminal_where_nothing_else_begins_so() -> None:
    rest = "-c0d5-5a87-a657-b17ffccbb12a"
    rows = [
        [f"GPU-6afcb721{rest} vm/sim-3d870160{rest}"],
        [f"SIM-00000001{rest}, SIM-00000001{rest[:-1]}b"],
        [f"x6afcb721{rest}"],
    ]
    assert output.with_short_uuids(rows) == [["GPU-6afcb721 vm/sim-3d870160"], rows[1], rows[2]]


MANY = View[Node](
    "nodes",
    (
        Column("NAME", lambda node: cells.short(node.name)),
        Column("FIRST", lambda _: "1" * 10, spare=True),
        Column("STATE", lambda _: "ONLINE"),
        Column("SECOND", lambda _: "2" * 10, spare=True),
        Column("WHY", lambda _: "a long story of a node"),
    ),
)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (64, "a      1111111111   ONLINE   2222222222   a long story of a node"),
        (63, "a     1111111111  ONLINE  2222222222  a long story of a node"),
        (59, "a     1111111111  ONLINE  a long story of a node"),
        (47, "a     ONLINE  a long story of a node"),
        (35, "a     ONLINE  a long story of a no…"),
        (20, "a     ONLINE  a long …"),
    ],
)
def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int, line: str) -> None:
    """Spare columns go, the last first; then the text at the end is cut. Not what programs read, nor `-o wide`."""
    monkeypatch.setenv("COLUMNS", str(width))
    items = [Node(name="nodes/a"), Node(name="nodes/long")]
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert Output().table(items, MANY)[1] == line
    assert len(Output(Format.WIDE).table(items, MANY)[1]) == 64
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert len(Output().table(items, MANY)[1]) == 64


def test_figures_and_times_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Terminal())
    gpu = RecordedGpu(name="nodes/host-12/gpus/g", index=10)
    for metric in ("UTILIZATION_PERCENT", "MEMORY_USED_BYTES", "TEMPERATURE_CELSIUS", "POWER_WATTS"):
        most = 179.4 * 2**30 if metric == "MEMORY_USED_BYTES" else 100.0
        gpu.stats.add(metric=f"METRIC_{metric}", min=most, mean=most, max=most)
    assert "…" not in "".join(Output().table([gpu], RECORDED_GPUS))
    due = PolicyStanding(subject="reservations/rbajzmfnwekgz", message="all 2 GPUs idle", next_actions=[3])
    due.held.FromSeconds(3599)
    due.next_time.FromSeconds(1_800_000_000)
    assert "…" not in "".join(Output().table([due], STANDINGS))
    event = AuditEvent(caller="ann", method="/a/ReleaseReservation", resource="reservations/rob3px6c5rvcf")
    event.code = "PERMISSION_DENIED"
    event.end_time.FromSeconds(1_800_000_000)
    [_, line] = Output().table([event], AUDIT)
    assert line.startswith(f"{local_text(datetime.fromtimestamp(1_800_000_000, UTC))}  ann ")
    assert len(line) <= 80


def test_what_a_person_called_a_job_is_shown_before_all_of_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Terminal())
    job = Reservation(name="reservations/rob3px6c5rvcf")
    job.job.title, job.job.command = "night", "python train.py --data /srv/data --epochs 300 --lr 0.001"
    assert "  night  " in Output().table([job], JOBS)[1]


def test_wide_characters_and_those_that_combine_take_the_columns_that_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [Node(name="nodes/a", agent_version=text) for text in ("訓練 5", "cafe\u0301", "plain")]
    assert Output(Format.WIDE).table(items, VIEW) == [
        "NAME   VERSION   MORE",
        "a      訓練 5    more",
        "a      cafe\u0301      more",
        "a      plain     more",
    ]
    monkeypatch.setenv("COLUMNS", "16")
    monkeypatch.setattr(sys, "stdout", Terminal())
    long = Node(name="nodes/a", agent_version="訓練訓練訓練訓練")
    assert Output().table([long], VIEW)[1] == "a     訓練訓練…"


def test_a_name_that_is_too_long_is_cut_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert (
        Output().table([Node(name=f"nodes/{'n' * 60}")], MANY)[1] == f"{'n' * 23}…  ONLINE  a long story of…"
    )


def test_many_columns_share_what_room_there_is_and_ascii_needs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    view = View[Node](
        "nodes", [Column(letter * 20, lambda _, letter=letter: letter * 20) for letter in "ABC"]
    )
    assert Output().table([Node()], view) == ["AAAAAAA…  BBBBBBBBBBB…  CCCCCCCCCCCCCCC…"] * 2
    monkeypatch.setattr(output.TERMINAL, "ascii", True)
    assert Output().table([Node()], view) == ["AAAAA...  BBBBBBBBB...  CCCCCCCCCCCCC..."] * 2


@pytest.mark.parametrize("width", range(50, 60))
def test_what_is_to_be_typed_goes_on_in_the_next_line(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    line = "gpuscalectl join first:7070,second:7070 --token 3f9a12cd --ca-hash sha256:5f9d"
    assert folded(line, io.StringIO(), TYPED) == line
    shown = folded(line, Terminal(), TYPED).splitlines()
    assert max(map(len, shown)) <= width
    assert " ".join(one.removesuffix(TYPED).strip() for one in shown) == line


def test_texts_go_on_below_where_they_begin_and_what_is_wide_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    for output.TERMINAL.folds in (True, False):
        output.write_lines(["", "  rule up   2 -> 2   NOT_MET   not depth = 0 > 10"])
    output.TERMINAL.reset()
    assert out.getvalue().splitlines() == [
        "",
        "  rule up   2 -> 2   NOT_MET",
        "    not depth = 0 > 10",
        "",
        "  rule up   2 -> 2   NOT_MET   not depth = 0 > 10",
    ]


def test_a_note_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError("No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    for _ in range(2):
        output.note("a disk is full")
    sys.stderr.close()


def test_findings_are_paragraphs_that_lose_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 40)
    path = "/var/lib/gpuscale/a-long-name"
    found = {"state": "FAIL", "what": "x", "found": f"{path}: not there", "advice": f"make {path} again"}
    well = {"state": "OK", "what": "y", "found": "well", "advice": ""}
    Output().write_findings("findings", [found, well], ("what",))
    assert capsys.readouterr().out.splitlines() == [
        "FAIL   x", f"         {path}:", "         not there", "       do: make", f"         {path}",
        "         again", "OK     y   well",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False), ({}, False, False)],
)
def test_states_are_coloured_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, coloured: bool
) -> None:
    out = Terminal() if terminal else io.StringIO()
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    write_lines(["GPUS   UNKNOWN", "STALE and NODES"])
    line = "\x1b[33mSTALE\x1b[0m and NODES" if coloured else "STALE and NODES"
    assert out.getvalue() == f"GPUS   UNKNOWN\n{line}\n", "no heading is a state"


def test_an_absent_reading_is_a_dash_and_zero_is_zero() -> None:
    assert cells.number(GpuReading(), "power_watts") == "-"
    assert cells.number(GpuReading(power_watts=0), "power_watts") == "0"
    assert cells.memory_used(GpuReading()) == "-"
    assert cells.duration(Reservation(), "remaining") == "-"
    assert cells.duration(Reservation(remaining=Duration()), "remaining") == "0ms"
    assert cells.since(Reservation(), "create_time") == "-"


def test_enum_values_lose_their_prefix_and_unknown_ones_are_shown() -> None:
    assert cells.word(api.Replica(state=api.Replica.STATE_READY), "state") == "READY"
    assert cells.word(api.Replica(), "state") == "-"
    newer = api.Replica.FromString(b"\x10\x63")  # state = 99, of a newer server
    assert cells.word(newer, "state") == "99"


def test_ages_are_counted_from_now() -> None:
    reservation = Reservation()
    reservation.create_time.FromDatetime(datetime.now(UTC) - timedelta(seconds=90))
    assert cells.since(reservation, "create_time") == "1m30s"


@pytest.mark.parametrize(
    ("models", "shown"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, "8 x H100"),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"], "2 x A100, 1 x L40S"),
        (["NVIDIA GeForce RTX 4090"], "1 x RTX 4090"),
        (["Tesla T4"], "1 x T4"),
        (["", ""], "2"),
        ([], "0"),
    ],
)
def test_gpus_are_counted_by_model(models: list[str], shown: str) -> None:
    gpus = [Gpu(model=model) for model in models]
    assert counted_models(gpus, simulated=False) == shown
    assert counted_models(gpus, simulated=True) == f"{shown} SIMULATED"


@pytest.mark.parametrize(
    ("milli", "shown"), [(0, "2 x H100"), (1000, "2 x H100"), (500, "2 x 0.5 H100"), (1, "2 x 0.001 H100")]
)
def test_a_share_is_not_shown_as_a_whole_gpu(milli: int, shown: str) -> None:
    gpus = [ReservedGpu(model="NVIDIA H100 80GB HBM3", milli=milli)] * 2
    assert shown in Output().table([Reservation(gpus=gpus)], RESERVATIONS)[1]


@pytest.mark.parametrize("view", [JOBS, RESERVATIONS])
def test_of_a_reservation_that_waits_the_gpus_are_those_it_asks_for(view: View[Reservation]) -> None:
    state = Reservation.State
    for one, shown in ((state.STATE_WAITING, True), (state.STATE_CANCELLED, False)):
        row = Output().table([Reservation(asked_gpu_count=3, state=one)], view)[1]
        assert ("0 of 3" in row, " 3 " in row) == (shown, shown), "one that was cancelled waits no more"


def test_a_wait_that_should_be_over_is_not_estimated() -> None:
    low, likely, high = (Duration(seconds=one) for one in (0, 9, 99))
    waits = QueuePlace(estimated_wait=likely, estimated_wait_low=low, estimated_wait_high=high)
    assert (estimate(waits, 3), estimate(waits, 9)) == ("about 6 s, 0 s to 96 s", "")
    sure = QueuePlace(
        estimated_wait=likely, estimated_wait_low=likely, estimated_wait_high=Duration(seconds=9, nanos=9)
    )
    assert estimate(sure, 3) == "about 6 s", "and not 6 s to 6 s"


def test_an_exit_code_that_a_signal_gives_says_which_it_often_is() -> None:
    """A program may choose the same itself, which nobody can tell."""
    [why] = [one.cell for one in JOB_MEMBERS.columns if one.heading == "WHY"]
    told = {137: "often SIGKILL, for want of memory", 139: "often SIGSEGV", 255: "-", 1: "-"}
    told |= {135: "often SIGBUS", 138: "often SIGUSR1"}  # Linux's numbers, on any client
    told |= {128: "-", 143: "often SIGTERM", 144: "-", 162: "-"}  # a program's own codes, more likely
    assert {code: why(JobMember(exit_code=code)) for code in told} == told
    assert why(JobMember(exit_code=137, end_reason="somebody stopped it")) == "somebody stopped it"


def test_the_gpus_of_an_ask_are_shown_also_where_it_asks_for_none() -> None:
    [column] = [one for one in ENDPOINTS.columns if one.heading == "GPUS-EACH"]
    endpoint = api.Endpoint()
    endpoint.spec.template.gpu_count = 2
    assert column.cell(endpoint) == "2"
    endpoint.spec.template.ask.SetInParent()
    assert column.cell(endpoint) == "0"


def test_only_the_wide_table_says_what_an_adapter_can_do() -> None:
    [column] = [one for one in ADAPTERS.columns if one.heading == "CAN"]
    can = api.AdapterCapabilities(gives_gpus=True, drains=True)
    assert column.wide
    assert column.cell(api.Adapter(name="adapters/ray", capabilities=can)) == "gives gpus, drains"
    assert column.cell(api.Adapter(name="adapters/ray")) == "-"


def test_what_a_rule_does_is_told_as_json_writes_it() -> None:
    """Periods of a schedule were told as Python writes them."""
    periods = [api.ScheduleRule.Period(weekdays=[1, 2], start="08:00", end="18:00")]
    [column] = [one for one in RULES.columns if one.heading == "DOES"]
    shown = column.cell(api.EndpointRule(rule=api.Rule(schedule=api.ScheduleRule(periods=periods))))
    assert shown == 'schedule: periods=[{"weekdays": [1, 2], "start": "08:00", "end": "18:00"}]'


def test_what_will_be_taken_away_says_when_and_why() -> None:
    now = datetime.now(UTC)
    held = Reservation(state=Reservation.STATE_ACTIVE, end_reason="nodes/b is drained: fan")
    held.remaining.FromSeconds(60)
    held.expire_time.FromDatetime(now)
    cells = {one.heading: one.cell for one in RESERVATIONS.columns}
    assert (cells["STATE"](held), cells["LEFT"](held)) == ("ACTIVE", "1m")
    held.revoke_time.FromDatetime(now - timedelta(seconds=20))
    shown = (cells["STATE"](held), cells["LEFT"](held), cells["WHY"](held))
    assert shown == ("ACTIVE,LEAVING", "40s", "nodes/b is drained: fan")
    held.job.state = held.job.STATE_RUNNING
    of_job = {one.heading: one.cell(held) for one in JOBS.columns}
    assert (of_job["STATE"], of_job["WHY"]) == ("RUNNING,LEAVING", "nodes/b is drained: fan")
    leaves = api.Replica(reason="nodes/b is drained: fan")
    leaves.revoke_time.FromDatetime(now + timedelta(seconds=90))
    [why] = [one.cell(leaves) for one in REPLICAS.columns if one.heading == "WHY"]
    assert why == "leaves in 1m29s: nodes/b is drained: fan"


def test_a_figure_of_zero_is_described_and_an_absent_one_is_not() -> None:
    """A recording of an idle GPU had no use at all, and the first GPU of a node no index."""
    gpu = RecordedGpu(uuid="GPU-a", stats=[MetricStats(metric="METRIC_POWER_WATTS", max=70.0)])
    stats = ["stats:", "- metric: POWER_WATTS", "  min: 0", "  max: 70", "  mean: 0", "  sampleCount: 0"]
    assert [*described(gpu)] == ["uuid: GPU-a", "index: 0", "sampleCount: 0", *stats]
    chat = api.Endpoint(spec={"template": {}, "up": {"strictest": True}}, status={"summary": "idle"})
    chat.spec.rules.add(threshold={"up_above": 4})
    rule = ["  rules:", "  - priority: 0", "    threshold:", "      upAbove: 4"]
    rest = ["  template:", "  up:", "    strictest: true"]
    status = ["status:", "  desiredReplicas: 0", "  readyReplicas: 0", "  summary: idle"]
    assert [*described(chat)] == ["spec:", "  minReplicas: 0", *rule, *rest, *status]
    held = Reservation(holder="ann", gpus=[{}])
    assert [*described(held)] == ["holder: ann", "gpus:", "- index: 0", "priority: 0"]


def test_a_health_event_names_its_gpu_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    event = HealthEvent(
        node="nodes/host-1",
        uuid="GPU-6afcb721-67c0-5d87-a657-b17ffccbb12a",
        check="HEALTH_CHECK_XID",
        severity="HEALTH_SEVERITY_CRITICAL",
        recommended_action="RECOMMENDED_ACTION_REBOOT_NODE",
        message="XID 79: the GPU fell off the bus",
    )
    heading, row = Output().table([event], HEALTH)
    assert "GPU-6afcb721" in row
    assert max(map(len, (heading, row))) <= 80


def test_a_description_has_sizes_rates_switches_and_large_numbers_as_people_read_them() -> None:
    reading = GpuReading(
        memory_used_bytes=3 << 30, pcie_sent_bytes_per_second=18 * 2.0**20, energy_joules=1_234_567_890.4,
        power_watts=70.123456, persistence_mode=True, vgpu_licensed=False,
    )  # fmt: skip
    assert [*described(reading)] == [
        "memoryUsedBytes: 3GiB", "powerWatts: 70.1235", "energyJoules: 1234567890",
        "pcieSentBytesPerSecond: 18MiB/s", "persistenceMode: true", "vgpuLicensed: false",
    ]  # fmt: skip
