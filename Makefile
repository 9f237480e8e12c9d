# Longer suites than `go test ./...`; each prints what it needs and what it did.

.PHONY: build test race lint fuzz fuzz-slice fault fault-slice fault-long mutants bench

GO ?= go
FUZZTIME ?= 60s

build:
	$(GO) build -o bin/leased ./cmd/leased

test:
	$(GO) test ./...

race:
	$(GO) test -race . ./client/... ./cmd/... ./internal/... ./metrics/... ./schemas/... ./service/...

lint:
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "gofmt: the files above are not formatted"; exit 1; }
	$(GO) vet ./...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

# The decoder alone and each endpoint on a running service, two targets at a time.
fuzz-slice:
	@{ echo schemas FuzzDecode; $(GO) test -list '^Fuzz' ./test/contract | grep '^Fuzz' | sed 's,^,test/contract ,'; } | xargs -P 2 -L 1 \
	  sh -c 'log=$$(mktemp); $(GO) test -run "^$$" -fuzz "^$$1$$" -fuzztime $(FUZZTIME) -parallel 1 ./$$0 >$$log 2>&1 || { cat $$log; exit 1; }; echo "$$0 $$1: $$(grep -h elapsed $$log | tail -1)"; rm -f $$log'

# Every fuzz target of the repository for FUZZTIME each.
fuzz:
	@set -e; for pkg in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg; \
	  done; done

# Histories under faults (test/fault). The slice is what CI runs.
FAULT = $(GO) test ./test/fault -run 'TestFault$$' -v

fault-slice:
	$(FAULT) -timeout 10m -fault.topology r1 -fault.length 5s

fault:
	$(FAULT) -timeout 40m -fault.topology r1
	$(FAULT) -timeout 40m -fault.topology r3

bench:
	$(GO) run ./test/bench
