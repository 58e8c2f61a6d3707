"""One connection between the parent and the child: a message each way at a time, behind its length in four bytes."""

import socket
import struct

from gpuscale.monitor.agent.isolated.codec import Json, decode, encode

_LENGTH = struct.Struct("!I")


def send(lane: socket.socket, message: Json) -> None:
    """Send a message.

    Raises:
        OSError: the other end is gone.
    """
    data = encode(message)
    lane.sendall(_LENGTH.pack(len(data)) + data)


def receive(lane: socket.socket) -> Json:
    """Wait for a message.

    Raises:
        EOFError: the other end is gone.
        OSError: likewise.
    """
    return decode(_exactly(lane, *_LENGTH.unpack(_exactly(lane, _LENGTH.size))))


def _exactly(lane: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = lane.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
