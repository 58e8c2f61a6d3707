"""A job that holds its GPUs for as long as it runs, and stops when they are lost."""

import subprocess
import sys

from gpuscale.client import Client, LostReservationError, ResourceExhaustedError, connect


def train(client: Client, command: list[str], patience: float = 600.0) -> int:
    """Run a command on two GPUs of at least 8 GiB; its exit code, or 75 where it should be tried again.

    It stands in the queue for `patience` seconds where there is no room.
    """
    try:
        with client.reserve(gpus=2, min_memory="8GiB", wait=patience) as lease:
            with subprocess.Popen(command, env=lease.env()) as process:
                while process.poll() is None:
                    if lease.lost.wait(0.1):
                        process.terminate()
            return process.returncode
    except (LostReservationError, ResourceExhaustedError) as error:
        print(error.message, file=sys.stderr)
        return 75


if __name__ == "__main__":
    with connect() as this_client:
        sys.exit(train(this_client, sys.argv[1:]))
