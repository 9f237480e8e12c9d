package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/leased/leased"
)

// health answers /healthz and /readyz, from before the service starts until
// after it has ended.
type health struct {
	log     *logs
	service atomic.Pointer[leased.Service]
	links   *links // set before service
	leaving atomic.Bool
}

func (h *health) checks() []leased.Check {
	var checks []leased.Check
	svc := h.service.Load()
	if svc == nil {
		checks = append(checks, leased.Check{Name: "started", Detail: "the service is starting"})
	} else {
		checks = append(svc.Ready(), h.links.permitted())
	}
	checks = append(checks, h.log.check())
	if h.leaving.Load() {
		checks = append(checks, leased.Check{Name: "staying", Detail: "the service is told to stop and takes no more calls"})
	}
	return checks
}

func (h *health) ready() bool { return len(failed(h.checks())) == 0 }

// failed names the checks that keep the service from being ready.
func failed(checks []leased.Check) (names []string) {
	for _, c := range checks {
		if !c.OK {
			names = append(names, c.Name)
		}
	}
	return names
}

// look has the service look at its bucket again.
func (h *health) look() {
	if svc := h.service.Load(); svc != nil {
		svc.Look()
	}
}

// healthz says that the process runs, and nothing about NATS: a restart would
// mend nothing there.
func (h *health) healthz(*http.Request) (int, string) { return http.StatusOK, "ok\n" }

// readyz says whether calls are answered, and with ?verbose why not.
func (h *health) readyz(r *http.Request) (int, string) {
	checks := h.checks()
	not := failed(checks)
	code, body := http.StatusOK, "ready\n"
	if len(not) > 0 {
		code, body = http.StatusServiceUnavailable, "not ready: "+strings.Join(not, ", ")+"\n"
	}
	if !r.URL.Query().Has("verbose") {
		return code, body
	}
	var b strings.Builder
	for _, c := range checks {
		state := "ok"
		switch {
		case !c.OK:
			state = "FAILED"
		case c.Warn:
			state = "warning"
		}
		fmt.Fprintf(&b, "%-7s %s", state, c.Name)
		if c.Detail != "" {
			b.WriteString(": " + oneLine(c.Detail))
		}
		b.WriteByte('\n')
	}
	return code, b.String() + body
}

func oneLine(s string) string {
	return strings.Join(slices.Collect(strings.FieldsFuncSeq(s, func(r rune) bool { return r == '\n' || r == '\r' })), " ")
}
