#!/bin/sh
# Install what the tests start or ask privately, from Debian's packages, where this user may: RabbitMQ, PostgreSQL, Chromium, Slurm, strace, sshd, Podman,
# Prometheus with its promtool, and what generates and compiles clients of other languages. Nothing is started here; a test that finds one missing says so and is skipped (in CI it fails).
set -eu

packages=""
ls /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server >/dev/null 2>&1 || packages="rabbitmq-server"
command -v chromium-headless-shell >/dev/null 2>&1 || command -v chromium >/dev/null 2>&1 || packages="$packages chromium-headless-shell"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || packages="$packages postgresql"
command -v podman >/dev/null 2>&1 || packages="$packages podman"
command -v runc >/dev/null 2>&1 || packages="$packages runc"
command -v conmon >/dev/null 2>&1 || packages="$packages conmon"
command -v catatonit >/dev/null 2>&1 || packages="$packages catatonit"
# Not any busybox: the image of the tests is this one file.
dpkg -s busybox-static >/dev/null 2>&1 || packages="$packages busybox-static"
command -v promtool >/dev/null 2>&1 || packages="$packages prometheus"
[ -x /usr/sbin/slurmctld ] || packages="$packages slurm-wlm"
command -v strace >/dev/null 2>&1 || packages="$packages strace"
[ -x /usr/sbin/sshd ] || packages="$packages openssh-server"
command -v ssh >/dev/null 2>&1 || packages="$packages openssh-client"
command -v ip >/dev/null 2>&1 || packages="$packages iproute2"
command -v npm >/dev/null 2>&1 || packages="$packages nodejs npm"
command -v protoc >/dev/null 2>&1 || packages="$packages protobuf-compiler"
command -v grpc_cpp_plugin >/dev/null 2>&1 || packages="$packages protobuf-compiler-grpc"
command -v g++ >/dev/null 2>&1 || packages="$packages g++"
command -v make >/dev/null 2>&1 || packages="$packages make"
command -v pkg-config >/dev/null 2>&1 || packages="$packages pkg-config"
dpkg -s libgrpc++-dev >/dev/null 2>&1 || packages="$packages libgrpc++-dev"
command -v protoc-gen-go >/dev/null 2>&1 || packages="$packages protoc-gen-go"
command -v protoc-gen-go-grpc >/dev/null 2>&1 || packages="$packages protoc-gen-go-grpc"
if [ -z "$packages" ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed, and this is no Debian: $packages; their tests will be skipped" >&2
    exit 0
fi
choose_chromium() { # older Debians have it whole alone
    apt-cache show chromium-headless-shell >/dev/null 2>&1 || packages=$(echo "$packages" | sed 's/chromium-headless-shell/chromium/')
}
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo"
else
    choose_chromium
    echo "not installed, and only root may: $packages; their tests will be skipped" >&2
    echo "  sudo apt-get install --no-install-recommends $packages" >&2
    exit 0
fi
# The packages would start servers of their own on the well-known ports; tests start theirs on free ones.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod +x "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi
$as_root apt-get update -qq
choose_chromium
# One name a word, on purpose.
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
