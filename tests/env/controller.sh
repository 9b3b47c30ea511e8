#!/usr/bin/env bash
# Controller environments. Usage: controller.sh base|next
#   base  ansible-core 2.19 on python3 (Debian 12: 3.11): everything runs on it
#   next  ansible-core 2.21, where a Python 3.12 or newer is found; else exits 3
# Prints the environment's directory.
source "$(dirname "$0")/common.sh"

newer_python() {
  local p
  for p in python3.13 python3.12 "$HOME"/.pyenv/versions/3.13.*/bin/python "$HOME"/.pyenv/versions/3.12.*/bin/python; do
    command -v "$p" >/dev/null 2>&1 && "$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null &&
      { command -v "$p"; return; }
  done
  return 1
}

install_collections() {
  local into=$COLLECTIONS
  [ -d "$into/ansible_collections/community/docker" ] && return
  say "installing the collections of requirements.yml"
  if ! timeout 60 "$1/bin/ansible-galaxy" collection install --timeout 10 -r "$REPO/requirements.yml" -p "$into" \
    >"$CACHE/galaxy.log" 2>&1; then
    say "Galaxy is not in reach: taking them from PyPI's ansible package"
    rm -rf "$into" "$CACHE/ansible-wheel"
    "$CACHE/bootstrap/bin/pip" download -q --no-deps --dest "$CACHE/ansible-wheel" \
      -r "$REPO/requirements/collections-from-pypi.txt" >"$CACHE/galaxy.log" 2>&1 ||
      { cat "$CACHE/galaxy.log" >&2; die "could not fetch the collections"; }
    python3 - "$CACHE"/ansible-wheel/*.whl "$into" <<'PY'
import sys, zipfile
wheel, into = sys.argv[1:]
wanted = tuple(f"ansible_collections/{c}/" for c in
               ("ansible/posix", "community/docker", "community/library_inventory_filtering_v1"))
with zipfile.ZipFile(wheel) as z:
    z.extractall(into, [n for n in z.namelist() if n.startswith(wanted)])
PY
    rm -rf "$CACHE/ansible-wheel"
  fi
}

make_venv() { # make_venv PYTHON ANSIBLE_CORE_VERSION
  local venv
  venv=$CACHE/controller-$2-$(digest "$REPO/requirements/controller.txt")
  if [ ! -e "$venv/.complete" ]; then
    say "creating the controller environment: ansible-core $2 on $("$1" -V)"
    "$REPO/tests/env/serving.sh" bootstrap
    rm -rf "$venv" && "$1" -m venv "$venv"
    "$UV" pip install -q --system-certs --python "$venv/bin/python" -r "$REPO/requirements/controller.txt" "ansible-core==$2" >&2
    touch "$venv/.complete"
  fi
  install_collections "$venv"
  echo "$venv"
}

case ${1:-} in
  base) make_venv /usr/bin/python3 "$ANSIBLE_CORE_BASE" ;;
  next) newer=$(newer_python) || exit 3; make_venv "$newer" "$ANSIBLE_CORE_NEXT" ;;
  *) die "usage: controller.sh base|next" ;;
esac
