"""Opens `/metrics` where the settings ask for it; the HTTP server is not even imported where they do not."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from gpuscale.common.runtime.logs import get_logger
from gpuscale.monitor.app.exposition_settings import ExpositionSettings

_log = get_logger(__name__)


@asynccontextmanager
async def open_metrics(
    settings: ExpositionSettings, render: Callable[[], AsyncGenerator[bytes]]
) -> AsyncGenerator[str]:
    """Serve a page until the block ends; yields the address, empty where nothing is served.

    Raises:
        FailedPreconditionError: the address cannot be listened on, or needs TLS; a file cannot be used.
        InvalidArgumentError: the address is none.
    """
    if not settings.metrics_listen:
        yield ""
        return
    from gpuscale.common.rpc.metrics_http import serve_metrics

    options, authenticator = settings.server_options(), settings.authenticator()
    async with serve_metrics(settings.metrics_listen, options, authenticator, render) as address:
        _log.info("metrics are served", address=address)
        yield address
