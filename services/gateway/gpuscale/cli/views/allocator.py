"""Reservations and the GPUs they hold."""

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.cli.console.cells import Column, View, counted_models, duration, short, since, text, word


def _nodes(reservation: allocator_api.Reservation) -> str:
    return text(",".join(dict.fromkeys(gpu.node for gpu in reservation.gpus)))


def _gpu_count(reservation: allocator_api.Reservation) -> str:
    return counted_models(reservation.gpus, simulated=any(gpu.simulated for gpu in reservation.gpus))


def _state(reservation: allocator_api.Reservation) -> str:
    quarantined = any(gpu.quarantine for gpu in reservation.usage.gpus)
    return f"{word(reservation, 'state')}{',QUARANTINED' if quarantined else ''}"


RESERVATIONS = View[allocator_api.Reservation](
    "reservations",
    (
        Column("NAME", lambda reservation: short(reservation.name)),
        Column("HOLDER", lambda reservation: text(reservation.holder)),
        Column("STATE", _state),
        Column("GPUS", _gpu_count),
        Column("NODE", _nodes),
        Column("FENCE", lambda reservation: str(reservation.fence or "-")),
        Column("LEFT", lambda reservation: duration(reservation, "remaining"), moving=True),
        Column("TTL", lambda reservation: duration(reservation, "ttl"), wide=True),
        Column("AGE", lambda reservation: since(reservation, "create_time"), moving=True),
        Column("OWNER", lambda reservation: text(reservation.owner), wide=True),
        Column("POLICY", lambda reservation: word(reservation, "policy"), wide=True),
        Column("UUIDS", lambda reservation: text(",".join(gpu.uuid for gpu in reservation.gpus)), wide=True),
    ),
)


def _parts(gpu: allocator_api.ReservedGpu) -> str:
    return " + ".join(
        f"{part.weight:g} x {part.name} {part.value:.3f}"
        if part.HasField("value")
        else f"{part.name} unknown"
        for part in gpu.score.parts
    )


RESERVED_GPUS = View[allocator_api.ReservedGpu](
    "gpus",
    (
        Column("NODE", lambda gpu: gpu.node),
        Column("GPU", lambda gpu: str(gpu.index)),
        Column("MODEL", lambda gpu: f"{text(gpu.model)} SIMULATED" if gpu.simulated else text(gpu.model)),
        Column("SCORE", lambda gpu: f"{gpu.score.total:.3f}"),
        Column("BECAUSE", lambda gpu: text(_parts(gpu))),
        Column("NOTE", lambda gpu: text(gpu.score.note), wide=True),
        Column("UUID", lambda gpu: gpu.uuid),
    ),
)
