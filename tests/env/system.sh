#!/usr/bin/env bash
# Debian packages and a running docker daemon. Usage: system.sh packages|up|down|forget
source "$(dirname "$0")/common.sh"

PACKAGES=(python3-venv docker.io mmdebstrap xfsprogs e2fsprogs util-linux iproute2 git make curl)
PIDFILE=$CACHE/dockerd.pid

install_packages() {
  local missing=() p
  for p in "${PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
  done
  [ ${#missing[@]} -eq 0 ] && return
  [ "$(id -u)" = 0 ] || die "root is needed to install: ${missing[*]}"
  say "installing Debian packages: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$CACHE/apt.log" 2>&1 ||
    { tail -20 "$CACHE/apt.log" >&2; die "apt-get install failed"; }
}

# A machine without CAP_SYS_RESOURCE in its bounding set (some sandboxes) cannot start
# privileged containers unless the runtime leaves that capability out.
runtime_args() {
  local bounding
  bounding=$((16#$(awk '/^CapBnd/{print $2}' /proc/self/status)))
  if ! ((bounding >> 24 & 1)); then
    printf -- '--add-runtime=capfit=%s --default-runtime=capfit' "$REPO/tests/hosts/runc-capfit"
  fi
}

start_docker() {
  docker info >/dev/null 2>&1 && return
  say "starting the docker daemon"
  if [ -d /run/systemd/system ]; then
    systemctl start docker
    return
  fi
  # What a killed daemon leaves: its containerd, and pid files that make the next one wait.
  pkill -f /var/run/docker/containerd/containerd.toml || true
  rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid "$PIDFILE"
  # shellcheck disable=SC2046  # the arguments are words on purpose
  setsid dockerd --pidfile "$PIDFILE" $(runtime_args) >"$CACHE/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 60); do
    docker info >/dev/null 2>&1 && return
    sleep 0.5
  done
  tail -20 "$CACHE/dockerd.log" >&2
  die "dockerd did not start within 30 s; its log is $CACHE/dockerd.log"
}

# Only the daemon that this script started, and only when no test host is left on it.
stop_docker() {
  [ -s "$PIDFILE" ] && [ "$(cat "/proc/$(cat "$PIDFILE")/comm" 2>/dev/null)" = dockerd ] || return 0
  [ -z "$(docker ps -q --filter label=kvpersist)" ] || return 0
  say "stopping the docker daemon"
  local pid
  pid=$(cat "$PIDFILE")
  kill "$pid"
  for _ in $(seq 60); do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.5
  done
}

case ${1:-} in
  packages) install_packages ;;
  up) install_packages && start_docker ;;
  down) stop_docker ;;
  forget)
    start_docker
    docker volume ls -q --filter label=kvpersist | xargs -r docker volume rm >/dev/null
    docker image ls -q --filter reference='kvpersist*' --filter reference='kvpersist/*' | sort -u | xargs -r docker image rm -f >/dev/null
    stop_docker
    rm -rf "$CACHE"
    ;;
  *) die "usage: system.sh packages|up|down|forget" ;;
esac
