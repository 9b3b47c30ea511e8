#!/usr/bin/env bash
# The demo: a stand-in for a GPU VM, provisioned by the same site.yml. Usage: demo.sh up|down
source "$(dirname "$0")/env/common.sh"
cd "$REPO"
HOST=kvpersist-demo

up() {
  tests/env/prepare.sh
  tests/hosts/host.sh up "$HOST" --serving
  use_controller base
  export ANSIBLE_DISPLAY_SKIPPED_HOSTS=false
  say "provisioning $HOST: playbooks/site.yml"
  ansible-playbook -i inventories/demo playbooks/site.yml
  say "proving it: playbooks/recovery.yml restarts vLLM, then lmcache, then both"
  ansible-playbook -i inventories/demo playbooks/recovery.yml
  echo
  cat "reports/recovery-$HOST.txt"
  local address
  address=$(docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$HOST")
  cat <<TEXT
The host runs on. It is a container with systemd; its address is $address.
  chat      docker exec -it $HOST curl -s http://127.0.0.1:8000/v1/chat/completions \\
              -H 'Content-Type: application/json' -d '{"model": "HuggingFaceTB/SmolLM2-135M-Instruct",
              "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
  services  docker exec $HOST systemctl status kvpersist-lmcache kvpersist-vllm
  logs      docker exec $HOST journalctl -u kvpersist-vllm -n 50
  metrics   docker exec $HOST curl -s http://127.0.0.1:8080/metrics
  cache     docker exec $HOST ls -l /var/lib/kvpersist
  settings  docker exec $HOST ls /etc/kvpersist
  report    reports/recovery-$HOST.json
Remove all of it: make demo-down
TEXT
  say "done in $SECONDS s"
}

down() {
  tests/hosts/host.sh down "$HOST"
  rm -f "reports/recovery-$HOST".{json,txt}
  say "kept for the next time: wheels and images ($CACHE, docker); make clean-cache forgets them"
  tests/env/system.sh down
}

case ${1:-} in
  up | down) "$1" ;;
  *) die "usage: demo.sh up|down" ;;
esac
