"""What the Slurm engine asks of Slurm's commands, and what it makes of answers that come late, twice, or never."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    StepsFailedError,
    WorkerLife,
)
from gpuscale_slurm.engine import (
    Commands,
    SlurmAnswer,
    SlurmEngine,
    SlurmSettings,
)

ONE = "endpoints/e/replicas/one"
NAME = "gpuscale:a:e:one"
START = Start(ReplicaOrder(ONE, "endpoints/e", {}), "worker")
FAILED = "sbatch: error: Batch job submission failed: "


class Queue(Commands):
    """Slurm's commands; its queue is what the test wrote.

    Attributes:
        jobs: number, state and time used of each job; all have the name of the one replica.
        calls: every call but squeue's, in order.
        on_call: what a call does to the queue.
        said: what sbatch and scancel complain about; empty while they succeed.
        away: whether squeue fails.
        looks: how often squeue was called.
        ages: how long all jobs have run, look by look.
    """

    def __init__(self) -> None:
        super().__init__(None, {})
        self.jobs: dict[int, tuple[str, str]] = {}
        self.calls: list[tuple[str, ...]] = []
        self.on_call: Callable[[tuple[str, ...]], None] = lambda _: None
        self.said = ""
        self.away = False
        self.looks = 0
        self.ages: Iterator[str] = iter(())

    async def run(
        self, name: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> SlurmAnswer:
        if name == "squeue":
            self.looks += 1
            if age := next(self.ages, ""):
                self.jobs = {number: (state, age) for number, (state, _) in self.jobs.items()}
            end = arguments[-1].rpartition(":")[2]
            jobs = [(str(n), state, "0", used, "None", NAME) for n, (state, used) in self.jobs.items()]
            lines = ["".join(f"{field}{end}" for field in job) + "\n" for job in jobs]
            return (
                SlurmAnswer(1, "", "squeue: error: no controller")
                if self.away
                else SlurmAnswer(0, "".join(lines), "")
            )
        self.calls.append((name, *arguments))
        self.on_call(arguments)
        return SlurmAnswer(1, "", self.said) if self.said else SlurmAnswer(0, "", "")

    @property
    def cancels(self) -> list[str]:
        """What scancel was called with."""
        return [" ".join(arguments) for name, *arguments in self.calls if name == "scancel"]


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def engine(queue: Queue) -> SlurmEngine:
    templates = {"worker": {"command": ["/bin/worker"]}}
    told = {
        "adapter": "a",
        "data_dir": "d",
        "python": "python",
        "poll_seconds": 1,
        "slurm_templates": templates,
    }
    return SlurmEngine(SlurmSettings.model_validate(told), queue, {}, user=7)


async def test_a_queue_that_cannot_be_read_is_not_an_empty_one(engine: SlurmEngine, queue: Queue) -> None:
    queue.away = True
    with pytest.raises(EngineUnavailableError, match="no controller"):
        await engine.observe()


async def test_what_is_in_the_queue_is_not_submitted_again(engine: SlurmEngine, queue: Queue) -> None:
    queue.jobs[3] = ("PENDING", "0:00")
    await engine.observe()
    await engine.apply([START])
    assert queue.calls == []


async def test_a_job_that_was_submitted_twice_is_cancelled_but_for_the_first(
    engine: SlurmEngine, queue: Queue
) -> None:
    queue.jobs = {9: ("PENDING", "0:00"), 8: ("RUNNING", "5:00")}
    assert await engine.observe() == {ONE: Sighting(WorkerLife.READY)}
    assert queue.cancels == [f"--name={NAME} 9"]


@pytest.mark.parametrize("said", ["Unable to contact slurm controller (connect failure)", "Socket timed out"])
async def test_a_submission_without_an_answer_is_no_refusal(
    engine: SlurmEngine, queue: Queue, said: str
) -> None:
    queue.said = FAILED + said
    with pytest.raises(EngineUnavailableError):
        await engine.apply([START])


async def test_a_job_that_can_never_run_says_why(engine: SlurmEngine, queue: Queue) -> None:
    queue.said = f"sbatch: error: invalid partition\n{FAILED}Invalid partition name specified\n"
    assert await engine.apply([START]) == {ONE: f"{FAILED}Invalid partition name specified"}
    assert await engine.observe() == {}
    other = Start(START.order, "other")
    assert await engine.apply([other]) == {ONE: "this adapter has no template other"}


async def test_a_job_that_slurm_takes_later_waits_with_its_reason(engine: SlurmEngine, queue: Queue) -> None:
    queue.said = FAILED + "Requested partition configuration not available now"
    assert await engine.apply([START]) == {}
    assert await engine.observe() == {ONE: Sighting(WorkerLife.WAITING, reason=queue.said)}
    await engine.apply([Remove(ONE)])
    assert await engine.observe() == {}
    queue.said = ""
    await engine.apply([START])
    queue.jobs[1] = ("PENDING", "0:00")
    assert (await engine.observe())[ONE].life is WorkerLife.STARTING
    assert len(queue.calls) == 2


async def test_a_running_one_is_sent_a_signal_once(engine: SlurmEngine, queue: Queue) -> None:
    """A second SIGTERM would have many a worker end at once."""
    queue.jobs[3] = ("RUNNING", "5:00")
    await engine.observe()
    await engine.apply([Finish(ONE, 30.0)])
    await engine.apply([Finish(ONE, 30.0)])
    assert queue.cancels == [f"--signal=TERM --batch --name={NAME} 3"]


@pytest.mark.looptime
async def test_one_that_has_only_just_begun_is_given_a_moment(engine: SlurmEngine, queue: Queue) -> None:
    """Slurm drops a signal that reaches a node before the job does; this was seen on 22.05."""
    queue.jobs[3] = ("RUNNING", "0:01")
    queue.ages = iter(["0:01", "0:02", "0:03"])
    await engine.observe()
    await engine.apply([Finish(ONE)])
    assert queue.cancels == [f"--signal=TERM --batch --name={NAME} 3"]
    assert queue.looks == 3


@pytest.mark.looptime
async def test_one_that_starts_while_it_is_cancelled_is_sent_a_signal(
    engine: SlurmEngine, queue: Queue
) -> None:
    queue.jobs[3] = ("PENDING", "0:00")
    await engine.observe()
    queue.on_call = lambda arguments: queue.jobs.update({3: ("RUNNING", "1:00")})
    await engine.apply([Finish(ONE)])
    assert queue.cancels == [f"--state=PENDING --name={NAME} 3", f"--signal=TERM --batch --name={NAME} 3"]


@pytest.mark.looptime
async def test_one_that_waits_for_its_turn_is_cancelled(engine: SlurmEngine, queue: Queue) -> None:
    queue.jobs[3] = ("PENDING", "0:00")
    await engine.observe()
    queue.on_call = lambda arguments: queue.jobs.update({3: ("CANCELLED", "0:00")})
    await engine.apply([Finish(ONE)])
    assert queue.cancels == [f"--state=PENDING --name={NAME} 3"]


@pytest.mark.looptime
async def test_one_that_cannot_be_asked_was_not_asked(engine: SlurmEngine, queue: Queue) -> None:
    queue.jobs[3] = ("PENDING", "0:00")
    await engine.observe()
    with pytest.raises(EngineUnavailableError, match="does not end"):
        await engine.apply([Finish(ONE)])


async def test_one_that_cannot_be_signalled_holds_up_no_start(engine: SlurmEngine, queue: Queue) -> None:
    queue.jobs[3] = ("RUNNING", "5:00")
    await engine.observe()
    queue.said = FAILED + "Access/permission denied"
    other = Start(ReplicaOrder("endpoints/e/replicas/two", "endpoints/e", {}), "worker")
    for step in (Finish(ONE), Kill(ONE)):
        with pytest.raises(StepsFailedError) as caught:
            await engine.apply([step, other])
        assert set(caught.value.failed) == {ONE}
        assert caught.value.refused == {other.replica: queue.said}


async def test_a_job_that_is_gone_needs_no_kill(engine: SlurmEngine, queue: Queue) -> None:
    queue.jobs[3] = ("RUNNING", "5:00")
    await engine.observe()
    queue.said = "scancel: error: Kill job error on job id 3: Invalid job id specified"
    await engine.apply([Kill(ONE)])
    assert queue.cancels == [f"--name={NAME} 3"]
    queue.said = "scancel: error: Kill job error on job id 3: Unable to contact slurm controller"
    with pytest.raises(EngineUnavailableError):
        await engine.apply([Kill(ONE)])


async def test_what_ended_is_shown_until_it_is_removed(engine: SlurmEngine, queue: Queue) -> None:
    """Slurm shows it for some minutes more; a number that it gives out again hides nobody."""
    queue.jobs[3] = ("COMPLETED", "5:00")
    assert (await engine.observe())[ONE].life is WorkerLife.ENDED
    await engine.apply([Remove(ONE)])
    assert await engine.observe() == {}
    queue.jobs[3] = ("RUNNING", "0:00")
    assert (await engine.observe())[ONE].life is WorkerLife.READY


async def test_a_command_that_is_not_there_or_does_not_end_is_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(tmp_path, {})
    with pytest.raises(EngineUnavailableError, match="not installed"):
        await commands.run("squeue")
    slow = tmp_path / "squeue"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr("gpuscale_slurm.engine.COMMAND_TIMEOUT", 0.05)
    with pytest.raises(EngineUnavailableError, match="did not end"):
        await commands.run("squeue")


async def test_variables_of_the_adapter_do_not_change_what_commands_say(tmp_path: Path) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nenv; echo no >&2; exit 3\n")
    program.chmod(0o755)
    found = await Commands(tmp_path, {"PATH": "/bin", "HOME": "/home/me"}).run(
        "squeue", environment={"K": "V"}
    )
    assert {line for line in found.out.split() if not line.startswith(("PWD", "_", "SHLVL"))} == {
        "PATH=/bin",
        "HOME=/home/me",
        "K=V",
    }
    assert (found.status, found.why) == (3, "no")
