# Longer suites than `go test ./...`; each prints what it needs and what it did.

.PHONY: build tools test race race-all lint fuzz fuzz-slice fault fault-slice fault-long hostile hostile-long mutants bench

GO ?= go
FUZZTIME ?= 60s
# Fuzzing makes each input that covers something new as small as it can first,
# for up to a minute each: most of the time, with inputs as short as these.
FUZZ = $(GO) test -run "^$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x

build:
	$(GO) build -o bin/leased ./cmd/leased

# Programs that tests run: other versions of nats-server, the nats CLI, the JavaScript client.
# Tests that miss one are skipped; `make test` says at its end which and why.
tools:
	$(GO) run ./internal/testnats/install test/interop/js/package.json

test:
	$(GO) run ./test/suite ./...

# What CI has time for; race-all takes some 15 minutes.
race:
	$(GO) run ./test/suite -- -race . ./metrics ./schemas ./service/...

race-all:
	$(GO) run ./test/suite -- -race . ./client ./cmd/leased ./internal/... ./metrics ./schemas ./service/... ./test/contract

lint:
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "gofmt: the files above are not formatted"; exit 1; }
	$(GO) vet ./...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

# The decoder alone and each endpoint on a running service, two targets at a time.
# A fuzzer that is slow to stop at the end of its time says "context deadline
# exceeded", which is no finding.
fuzz-slice:
	@{ echo schemas FuzzDecode; $(GO) test -list '^Fuzz' ./test/contract | grep '^Fuzz' | sed 's,^,test/contract ,'; } | xargs -P 2 -L 1 \
	  sh -c 'log=$$(mktemp); $(FUZZ) -fuzz "^$$1$$" -parallel 1 ./$$0 >$$log 2>&1 || { grep -q "^    context deadline exceeded" $$log && ! grep -q "Failing input" $$log; } || { cat $$log; exit 1; }; echo "$$0 $$1: $$(grep -h elapsed $$log | tail -1)"; rm -f $$log'

# Every fuzz target of the repository for FUZZTIME each.
fuzz:
	@set -e; for pkg in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$f"; $(FUZZ) -fuzz "^$$f$$" $$pkg; \
	  done; done

# Histories under faults; test/fault/README.md says what the flags mean. A short
# run and the field reports are part of `go test ./...`.
FAULT = $(GO) test ./test/fault -run 'TestFault$$' -v

fault-slice:
	$(FAULT) -timeout 20m -fault.length 8s -fault.only none,kill-service,kill-nodes,step-down -fault.topology r1,r3

fault:
	$(FAULT) -timeout 60m -fault.total 10m -fault.only none,kill-service,kill-server,kill-nodes,kill-follower,step-down,pause-leader,partition,slow-links,edge-renewals,bucket-edits -fault.topology r1,r3

fault-long:
	$(FAULT) -timeout 150m -fault.total 60m -fault.table $(CURDIR)/docs/RELIABILITY.table

# Everything that callers and crowds can do, at once, beside honest holders;
# test/hostile/doc.go says what is judged. Five minutes in all, and 45 in each topology.
P99 ?= 250ms
HOSTILE = $(GO) test ./test/hostile -run 'TestHostile$$' -v

hostile:
	$(HOSTILE) -timeout 15m -hostile.length 1m30s -hostile.p99 $(P99)

hostile-long:
	$(HOSTILE) -timeout 120m -hostile.length 45m

mutants:
	$(GO) test ./test/fault -run TestMutants -fault.mutants -timeout 90m -v

# Ratios to bare JetStream; alone on the machine, or they mean nothing.
bench:
	$(GO) run ./test/bench
