#!/usr/bin/env bash
# The checks of this repository. Usage: test.sh lint|unit|all|long|faults|soak
# It ends with what went wrong, and the last line is the count: "N passed, N failed".
source "$(dirname "$0")/env/common.sh"
cd "$REPO"
ROLES=collections/ansible_collections/sikkatu/kvpersist/roles
passed=0 failed=0 notes=()
OUTPUT=$(mktemp) BESIDE=$(mktemp) beside_pid=
trap 'rm -f "$OUTPUT" "$BESIDE" "$BESIDE.status"; [ -z "$beside_pid" ] || kill "$beside_pid" 2>/dev/null || true' EXIT

step() { # step NAME COMMAND... - run one check, count it, go on
  local name=$1 start=$SECONDS
  shift
  say "== $name"
  if ("$@") 2>&1 | tee "$OUTPUT"; then
    passed=$((passed + 1)) && say "ok: $name ($((SECONDS - start)) s)"
  else
    failed=$((failed + 1)) && say "FAILED: $name ($((SECONDS - start)) s)"
    notes+=("FAILED: $name" "$(why)")
  fi
}

beside() { # beside COMMAND... - start it; the steps that follow run meanwhile, until `awaited`
  say "== beside what follows: $*"
  {
    ("$@") >"$BESIDE" 2>&1 && echo 0 >"$BESIDE.status" || echo 1 >"$BESIDE.status"
  } &
  beside_pid=$!
}

awaited() { # the output and exit status of what was started by `beside`
  until [ -s "$BESIDE.status" ]; do sleep 1; done # `wait` knows no child of another shell
  cat "$BESIDE"
  return "$(cat "$BESIDE.status")"
}

why() { # the lines of OUTPUT that say what went wrong, or else its end; without colours and molecule's rails
  sed -E 's/\x1b\[[0-9;]*m//g; s/^ *│ ?//' "$OUTPUT" >"$OUTPUT.plain"
  grep -aE '^(E  |(FAILED|ERROR) )' "$OUTPUT.plain" | cut -c 1-300 | tail -n 25 ||
    grep -aE -A 12 'fatal: |\[ERROR\]|error: ' "$OUTPUT.plain" | tail -n 40 || tail -n 20 "$OUTPUT.plain"
  rm "$OUTPUT.plain"
}

lint() {
  step "yamllint" yamllint -c .config/yamllint.yml .
  step "ruff" sh -c 'ruff check . && ruff format --check .'
  step "shellcheck" shellcheck -x -P SCRIPTDIR .ci/run tests/*.sh tests/{bench,env,hosts,serving}/*.sh \
    "$ROLES"/kvp_lmcache/files/check-root "$ROLES"/kvp_vllm/files/vllm-entrypoint
  step "mypy --strict" mypy collections/ansible_collections/sikkatu/kvpersist/plugins filter_plugins
  step "ansible-lint" ansible-lint --profile production
}

# Every leg runs on its own ansible-core; "next" needs Python 3.12 or newer.
has_next=true
tests/env/controller.sh next >/dev/null || has_next=false
on() { # on base|next COMMAND...
  use_controller "$1"
  shift
  "$@"
}

unit() {
  step "unit tests, ansible-core $ANSIBLE_CORE_BASE" on base pytest
  if $has_next; then
    step "unit tests, ansible-core $ANSIBLE_CORE_NEXT" on next pytest
  else
    notes+=("NOT RUN: ansible-core $ANSIBLE_CORE_NEXT, which needs Python 3.12 or newer; none was found")
  fi
}

built_collection() ( # built, installed into an empty place and run from there
  set -e
  place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
  ansible-galaxy collection build --output-path "$place" collections/ansible_collections/sikkatu/kvpersist
  export ANSIBLE_COLLECTIONS_PATH=$place/installed:$COLLECTIONS # without this checkout
  ansible-galaxy collection install --no-deps -p "$place/installed" "$place"/sikkatu-kvpersist-*.tar.gz
  test -f "$place/installed/ansible_collections/sikkatu/kvpersist/NOTICE"
  cd "$place"
  ansible-playbook -i "$REPO/inventories/demo" \
    sikkatu.kvpersist.site --list-tasks | grep 'kvp_vllm'
)

molecule_on() { # molecule_on base|next SCENARIO
  use_controller "$1"
  # Named: molecule looks for it at the top of a git checkout only, and passes without running anything elsewhere.
  molecule --base-config "$REPO/.config/molecule/config.yml" test -s "$2" --destroy always
}

all() {
  tests/env/prepare.sh
  beside molecule_on base storage
  lint
  unit
  step "collection build and install" built_collection
  local newest=base
  $has_next && newest=next
  step "the store against LMCache $(sed -n 's/^lmcache==//p' "$ROLES"/kvp_lmcache/files/requirements-cpu.txt)" tests/env/serving.sh contract
  step "molecule storage" awaited
  step "molecule default" molecule_on base default
  step "molecule identity" molecule_on base identity
  step "molecule restart-recovery" molecule_on $newest restart-recovery
  step "molecule faults" molecule_on base faults
}

long() {
  export KVP_LONG=1
  all
  $has_next && step "molecule storage, ansible-core $ANSIBLE_CORE_NEXT" molecule_on next storage
  $has_next && step "molecule default, ansible-core $ANSIBLE_CORE_NEXT" molecule_on next default
  step "molecule restart-recovery, ansible-core $ANSIBLE_CORE_BASE" molecule_on base restart-recovery
  step "molecule upgrade" molecule_on base upgrade
}

faults() { # every row of the failure model
  export KVP_LONG=1
  tests/env/prepare.sh
  step "molecule faults" molecule_on base faults
}

soak() {
  export PYTEST_ADDOPTS="-k soak"
  tests/env/prepare.sh
  step "molecule faults, soak" molecule_on base faults
}

case ${1:-} in
  lint | unit | all | long | faults | soak)
    tests/env/system.sh packages
    use_controller base
    "$1"
    ;;
  *) die "usage: test.sh lint|unit|all|long|faults|soak" ;;
esac
tests/env/system.sh down
printf '%s\n' ${notes[@]+"${notes[@]}"}
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
