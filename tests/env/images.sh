#!/usr/bin/env bash
# Base images for the test hosts and the serving image. Usage: images.sh host|serving-base
source "$(dirname "$0")/common.sh"

# With a registry both Dockerfiles start from debian:12; without one, from the same
# thing made by mmdebstrap out of Debian's packages.
base_image() {
  local local_base=kvpersist-debian:12
  docker image inspect "$local_base" >/dev/null 2>&1 && { echo "$local_base"; return; }
  (
    flock 9
    docker image inspect "$local_base" >/dev/null 2>&1 && exit
    if timeout 60 docker pull -q debian:12 >/dev/null 2>&1; then
      docker tag debian:12 "$local_base"
    else
      say "no image registry in reach: building debian:12 with mmdebstrap"
      mmdebstrap --quiet --variant=minbase bookworm - | docker import - "$local_base" >/dev/null
    fi
  ) 9>"$CACHE/base-image.lock"
  echo "$local_base"
}

# build IMAGE CONTEXT - host network: the machine's own way to the package mirror
build() {
  docker image inspect "$1" >/dev/null 2>&1 && return
  say "building image $1"
  docker build -q --network host --build-arg BASE="$(base_image)" -t "$1" "$2" >/dev/null
}

case ${1:-} in
  host) build "$HOST_IMAGE" "$REPO/tests/hosts" ;;
  serving-base) build "$SERVING_BASE" "$REPO/tests/serving" ;;
  *) die "usage: images.sh host|serving-base" ;;
esac
