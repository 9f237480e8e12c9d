//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// leasedTarget is the lease service beside external servers: that of this tree, or
// another build of it.
func leasedTarget(name string, binary func(*env, context.Context) (string, error)) target {
	return target{
		name:       name,
		about:      "leased serve --server, beside nats-server; on r1sync with --group-commit on",
		topologies: []string{"r1", "r1sync", "r3"},
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			bin, err := binary(e, ctx)
			if err != nil {
				return nil, err
			}
			s, err := startNATSSystem(ctx, e, t)
			if err != nil {
				return nil, err
			}
			l := &leasedSystem{natsSystem: s}
			for range e.opts.instances {
				args := []string{"serve", "--server", strings.Join(s.urls, ","), "--replicas", strconv.Itoa(t.nodes)}
				if t.sync == "always" { // which only an operator can know
					args = append(args, "--group-commit", "on")
				}
				if err := l.run(ctx, e, bin, args); err != nil {
					l.close()
					return nil, err
				}
			}
			return l.probed()
		},
	}
}

// embeddedTarget is the lease service with the server inside.
func embeddedTarget() target {
	return target{
		name:       "embedded",
		about:      "leased serve with nats-server inside",
		topologies: []string{"r1", "r1sync"},
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			bin, err := e.leased(ctx)
			if err != nil {
				return nil, err
			}
			dir, err := e.tempDir("leased")
			if err != nil {
				return nil, err
			}
			port, err := freePort()
			if err != nil {
				return nil, err
			}
			listen := fmt.Sprintf("127.0.0.1:%d", port)
			l := &leasedSystem{natsSystem: &natsSystem{urls: []string{"nats://" + listen}}}
			args := []string{"serve", "--nats-listen", listen, "--store-dir", dir, "--sync", t.sync}
			if err := l.run(ctx, e, bin, args); err != nil {
				l.close()
				return nil, err
			}
			if l.ncs, err = connect(l.urls, e.opts.conns); err != nil {
				l.close()
				return nil, err
			}
			l.conns = len(l.ncs)
			return l.probed()
		},
	}
}

func (e *env) leased(ctx context.Context) (string, error) {
	return e.binary(ctx, "leased", e.opts.leased, "github.com/leased/leased/cmd/leased")
}

func (e *env) leasedBefore(ctx context.Context) (string, error) {
	return e.binary(ctx, "leased-before", e.opts.before, "")
}

type leasedSystem struct {
	*natsSystem
	again func(ctx context.Context) error // stops and starts the last process
}

// run starts one process and waits until it is ready.
func (s *leasedSystem) run(ctx context.Context, e *env, bin string, args []string) error {
	args = append(args, "--http-listen", "127.0.0.1:0")
	p, err := e.nursery.start(e.dir, "leased", bin, args...)
	if err != nil {
		return err
	}
	s.children = append(s.children, p)
	s.again = func(ctx context.Context) error {
		p.stop()
		s.children = s.children[:len(s.children)-1]
		return s.run(ctx, e, bin, args)
	}
	return p.wait(ctx, startLimit, func() error { return ready(ctx, p) })
}

// startLimit is long enough for a store with a million leases.
const startLimit = 2 * time.Minute

// readiness keeps no connection: the port goes with its process.
var readiness = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// ready asks the readiness of a leased whose HTTP address its log tells.
func ready(ctx context.Context, p *child) error {
	log, err := os.ReadFile(p.log)
	if err != nil {
		return err
	}
	_, line, ok := bytes.Cut(log, []byte(`"msg":"serving"`))
	if !ok {
		return errors.New("not serving yet")
	}
	address := text(line, `"http":`)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+strings.TrimPrefix(address, "http://")+"/readyz?verbose", nil)
	if err != nil {
		return err
	}
	resp, err := readiness.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var b bytes.Buffer
		_, _ = b.ReadFrom(resp.Body)
		return fmt.Errorf("readyz: %s: %.300s", resp.Status, b.Bytes())
	}
	return nil
}

// probed finds out which extensions the service has.
func (s *leasedSystem) probed() (system, error) {
	knows := func(subject, body string) bool {
		reply, err := s.ncs[0].Request(subject, []byte(body), opTimeout)
		return err == nil && reply.Header.Get("Nats-Service-Error-Code") != "400"
	}
	waits := knows("api.leases.acquire", `{"key":"probe","holder":"probe","ttl_ms":1000,"wait_ms":1}`)
	many := knows("api.leases.renew_many", `{"holder":"probe","ttl_ms":1000,"leases":[{"key":"probe-2","revision":1}]}`)
	s.make = func(nc *nats.Conn) caller {
		return &wireCaller{nc: nc, prefix: "api.leases.", waits: waits, many: many}
	}
	return s, nil
}

// restart ends the last process and returns when its successor is ready and
// the callers are connected.
func (s *leasedSystem) restart(ctx context.Context) error {
	if err := s.again(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, nc := range s.ncs {
		for !nc.IsConnected() && ctx.Err() == nil {
			pause(ctx, 10*time.Millisecond)
		}
	}
	return ctx.Err()
}
