"""What a visitor who signed in may do: with the visitor's own token, so that the gateway says who may and notes who did."""

from collections.abc import Awaitable, Callable
from functools import partial

from nicegui import ui

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client import AsyncClient, GpuscaleError

Connect = Callable[[str], AsyncClient]
"""Makes a client that sends a token."""
Action = Callable[[AsyncClient], Awaitable[object]]


class Hands:
    """Acts for one visitor.

    Args:
        connect: makes the client.
        token: gives what the visitor showed, for as long as the visitor is signed in.
    """

    def __init__(self, connect: Connect, token: Callable[[], str | None]) -> None:
        self._connect = connect
        self._token = token

    @property
    def tied(self) -> bool:
        """Whether the visitor is not signed in any more: signed out on another page, or for too long."""
        return self._token() is None

    async def release(self, one: allocator_api.Reservation) -> None:
        """Give the GPUs of a reservation back, after asking."""
        name = one.name.removeprefix("reservations/")
        if await _confirmed(f"Release {name}, held by {one.holder}? Whatever runs on its GPUs loses them."):
            await self._do(partial(_give_back, one.name), f"{name} is released")

    async def set_replicas(self, one: autoscaler_api.Endpoint, replicas: int) -> None:
        """Order a number of replicas; refused where somebody else ordered another one meanwhile."""
        request = autoscaler_api.SetReplicasRequest(
            name=one.name, replicas=replicas, current_replicas=one.status.desired_replicas
        )
        await self._do(
            lambda client: client.endpoints.SetReplicas(request), f"{replicas} replicas are wanted now"
        )

    async def _do(self, act: Action, done: str) -> None:
        token = self._token()
        if token is None:  # the page says so in a moment
            return
        try:
            async with self._connect(token) as client:
                await act(client)
        except GpuscaleError as error:
            ui.notify(error.message, type="negative")
        else:
            ui.notify(done, type="positive")


async def _give_back(name: str, client: AsyncClient) -> None:
    """Release by the fence that the visitor is told: what the dashboard itself was told may have none."""
    one = (await client.allocator.GetReservation(allocator_api.GetReservationRequest(name=name))).reservation
    await client.allocator.ReleaseReservation(
        allocator_api.ReleaseReservationRequest(name=name, fence=one.fence)
    )


async def _confirmed(question: str) -> bool:
    """Ask before what cannot be undone."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Yes", on_click=partial(dialog.submit, result=True)).mark("yes")
            ui.button("No", on_click=partial(dialog.submit, result=False)).props("flat")
    answer: object = await dialog
    dialog.delete()
    return answer is True
