#!/usr/bin/env bash
# Everything that a run on test hosts needs, side by side: controller, host image, serving
# image and model. Prints nothing but progress; quick when all of it is there.
source "$(dirname "$0")/common.sh"
cd "$REPO/tests/env"

./system.sh up
./serving.sh bootstrap
./controller.sh base >/dev/null
jobs=()
./images.sh host & jobs+=($!)
{ ./serving.sh image && ./serving.sh model; } & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job" || failed=true; done
[ -z "${failed:-}" ] || die "the test environment could not be prepared; the lines above say why"
