"""What comes of steps that are taken one by one: one that fails holds up no other."""

from collections.abc import Awaitable, Iterable, Mapping

from gpuscale.autoscaler.adapters.engines.model import (
    EngineUnavailableError,
    Start,
    Step,
    StepsFailedError,
)


def ends_first(steps: Iterable[Step]) -> list[Step]:
    """The steps in their order, but for starts, which are taken last: they make room for nobody, and may take long."""
    return sorted(steps, key=lambda step: isinstance(step, Start))


class Taking:
    """Notes what came of each step."""

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    async def note(self, step: Step, taken: Awaitable[str]) -> None:
        """Take a step; what is awaited tells of a start why it will never be, and of the others nothing."""
        try:
            refusal = await taken
        except EngineUnavailableError as error:
            self.fail(step.replica, str(error))
        else:
            if refusal:
                self._refused[step.replica] = refusal

    def fail(self, replica: str, why: str) -> None:
        """Its step was perhaps not taken."""
        self._failed[replica] = why

    def outcome(self) -> Mapping[str, str]:
        """As `Engine.apply` returns it.

        Raises:
            StepsFailedError: some steps were perhaps not taken.
        """
        if self._failed:
            raise StepsFailedError(self._failed, self._refused)
        return self._refused
