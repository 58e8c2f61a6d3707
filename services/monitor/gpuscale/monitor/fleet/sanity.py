"""What a snapshot must be to be believed, beyond the rules of the contract."""

from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.validation import violations

LONGEST_PERIOD_SECONDS = 3600


def refuse_snapshot(snapshot: types_api.Snapshot, node: str, epoch: str) -> str:
    """Why a snapshot of a stream that began with this node and epoch is refused; empty if it is not."""
    problems = violations(snapshot)
    if problems:
        return f"{problems[0].field} {problems[0].description}"
    if snapshot.node != node or snapshot.epoch != epoch:
        return "its node and epoch are not those of Hello"
    if not snapshot.HasField("period") or snapshot.period.seconds > LONGEST_PERIOD_SECONDS:
        return "its period is not within an hour"
    seen: set[str] = set()
    for index, gpu in enumerate(snapshot.gpus):
        uuid = gpu.uuid.lower()
        if uuid in seen:
            return f"gpus[{index}] has the UUID of another one"
        seen.add(uuid)
    return refuse_memory(snapshot)


def refuse_memory(snapshot: types_api.Snapshot) -> str:
    """Why a GPU of a snapshot cannot have the memory that it shows; empty if all can."""
    for index, gpu in enumerate(snapshot.gpus):
        reading = gpu.reading
        if not reading.HasField("memory_total_bytes"):
            continue
        total = reading.memory_total_bytes
        if reading.memory_free_bytes > total:
            return f"gpus[{index}].reading.memory_free_bytes is above memory_total_bytes"
        # Free and used are read one after the other, and v1 records count reserved memory as used.
        if reading.memory_free_bytes + reading.memory_used_bytes > total * 1.05:
            return f"gpus[{index}].reading.memory_used_bytes and memory_free_bytes are above memory_total_bytes together"
    return ""
