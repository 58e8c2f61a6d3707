#!/bin/sh
# Install the servers the tests start privately: RabbitMQ, from Debian's packages, where this user may.
# Nothing is started here; a test that finds no server says so and is skipped (in CI it fails).
set -eu

if ls /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "RabbitMQ is not installed and this is no Debian: broker tests will be skipped" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo"
else
    echo "RabbitMQ is not installed and only root may: broker tests will be skipped" >&2
    echo "  sudo apt-get install --no-install-recommends rabbitmq-server" >&2
    exit 0
fi
# The package would start a broker of its own on the well-known ports; tests start theirs on free ones.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod +x "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends rabbitmq-server >/dev/null
