# Longer suites than `go test ./...`; each prints what it needs and what it did.
.PHONY: build test race lint fuzz fault fault-slice fault-long mutants bench

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

# Every fuzz target of the repository for FUZZTIME each.
fuzz:
	@set -e; for pkg in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg; \
	  done; done
