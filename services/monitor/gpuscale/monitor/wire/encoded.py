"""Server streams that send bytes which were encoded before, so that many subscribers share one encoding.

Encoded messages of one type can be joined: fields of the later ones are added to those of the earlier, and the items of
lists follow each other (protobuf.dev, "Encoding", on last-one-wins and merging). So a response is put together from parts
that were each encoded once.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from google.protobuf.message import Message


def encoded_stream(
    service: str,
    method: str,
    request: type[Message],
    behavior: Callable[[Any, Any], AsyncGenerator[bytes, None]],
) -> grpc.GenericRpcHandler:
    """A handler of one method that takes a message and streams encoded ones.

    Of several handlers for a method the one that was added to the server first answers.
    """
    handler: grpc.RpcMethodHandler[Any, bytes] = grpc.unary_stream_rpc_method_handler(
        behavior, request_deserializer=request.FromString, response_serializer=None
    )
    return grpc.method_handlers_generic_handler(service, {method: handler})
