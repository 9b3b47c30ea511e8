# Start with `make demo`; check a change with `make test`. Both install what they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help

.PHONY: help demo demo-down test test-all faults soak lint test-unit bench clean-cache

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: ## provision a test host with site.yml, prove that restarts cost no recompute
	@tests/demo.sh up

demo-down: ## remove everything that the demo made
	@tests/demo.sh down

test: ## linters, unit tests, molecule on real hosts
	@tests/test.sh all

test-all: ## the same, plus what takes long
	@tests/test.sh long

faults: ## break every row of the failure model while chats are streamed, and print the matrix
	@tests/test.sh faults

soak: ## kill and restart the services under load for KVP_SOAK_MINUTES (120)
	@KVP_SOAK_MINUTES=$${KVP_SOAK_MINUTES:-120} tests/test.sh soak

lint: ## linters only
	@tests/test.sh lint

test-unit: ## unit tests only, on each ansible-core that runs here
	@tests/test.sh unit

bench: ## speed and memory of the store against the targets
	@tests/bench/bench.sh

clean-cache: ## forget downloaded wheels and built images
	@tests/env/system.sh forget
