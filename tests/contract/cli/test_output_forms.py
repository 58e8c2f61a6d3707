"""Every `get` knows every form of output, selectors, an order, and `--watch`; every command keeps the two streams apart."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuscale.cli.commands import hosts
from gpuscale.cli.console import lookup as streams
from gpuscale.cli.console.output import Output
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import NOUNS
from gpuscale.common import errors
from tests.contract.cli import canned_gateway as canned
from tests.contract.cli.test_commands import COMMANDS, input_of
from tests.support.cli import leaves, run_cli
from tests.support.ports import silent_port

LEAVES = [path for path, _ in leaves() if path not in {("up",), ("dashboard",)}]
"""All commands but those that go on until they are stopped, and parse their arguments themselves."""
GETS = sorted(path[1] for path in LEAVES if path[0] == "get")
LISTS = [noun for noun in GETS if noun not in {"all", "audit", "certs"}]
"""`certs` reads files of this host, and is no list of a server; `all` is several; the calls of `audit` have no names."""


GIVEN = {
    ("run",): ("--gpus", "1", "--", "true"),
    ("record",): ("--node", "a", "--", "true"),
    ("history",): ("a",),
    ("estimate",): ("x",),
}
"""Arguments of the commands that need some, beside a name."""


@pytest.mark.parametrize("noun", LISTS)
def test_every_list_in_every_form(ctl: Any, noun: str) -> None:
    listed = json.loads(ctl("get", noun, "-o", "json").out)
    [(key, items)] = listed.items()
    names = [item.get("name") or item["tenant"] for item in items]
    assert names
    lines = ctl("get", noun, "-o", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == items
    assert ctl("get", noun, "-o", "name").out.splitlines() == names
    field = "name" if items[0].get("name") else "tenant"
    assert ctl("get", noun, "-o", f"jsonpath={{.{key}[*].{field}}}").out == " ".join(names) + "\n"
    rows = list(csv.DictReader(io.StringIO(ctl("get", noun, "-o", "csv").out)))
    assert [row.get("name") or row["tenant"] for row in rows] == names
    columns = ctl("get", noun, "-o", f"custom-columns=WHO:.{field},NOTHING:.nothing").out.splitlines()
    assert [line.split() for line in columns] == [["WHO", "NOTHING"], *([name, "-"] for name in names)]
    assert len(ctl("get", noun, "--no-headers").out.splitlines()) == len(names)
    assert {each.value for each in Format} == {
        "csv", "json", "jsonl", "name", "yaml", "jsonpath", "custom-columns", "table", "wide"
    }  # fmt: skip


def test_the_audit_log_is_selected_from_and_has_one_order(ctl: Any) -> None:
    assert ctl("get", "audit", "-o", "name").out == f"{canned.AUDITED.request_id}\n"
    assert ctl("get", "audit", "-l", "caller=ann,code=OK").out.count("nodes/host-1") == 1
    assert ctl("get", "audit", "--filter", "caller = bob").err == "none is selected\n"
    assert ctl("get", "audit", "--watch").err == "error: the audit log has no watch; repeat with --since\n"


@pytest.mark.parametrize("noun", LISTS)
def test_every_list_can_be_selected_from_and_sorted(ctl: Any, noun: str) -> None:
    everything = ctl("get", noun, "-o", "name").out
    assert ctl("get", noun, "-l", "name!=nobody", "-o", "name").out == everything
    assert ctl("get", noun, "-l", "name=nobody").err == "none is selected\n"
    descending = ctl("get", noun, "--sort-by", "-.name", "-o", "name").out.splitlines()
    assert descending == sorted(everything.splitlines(), reverse=True)
    wrong = ctl("get", noun, "--sort-by", "nme")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--sort-by: unknown field 'nme'; " in wrong.err


@pytest.mark.parametrize("noun", [noun for noun in LISTS if noun not in {"jobs", "nodes", "reservations"}])
def test_where_there_are_no_labels_an_unknown_key_is_an_error_with_the_choices(ctl: Any, noun: str) -> None:
    for selector in ("nosuch=1", "nosuch", "nosuch>3"):
        ran = ctl("get", noun, "-l", selector)
        assert (ran.code, ran.out) == (2, "")
        assert "--selector: unknown field 'nosuch'; choose from " in ran.err


@pytest.mark.parametrize("noun", LISTS)
def test_what_is_printed_can_be_typed_back(ctl: Any, noun: str) -> None:
    """The name of `-o name`, with and without its noun; and what the table shows first."""
    singular = next(one.singular for one in NOUNS if noun in one)
    for name in ctl("get", noun, "-o", "name").out.splitlines():
        short = "/".join(name.split("/")[1::2]) or name
        typed = [(noun, name), (singular, name), (noun, short)]
        if "/" in name and noun != "metrics":  # whose names are those of other things
            typed += (
                [(name,), (f"{singular}/{name.split('/', 1)[1]}",)] if name.count("/") == 1 else [(name,)]
            )
        for words in typed:
            ran = ctl("get", *words, "-o", "name")
            assert (ran.code, ran.out) == (0, f"{name}\n"), words


NAMES = {
    "NAME": "", "PID": "processes", "TENANT": "quotas", "OF": "metrics", "NODE": "nodes", "UUID": "gpus",
    "UUIDS": "gpus", "SUBJECT": "reservations", "RESERVATION": "reservations", "ADAPTER": "adapters",
    "THERE": "reservations",
}  # fmt: skip
"""Columns that hold names, and the kinds these are of; of NAME this depends on the command."""


NAMED_FIRST = {
    **{("get", noun): noun for noun in LISTS},
    **{one: "reservations" for one in COMMANDS if one[0] == "reserve"},
    ("reserve", "--gpus", "2", "--at", "Mon 14:00", "--for", "2h", "--name", "demo"): "bookings",
    ("explain", "reservation", "r1"): "reservations",
    ("rank", "nodes", "--gpus", "2"): "nodes",
}
"""What NAME is of, in the tables of these commands."""
ASKING = [*NAMED_FIRST, *(one for one in COMMANDS if one not in NAMED_FIRST)]


def tables(out: str) -> Iterator[dict[str, str]]:
    """The rows of all tables of an output, by heading."""
    for block in out.split("\n\n"):
        heading, *rows = block.strip("\n").splitlines() or [""]
        starts = [(found[0], found.start()) for found in re.finditer(r"\S+(?: \S+)*", heading)]
        if len(starts) < 2 or not heading.isupper():
            continue
        ends = [start for _, start in starts[1:]] + [None]
        for row in rows:
            yield {name: row[start:end].strip() for (name, start), end in zip(starts, ends, strict=True)}


DESCRIBED = set[tuple[str, str]]()
"""Kinds and names that could be described: most tables show the same, of a world that is the same for each test."""


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize("form", ["table", "wide"])
def test_tables_are_plain_lines_and_every_name_in_one_can_be_described(
    ctl: Any, command: tuple[str, ...], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every command that there is; at 80 columns, where UUIDs are short, and in full."""
    gpus = command == ("get", "gpus")
    monkeypatch.setattr("gpuscale.cli.console.output.terminal_width", lambda: 160 if gpus else 80)
    ran = ctl(*command, "-o", form, stdin=input_of(command))
    assert ran.code == 0, ran.err
    assert ran.out.strip()
    assert "\x1b" not in ran.out
    assert all(line == line.rstrip() for line in ran.out.splitlines())
    typed, rows = 0, list(tables(ran.out))
    for cells in rows:
        if gpus:
            assert len(cells["UUID"]) == (12 if form == "table" else 40)
        if {"NODE", "GPU"} <= cells.keys():
            cells["UUIDS"] = f"{cells['NODE']}/{cells['GPU']}"
        for column, kind in NAMES.items():
            kind = kind or NAMED_FIRST.get(command, "")
            for name in filter(lambda name: kind and name not in {"", "-"}, cells.get(column, "").split(",")):
                typed += 1
                if (kind, name) in DESCRIBED:
                    continue
                ran = ctl("describe", kind, name)
                assert (ran.code, ran.err) == (0, ""), (column, name)
                assert name.rpartition("/")[2].casefold() in ran.out.casefold() or kind == "gpus"
                DESCRIBED.add((kind, name))
    assert typed >= len(rows) > 0 or command not in NAMED_FIRST


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_every_table_fits_80_columns_however_long_its_cells_are(
    ctl: Any, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    aligned, written = Output._aligned, list[str]()

    def stretched(self: Output, headings: Any, rows: Any, spare: Any = ()) -> list[str]:
        longer = [[cell + ("00" if cell[:1].isdigit() else "x" * 40) for cell in row] for row in rows]
        lines = aligned(self, headings, longer, spare)
        written.extend(lines)
        return lines

    monkeypatch.setattr(Output, "_aligned", stretched)
    monkeypatch.setattr("gpuscale.cli.console.output.terminal_width", lambda: 80)
    ctl(*command, stdin=input_of(command))
    assert [line for line in written if len(line) > 80] == []


def test_a_job_in_detail_fits_the_terminal(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a word in its command that is longer than a line."""
    held = canned.allocator_api.Reservation(name="reservations/r9", state="STATE_ACTIVE")
    held.job.command = f"python {'deep/' * 30}train.py --epochs 5"
    world.things[held.name] = held
    monkeypatch.setattr("gpuscale.cli.console.output.terminal_width", lambda: 80)
    monkeypatch.setattr("gpuscale.cli.commands.get.terminal_width", lambda: 80)
    shown = ctl("get", "job", "jobs/r9").out
    assert "MEMBER" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "".join(held.job.command.split()) in "".join(shown.split())
    held.job.members.add(member=1, node="nodes/a-host-of-the-rack", pid=1_234_567, exit_code=137)
    held.job.members[0].start_time.FromSeconds(1_700_000_000)
    held.job.members[0].end_time.FromSeconds(1_700_007_500)
    held.job.members[0].end_reason = "ended by signal 9"
    row = next(line for line in ctl("get", "job", "jobs/r9").out.splitlines() if line.startswith("1 "))
    assert re.search(r"1234567 +\d+d(\d+h)? +\d+d(\d+h)? +137 +ended by signal 9$", row), "no cell is cut"
    assert len(row) <= 80


def test_a_job_in_detail_tells_why_it_ended(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full, where its cell of the table is cut."""
    held = canned.allocator_api.Reservation(name="reservations/r9", state="STATE_EXPIRED")
    held.end_time.FromSeconds(1_700_007_500)
    held.job.state = held.job.STATE_LOST
    held.job.members.add(node="nodes/host-1", pid=7)
    world.things[held.name] = held
    monkeypatch.setattr("gpuscale.cli.console.output.terminal_width", lambda: 80)
    assert "nobody renewed its lease" in ctl("get", "job", "jobs/r9").out
    assert "nobody renewed its lease" in ctl("wait", "jobs/r9").err
    why = "it did not start: host-1 has no directory /srv/people/ann for this user"
    held.job.state, held.job.members[0].end_reason = held.job.STATE_FAILED, why
    assert f"member 0: {why}" in ctl("get", "job", "jobs/r9").out
    held.job.members[0].end_reason = "ended by signal 9"
    assert "member 0: " not in ctl("get", "job", "jobs/r9").out


def test_of_a_reason_that_is_cut_the_whole_is_below_the_table(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end says the cause."""
    monkeypatch.setattr("gpuscale.cli.console.output.terminal_width", lambda: 80)
    monkeypatch.setattr("gpuscale.cli.commands.get.terminal_width", lambda: 80)
    failing = deepcopy(canned.ENDPOINT)
    failing.status.summary = (
        f"stays at 1, 0 granted: replicas failed ({'no such model: ' * 4}the next one starts"
    )
    world.things[failing.name] = failing
    shown = ctl("get", "endpoints").out
    assert failing.status.summary in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    assert failing.status.summary not in ctl("get", "endpoints", "-l", "name=other").out
    for form in ("name", "wide"):
        assert "\njobs: " not in ctl("get", "endpoints", "-o", form).out
    failing.status.summary = "\x1b[2J\x9b31m" + failing.status.summary
    shown = ctl("get", "endpoints").out
    assert ("\njobs: ?[2J?31m" in shown, "\x1b" in shown) == (True, False)
    assert "\x1b" not in ctl("get", "endpoints").out
    failing.status.summary = "\x1b[2J"
    assert "\njobs: " not in ctl("get", "endpoints").out, "not cut"


@pytest.mark.parametrize("words", ["get job r1", "explain endpoint jobs", "describe endpoint jobs"])
def test_what_controls_a_terminal_is_not_written_to_it(ctl: Any, world: canned.World, words: str) -> None:
    job, endpoint = deepcopy(canned.RESERVATION), deepcopy(canned.ENDPOINT)
    job.job.command = endpoint.status.summary = "\x1b[2Jall is well"
    world.things |= {job.name: job, endpoint.name: endpoint}
    shown = ctl(*words.split()).out
    assert ("?[2Jall is well" in shown, "\x1b" in shown) == (True, False)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_name_of_a_policy_gives_the_list_of_its_acts(ctl: Any, world: canned.World, count: int) -> None:
    """It crashed where there were none, and showed the newest alone."""
    of = {"policy": canned.POLICY.name}
    acts = [type(canned.ACT)(name=f"policies/idle/acts/{number}", **of) for number in range(count)]
    answer = canned.allocator_api.ListPolicyActsResponse(policy_acts=acts)
    world.overrides["ListPolicyActs"] = lambda *_: answer
    assert len(json.loads(ctl("get", "acts", "idle", "-o", "json").out)["policyActs"]) == count


@pytest.mark.parametrize(
    "words", ["acts nobody", "acts nobody/1", "acts idle nobody", "acts idle idle/9", "changes nobody"]
)
def test_what_was_made_by_nothing_that_there_is_is_not_found(
    ctl: Any, world: canned.World, words: str
) -> None:
    """And not `none`, as of a policy that has done nothing yet."""
    world.overrides["ListPolicyActs"] = lambda *_: canned.allocator_api.ListPolicyActsResponse()
    world.overrides["ListPowerChanges"] = lambda *_: canned.allocator_api.ListPowerChangesResponse()
    assert (ctl("get", *words.split()).code, ctl("get", words.partition(" ")[0]).code) == (3, 0)


def test_several_kinds_are_one_result(ctl: Any, world: canned.World) -> None:
    listed = json.loads(ctl("get", "no,ep", "-o", "json").out)
    assert [*listed] == ["nodes", "endpoints"]
    assert listed["nodes"] == json.loads(ctl("get", "nodes", "-o", "json").out)["nodes"]
    assert ctl("get", "ep,nodes", "-o", "name").out == "endpoints/jobs\nnodes/host-1\n"
    shown = ctl("get", "gpus,rsv").out
    assert re.findall("^[A-Z]+: .*", shown, re.MULTILINE) == ["GPUS: 2", "RESERVATIONS: 1"]
    assert "unknown kind 'nods'; did you mean nodes?" in ctl("get", "nods,ep").err
    assert ctl("get", "nodes,ep", "-w").code == ctl("get", "nodes,ep", "-o", "csv").code == 2
    down = errors.UnavailableError("the autoscaler is down", reason="UPSTREAM_UNAVAILABLE")
    world.refuse["ListEndpoints"] = down
    ran = ctl("get", "ep,nodes", "-o", "name")
    assert (ran.code, ran.out) == (7, "nodes/host-1\n")
    assert "endpoints are unknown: the autoscaler is down" in ran.err


def test_times_are_local_with_their_zone_and_utc_where_asked_for(
    ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert "2023-11-15 07:13:20 JST" in ctl("describe", "rsv/r1").out
        assert "2023-11-14 22:13:20 UTC" in ctl("describe", "rsv/r1", "--utc").out
        assert "2023-11-14T22:13:20Z" in ctl("describe", "rsv/r1", "-o", "json").out
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("typed", ["host-1/0", "gpu/{}", "{}", "nodes/host-1/gpus/{}", "host-1/{}"])
def test_a_gpu_is_known_by_all_that_tables_print(ctl: Any, typed: str) -> None:
    for uuid in (canned.UUIDS[0], canned.UUIDS[0].lower()):
        ran = ctl("get", "gpu", typed.format(uuid), "-o", "jsonpath={.uuid}")
        assert (ran.code, ran.out.strip()) == (0, canned.UUIDS[0])
    ran = ctl("get", "gpu", "host-1/7")
    assert (ran.code, "GPU host-1/7 not found" in ran.err) == (3, True)


def test_a_selector_knows_headings_sizes_and_labels_that_are_not_there(ctl: Any) -> None:
    first = f"nodes/host-1/gpus/{canned.UUIDS[0].lower()}"
    second = f"nodes/host-1/gpus/{canned.UUIDS[1].lower()}"
    for selector, names in {
        "util>30": [first],
        "UTIL>50": [],
        "util": [first],
        "!util": [second],
        "temp>=55": [first],
        "free>50GiB": [first],
        "node=host-1": [first, second],
        "state=ok,util>30": [first],
    }.items():
        ran = ctl("get", "gpus", "-l", selector, "-o", "name")
        assert (ran.code, ran.out.split()) == (0, names), selector
    assert ctl("get", "res", "-l", "!zone", "-o", "name").out == "reservations/r1\n", "a label nothing bears"


def test_labels_are_selected_by_and_columns_come_before_paths(ctl: Any, world: canned.World) -> None:
    world.things.update({name: _reservation(name, fence, zone) for name, fence, zone in
                         (("a", 9, "x"), ("b", 100, "y"), ("c", 10, "x"))})  # fmt: skip
    del world.things["reservations/r1"]
    assert ctl("get", "res", "-l", "zone=x", "-o", "name").out.split() == ["reservations/a", "reservations/c"]
    assert ctl("get", "res", "-l", "zone=x,holder=a", "-o", "name").out.split() == ["reservations/a"]
    assert ctl("get", "res", "-l", "zone=x,fence>=10", "-o", "name").out.split() == ["reservations/c"]
    for by in ("fence", ".fence", "FENCE"):
        assert ctl("get", "res", "--sort-by", by, "-o", "name").out.split()[-1] == "reservations/b"
        assert ctl("get", "res", "--sort-by", f"-{by}", "-o", "name").out.split()[0] == "reservations/b"


def test_what_is_chosen_is_chosen_by_the_service(ctl: Any, world: canned.World) -> None:
    """So that the newest 5 of those are 5, and pages are of those alone."""
    options = ("-l", "granted>=2,first=x", "--filter", "wanted > 2", "--order-by", "last_time desc")
    assert ctl("get", "decisions", *options, "--limit", "5").code == 0
    [asked] = world.requests
    sent = (asked.filter, asked.order_by, asked.page_size)
    assert sent == ('wanted > 2 AND granted>="2"', "last_time desc", 5)
    ran = ctl("get", "decisions", "jobs/d1", "--filter", "wanted > 2")
    assert (ran.code, "either name resources, or select" in ran.err) == (2, True)


def _reservation(name: str, fence: int, zone: str) -> Any:
    copy = deepcopy(canned.RESERVATION)
    copy.name, copy.fence, copy.holder = f"reservations/{name}", fence, name
    copy.labels["zone"] = zone
    return copy


def watch(world: canned.World, monkeypatch: pytest.MonkeyPatch, *steps: Any) -> None:
    """Let a watch make these steps between its readings, and then end by Ctrl-C."""
    canned.script(monkeypatch, streams, *(partial(step, world) for step in steps))


def scaled(world: canned.World) -> None:
    copy = deepcopy(world.things["endpoints/jobs"])
    copy.status.ready_replicas += 1
    world.things[copy.name] = copy


def nothing(world: canned.World) -> None:
    """Nothing happens."""


def deleted(world: canned.World) -> None:
    del world.things["endpoints/jobs"]


def test_a_watch_writes_each_change_once(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An age that goes on is no change; what is gone is said."""

    def older(world: canned.World) -> None:
        copy = deepcopy(world.things["watchers/jobs"])
        copy.status.age.seconds += 100
        world.things[copy.name] = copy

    watch(world, monkeypatch, older, older)
    assert ctl("get", "watchers", "-w", "-o", "name").out == "watchers/jobs\n"
    watch(world, monkeypatch, scaled, deleted)
    table = ctl("get", "endpoints", "-w").out.splitlines()
    assert [line.split()[0] for line in table] == ["NAME", "jobs", "jobs", "endpoints/jobs"]
    assert table[-1] == "endpoints/jobs is gone"
    world.things["endpoints/jobs"] = canned.ENDPOINT
    watch(world, monkeypatch, nothing, scaled, nothing, deleted)
    ran = ctl("get", "endpoints", "-w", "-o", "jsonl")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line.get("status", {}).get("readyReplicas") for line in lines] == [2, 3, None]
    assert lines[-1] == {"name": "endpoints/jobs", "deleted": True}
    assert (ran.code, ran.err) == (130, "")


@pytest.mark.timeout(20)
def test_what_is_watched_by_its_name_is_read_again(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream of the API tells of it."""
    watch(world, monkeypatch, scaled)
    assert len(ctl("get", "endpoint", "jobs", "-w").out.splitlines()) == 3


@pytest.mark.timeout(20)
@pytest.mark.parametrize("words", ["job r1", "recording nightly", "backtest b1"])
def test_a_watch_of_one_is_that_of_its_list(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Its members, figures or results were repeated without their headings at each look."""
    watch(world, monkeypatch, nothing, nothing)
    assert len(ctl("get", *words.split(), "-w").out.splitlines()) == 2


def test_a_watch_outlives_an_answer_that_fails(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(world: canned.World) -> None:
        world.refuse["ListEndpoints"] = errors.UnavailableError("it restarts", reason="SHUTTING_DOWN")

    def back(world: canned.World) -> None:
        world.refuse.clear()
        scaled(world)

    watch(world, monkeypatch, away, nothing, back)
    ran = ctl("get", "endpoints", "-w", "-o", "name")
    assert ran.out == "endpoints/jobs\n" * 2
    assert ran.err.count("it restarts") == 1


def test_a_watch_asks_a_service_again_that_was_silent(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.refuse["ListCordons"] = errors.DeadlineExceededError("no answer within 10 s")
    watch(world, monkeypatch, nothing, lambda world: world.refuse.clear())
    ran = ctl("get", "nodes", "-w")
    assert [line.split()[1] for line in ran.out.splitlines()] == ["STATE", "ONLINE", "ONLINE,DRAINING"]
    assert ran.err.count("cordons are unknown: no answer") >= 2, "and once more where a stream ends"


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_watch_of_json_is_a_stream_of_lines(ctl: Any, form: str) -> None:
    """As one of CSV, whose columns would be those of the first lines."""
    ran = ctl("get", "endpoints", "-w", "-o", form)
    assert (ran.code, ran.out) == (2, "")
    assert f"use -o jsonl instead of -o {form}" in ran.err


@pytest.mark.timeout(30)
@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_no_command_mixes_its_streams(
    path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody there, or too little said: standard output is empty or JSON, and each line of standard error is JSON."""
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr(hosts, "directories", lambda _: (tmp_path, tmp_path / "state"))
    named = GIVEN.get(path, ("x",))
    for more, given in (((), ()), ((), named), (("-v",), named)):
        with silent_port() as port:
            ran = run_cli("--address", f"127.0.0.1:{port}", "-o", "json", *more, *path, *given)
        if ran.out:
            json.loads(ran.out)
        lines = [json.loads(line) for line in ran.err.splitlines()]
        if ran.code:
            assert [set(line) for line in lines if "error" in line] == [{"error"}], ran.err
            assert lines[-1]["error"]["exitCode"] == ran.code
            assert more or len(lines) == 1
        else:
            assert ran.out


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_help_that_says_what_it_does(path: tuple[str, ...]) -> None:
    ran = run_cli(*path, "--help")
    assert ran.code == 0
    assert len([line for line in ran.out.splitlines() if line.startswith("  ")]) > 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("get nods", "did you mean nodes?"),
        ("gte nodes", "did you mean get?"),
        ("get nodes -o jsn", "did you mean json"),
        ("get nodes --wach", "'--watch'"),
        ("get nodes --no-header", "Did you mean '--no-headers'"),
        ("reserve --gpu-s 2", "--gpus"),
        ("reserve --gpus two", "'--gpus'"),
        ("reserve --gpus 1 --policy pak", "pack"),
        ("reserve", "'--gpus'"),
        ("scale endpoint jobs", "'--replicas'"),
        ("reserve --gpus 1 --ttl soon", "'--ttl'"),
        ("get endpoints -l =x", "--selector"),
        ("get decisions --limit 0", "'--limit'"),
    ],
)
def test_a_usage_error_names_the_flag_and_offers_the_near_miss(ctl: Any, typed: str, said: str) -> None:
    ran = ctl(*typed.split())
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Try 'gpuscalectl" in ran.err


def test_verbose_says_where_and_why(ctl: Any, world: canned.World) -> None:
    ran = ctl("get", "endpoints", "nobody", "-v")
    assert "connecting to 127.0.0.1:" in ran.err
    assert "NotFoundError NOT_FOUND; exit code 3 NOT_FOUND" in ran.err
    assert "NotFoundError" not in ctl("get", "endpoints", "nobody").err


def test_ascii_is_ascii(ctl: Any, world: canned.World) -> None:
    node = deepcopy(canned.NODE)
    node.snapshot.gpus[0].model = "Größe…"
    world.things[node.name] = node
    assert "Größe…" in ctl("get", "gpus").out
    out = ctl("get", "gpus", "--ascii").out
    assert out.isascii()
    assert "Gr??e..." in out
