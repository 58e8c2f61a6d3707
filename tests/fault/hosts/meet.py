"""A member of a job that meets the others at MASTER_ADDR, as the launchers of training do: each tells its rank, and hears the sum."""

import os
import socket
import time

TRIES = 200


def main() -> None:
    rank, count = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("", port)) as server:
            peers = [server.accept()[0] for _ in range(count - 1)]
            total = sum(int(peer.makefile().readline()) for peer in peers)
            for peer in peers:
                peer.sendall(f"{total}\n".encode())
    else:
        peer = _connected(os.environ["MASTER_ADDR"], port)
        peer.sendall(f"{rank}\n".encode())
        total = int(peer.makefile().readline())
    print(f"{rank} of {count} heard {total}", flush=True)


def _connected(host: str, port: int) -> socket.socket:
    for _ in range(TRIES):
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.1)  # the first may start later
    raise TimeoutError(f"nobody at {host}:{port}")


if __name__ == "__main__":
    main()
