# `make help` is the onboarding page: every target says what it does and how long it takes.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: help
help: ## Show this page
	@awk 'BEGIN {FS = ":.*## "; print "inferlog: model inference you can bill\n"} \
	  /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2} \
	  /^##@ / {printf "\n%s\n", substr($$0, 5)}' $(MAKEFILE_LIST)

##@ Run
.PHONY: setup
setup: $(READY) ## Create .venv with exact versions (first time about 1 min; 3 GB to download, 7 GB on disk)

.PHONY: demo
demo: $(READY) ## Start everything, run real inferences, show the bill (first time < 4 min, then < 1 min)
	@$(PY) -m docs.demo

.PHONY: up
up: $(READY) ## Start the local stack and leave it running
	@.venv/bin/inferlog up

.PHONY: status
status: ## Say for each part: address, healthy, why not
	@if [ -x .venv/bin/inferlog ]; then .venv/bin/inferlog status; else echo "nothing is set up yet; make up"; fi

.PHONY: down
down: ## Stop the local stack (its data stays; `inferlog down --wipe` removes it)
	@if [ -x .venv/bin/inferlog ]; then .venv/bin/inferlog down; else echo "nothing is set up, so nothing runs"; fi

##@ Change
.PHONY: check
check: $(READY) ## Format, lint, types, import rules, schemas and their page (about 30 s)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports
	@.venv/bin/inferlog schemas check

.PHONY: docs
docs: $(READY) ## Write docs/events.md from the schemas
	@$(PY) -m schemas.gate.event_page

.PHONY: test
test: $(READY) ## Run every test, two at a time, on real servers they start themselves (about 20 min on two cores)
	@$(PY) -m pytest tests -n 2 --dist loadfile

.PHONY: unit
unit: $(READY) ## Run the tests that need no server (about 1 min)
	@$(PY) -m pytest -q tests/unit

.PHONY: format
format: $(READY) ## Rewrite the code in the house format
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

.PHONY: lock
lock: $(READY) ## Resolve the newest allowed versions into constraints.txt
	@.venv/bin/uv pip compile -q --universal --python-version 3.10 --no-header --no-annotate --upgrade \
	  --extra api --extra gpu --extra streams --extra local --extra demo --extra dev --extra export --extra fuzz pyproject.toml \
	  | sed '1i # Exact versions of everything an environment may hold, for Python 3.10 to 3.13. Regenerate with: make lock' \
	  > constraints.txt.new && mv constraints.txt.new constraints.txt

##@ Measure
.PHONY: bench-http
bench-http: $(READY) ## Closed and open loop over HTTP, everything on this machine (about 4 min)
	@$(PY) -m benchmarks.http

.PHONY: bench-flood
bench-flood: $(READY) ## p95 of inference quiet and under twelve kinds of hostile callers, and the memory these take (about 4 min)
	@$(PY) -m benchmarks.flood

.PHONY: bench-route-follow
bench-route-follow: $(READY) ## How long gateways go on with the old version once a route was switched, and what following costs (about 4 min)
	@$(PY) -m benchmarks.route_follow $(WITH_SEED)

.PHONY: bench-results
bench-results: $(READY) ## Answers from the results topic, a million results long, while Redis has none (about 5 min)
	@$(PY) -m benchmarks.results $(WITH_SEED)

.PHONY: bench-scale
bench-scale: $(READY) ## A gateway with 100,000 keys and 1,000 versions beside one with 400 and 3 (about 6 min)
	@$(PY) -m benchmarks.scale $(WITH_SEED)

.PHONY: bench-codec
bench-codec: $(READY) ## Usage records to bytes and back on one core, beside bare fastavro (about 10 s)
	@$(PY) -m benchmarks.codec

# `make bench-ledger EVENTS=100000`; a seed of one's own by SEED=7.
EVENTS ?= 500000
.PHONY: bench-ledger
bench-ledger: $(READY) ## Usage events into hourly sums: both modes of the ledger, beside Faust, Postgres and Kafka Streams (about 5 min)
	@$(PY) -m benchmarks.ledger --events $(EVENTS) $(WITH_SEED)

.PHONY: bench-ledger-latency
bench-ledger-latency: $(READY) ## From usage that is due to the ledger that shows it, at 300 events a second, both modes (about 3 min)
	@$(PY) -m benchmarks.ledger.latency $(WITH_SEED)

# `make bench-ledger-size ROWS=1000000` for a try.
ROWS ?= 25000000
.PHONY: bench-ledger-size
bench-ledger-size: $(READY) ## The ledger's transaction with 25 million requests remembered, and with none (about 15 min, 7 GB of disk)
	@$(PY) -m benchmarks.ledger_size --rows $(ROWS) $(WITH_SEED)

# `make fuzz SECONDS=600`; inputs that broke the promise are left as fuzz-*, and belong into tests/fuzz/corpus.
SECONDS_OF_FUZZ := $(if $(filter command environment,$(origin SECONDS)),$(SECONDS),60)
.PHONY: fuzz
fuzz: $(READY) ## Fuzz the decoder with coverage guidance, a minute unless SECONDS says more (Linux, Python 3.11 or newer)
	@.venv/bin/uv pip install -q -p .venv -c constraints.txt -e '.[fuzz]'
	@mkdir -p .fuzz && $(PY) -m tests.fuzz.decoder -max_total_time=$(SECONDS_OF_FUZZ) -timeout=10 -rss_limit_mb=2048 \
	  -artifact_prefix=fuzz- .fuzz tests/fuzz/corpus

##@ Storms
# `make soak-ledger SECONDS=60 SEED=7`; the plan of faults has its share of a full storm's.
SECONDS_OF_STORM := $(if $(filter command environment,$(origin SECONDS)),$(SECONDS),600)
WITH_SEED := $(if $(SEED),--seed $(SEED))
.PHONY: soak-ledger
soak-ledger: $(READY) ## Usage while ledgers, PostgreSQL and Kafka go down; counted to the unit (SECONDS=600 SEED=…)
	@$(PY) -m tests.storms.ledger --seconds $(SECONDS_OF_STORM) $(WITH_SEED)

.PHONY: storm-deadlock
storm-deadlock: $(READY) ## Four ledgers with the same customers in every batch; no deadlock (SECONDS=600 SEED=…)
	@$(PY) -m tests.storms.deadlock --seconds $(SECONDS_OF_STORM) $(WITH_SEED)

# `make revocation-proof ROUNDS=6` for a try.
.PHONY: revocation-proof
revocation-proof: $(READY) ## Four gateways serve a key until it is revoked, 24 times; in half of them Redis forgets (about 2 min)
	@$(PY) -m tests.storms.revocation --rounds $(if $(filter command environment,$(origin ROUNDS)),$(ROUNDS),24)

# `make limiter-proof CALLS=50000 SECONDS=10 SEED=7` for a try.
CALLS ?= 1000000
SECONDS_OF_PROOF := $(if $(filter command environment,$(origin SECONDS)),$(SECONDS),60)
.PHONY: limiter-proof
limiter-proof: $(READY) ## The exact law of rates on a million calls of eight processes, mutants, and faults of Redis (about 5 min; CALLS=… SEED=…)
	@$(PY) -m tests.storms.limiter --calls $(CALLS) --seconds $(SECONDS_OF_PROOF) $(WITH_SEED)

.PHONY: nightly
nightly: $(READY) ## What takes longer than a change may wait: storms of 5 min and fuzzing of 10 (about 25 min)
	@$(PY) -m tests.storms.ledger --seconds 300
	@$(PY) -m tests.storms.deadlock --seconds 300
	@$(MAKE) --no-print-directory fuzz SECONDS=600

# The stamp is younger than what it was made from; a half-made .venv has no stamp and is completed.
$(READY): pyproject.toml constraints.txt infra/deploy/setup.sh
	@bash infra/deploy/setup.sh
