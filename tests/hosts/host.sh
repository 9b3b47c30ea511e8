#!/usr/bin/env bash
# Test hosts: a container with systemd as PID 1, its own docker daemon and a loop-backed
# block device as its NVMe. Shared by `make demo` and every molecule scenario.
#
#   host.sh up NAME [--serving] [--disk-gb N]   create and boot (does nothing when up)
#   host.sh down NAME                           remove it, its disk and its containers
#
# --serving also loads the CPU serving image into the host's own docker. That image takes
# long to load, so the volume of the host's docker stays behind as a cache, with nothing
# else on it; `make clean-cache` removes it.
source "$(dirname "$0")/../env/common.sh"

disk_image() { # path of NAME's disk, on its docker volume: loops on overlayfs are slow
  echo "$(docker volume inspect -f '{{.Mountpoint}}' "$1-docker")/nvme.img"
}

attach_disk() { # attach_disk NAME GB
  local image loop
  image=$(disk_image "$1")
  [ -e "$image" ] || truncate -s "${2}G" "$image"
  loop=$(losetup -n -O NAME -j "$image" | head -1)
  [ -n "$loop" ] || loop=$(losetup -f --show "$image")
  # A container's /dev is a snapshot of what existed when it started.
  docker exec "$1" sh -euc '
    [ -b "$0" ] || mknod "$0" b 7 "${0#/dev/loop}"
    mkdir -p /dev/disk/by-id
    ln -sfn "$0" /dev/disk/by-id/nvme-kvpersist-test' "$loop"
}

wait_for() { # wait_for SECONDS WHAT COMMAND...
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || die "$what: not within the deadline"
    sleep 0.3
  done
}

booted() { docker exec "$1" systemctl is-system-running 2>/dev/null | grep -qE '^(running|degraded)$'; }

load_serving_image() { # one stream from the cached tar: no copy of 2 GB in between
  docker exec "$1" docker image inspect "$SERVING_IMAGE" >/dev/null 2>&1 && return
  say "$1: loading the serving image into its docker"
  docker exec -i "$1" docker import \
    --change 'ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    - "$SERVING_IMAGE" <"$SERVING_TAR" >/dev/null
  docker exec "$1" docker tag "$SERVING_IMAGE" "${SERVING_IMAGE%:*}:0.32.0"
}

up() {
  local name=$1 serving=false disk_gb=8
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --serving) serving=true; shift ;;
      --disk-gb) disk_gb=$2; shift 2 ;;
      *) die "unknown option: $1" ;;
    esac
  done
  if [ -z "$(docker ps -q --filter "name=^$name$")" ]; then
    say "$name: booting"
    docker rm -f "$name" >/dev/null 2>&1 || true
    docker volume create --label kvpersist "$name-docker" >/dev/null
    mkdir -p "$WHEELS" "$(dirname "$MODEL_DIR")"
    # No /sys/fs/cgroup mount: its systemd would remount the machine's own read-only.
    docker run -d --name "$name" --hostname "$name" --label kvpersist --privileged --cgroupns private \
      --tmpfs /run --tmpfs /run/lock --shm-size 4g -v "$name-docker:/var/lib/docker" \
      -v "$WHEELS:/srv/wheels:ro" -v "$(dirname "$MODEL_DIR"):/srv/models:ro" "$HOST_IMAGE" >/dev/null
    wait_for 60 "$name: boot" booted "$name"
    wait_for 30 "$name: docker" docker exec "$name" docker info
    docker exec "$name" sh -c 'docker ps -aq | xargs -r docker rm -f' >/dev/null # of a host that was not taken down
  fi
  attach_disk "$name" "$disk_gb"
  if [ "$serving" = true ]; then load_serving_image "$name"; fi
}

down() {
  local name=$1 image loop
  say "$name: removing"
  local keep=false
  docker exec "$name" docker image inspect "$SERVING_IMAGE" >/dev/null 2>&1 && keep=true
  # Processes in a nested container's cgroup outlive a kill; stop them first.
  docker exec "$name" sh -c 'docker ps -aq | xargs -r docker rm -f; umount -a -t xfs,ext4' >/dev/null 2>&1 || true
  docker rm -f "$name" >/dev/null 2>&1 || true
  if docker volume inspect "$name-docker" >/dev/null 2>&1; then
    # Also what a test left on the volume: loop devices are the machine's and outlive containers.
    for image in "$(dirname "$(disk_image "$name")")"/*.img; do
      for loop in $(losetup -n -O NAME -j "$image"); do losetup -d "$loop"; done
      rm -f "$image"
    done
    # An image of another version, or none, is no use to the next host.
    [ "$keep" = true ] || docker volume rm -f "$name-docker" >/dev/null
  fi
}

case ${1:-} in
  up | down) [ -n "${2:-}" ] || die "usage: host.sh $1 NAME"; "$@" ;;
  *) die "usage: host.sh up|down NAME [--serving] [--disk-gb N]" ;;
esac
