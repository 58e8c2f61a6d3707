"""Sizes, times and counts that every server and channel of gpuscale shares, as gRPC channel arguments.

The names are gRPC core's own (`grpc_types.h`). Why each value: a message of 4 MiB and metadata of 16 KiB are what gRPC
admits by default, stated here so that both sides agree. Agents ping each 20 s, so servers admit a ping each 10 s; a server
with core's default (5 min) would close their connections for too many pings. The two pending limits let thousands of
agents come back at once: core's default refuses calls at random from about 1,000 that wait.
"""

from typing import Final

ChannelArguments = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_STREAMS_PER_CONNECTION: Final = 1_000

SERVER_ARGUMENTS: Final[ChannelArguments] = (
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it silently
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    (
        "grpc.max_connection_age_ms",
        3_600_000,
    ),  # connections end now and then, so that renewed certificates count
    ("grpc.max_connection_age_grace_ms", 60_000),
)

CHANNEL_ARGUMENTS: Final[ChannelArguments] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # calls bear tokens: they go through no proxy that just happens to be set
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: ping on while a stream is silent
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    (
        "grpc.min_reconnect_backoff_ms",
        5_000,
    ),  # in core this is the least time that one attempt to connect may take
)


def channel_arguments(dial_timeout: float | None = None) -> ChannelArguments:
    """The arguments of a channel, one attempt to connect taking at most that many seconds; 5 when not given."""
    if dial_timeout is None:
        return CHANNEL_ARGUMENTS
    attempt = "grpc.min_reconnect_backoff_ms"
    others = tuple(pair for pair in CHANNEL_ARGUMENTS if pair[0] != attempt)
    return (*others, (attempt, max(1, round(dial_timeout * 1000))))
