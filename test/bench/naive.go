//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// wireRequest and wireReply are the lease calls as the naive service and the
// bare proxy read and write them.
type wireRequest struct {
	Key      string `json:"key"`
	Holder   string `json:"holder"`
	Revision uint64 `json:"revision"`
	TTLMs    int64  `json:"ttl_ms"`
	Payload  []byte `json:"payload"`
}

type wireReply struct {
	Granted  bool   `json:"granted"`
	Held     bool   `json:"held"`
	Key      string `json:"key,omitempty"`
	Holder   string `json:"holder,omitempty"`
	Revision uint64 `json:"revision,omitempty"`
	Payload  []byte `json:"payload,omitempty"`
	Error    string `json:"error,omitempty"`
}

// serveNaive is the service that one writes in an afternoon: a micro endpoint
// a call, encoding/json, one CAS publish, one goroutine a request; no schema,
// no cache, no counters, no expiry of its own.
func serveNaive(nc *nats.Conn) error {
	service, err := micro.AddService(nc, micro.Config{Name: "naive", Version: "0.1.0"})
	if err != nil {
		return err
	}
	for name, call := range map[string]func(wireRequest) (wireReply, error){
		"acquire": func(r wireRequest) (wireReply, error) {
			rev, err := casWrite(nc, r.Key, r.Holder, "acquired", 0, r.ttl(), false)
			if !errors.Is(err, errConflict) {
				return wireReply{Granted: true, Held: true, Key: r.Key, Holder: r.Holder, Revision: rev}, err
			}
			holder, sequence, err := lastWrite(nc, r.Key)
			if holder != "" || err != nil {
				return wireReply{Held: true, Key: r.Key, Holder: holder, Revision: sequence}, err
			}
			rev, err = casWrite(nc, r.Key, r.Holder, "acquired", sequence, r.ttl(), false)
			if errors.Is(err, errConflict) {
				return wireReply{Held: true, Key: r.Key}, nil
			}
			return wireReply{Granted: true, Held: true, Key: r.Key, Holder: r.Holder, Revision: rev}, err
		},
		"renew": func(r wireRequest) (wireReply, error) {
			rev, err := casWrite(nc, r.Key, r.Holder, "renewed", r.Revision, r.ttl(), false)
			return wireReply{Granted: true, Held: true, Key: r.Key, Holder: r.Holder, Revision: rev}, err
		},
		"release": func(r wireRequest) (wireReply, error) {
			rev, err := casWrite(nc, r.Key, r.Holder, "released", r.Revision, leaseTTL, true)
			return wireReply{Key: r.Key, Revision: rev}, err
		},
		"owner": func(r wireRequest) (wireReply, error) {
			holder, sequence, err := lastWrite(nc, r.Key)
			return wireReply{Held: holder != "", Key: r.Key, Holder: holder, Revision: sequence}, err
		},
	} {
		handle := micro.HandlerFunc(func(m micro.Request) {
			go func() {
				var request wireRequest
				var reply wireReply
				err := json.Unmarshal(m.Data(), &request)
				if err == nil {
					reply, err = call(request)
				}
				if err != nil {
					reply = wireReply{Error: err.Error()}
				}
				body, _ := json.Marshal(reply)
				_ = m.Respond(body)
			}()
		})
		if err := service.AddEndpoint(name, handle, micro.WithEndpointSubject("naive.leases."+name)); err != nil {
			return err
		}
	}
	return nil
}

func (r wireRequest) ttl() time.Duration { return time.Duration(r.TTLMs) * time.Millisecond }

// serveProxy forwards as the lease service does but asks nobody who holds the
// key: it believes the request.
func serveProxy(nc *nats.Conn) error {
	_, err := nc.QueueSubscribe("proxy.leases.forward", "proxy", func(m *nats.Msg) {
		go func() {
			var request wireRequest
			var reply wireReply
			if err := json.Unmarshal(m.Data, &request); err != nil {
				reply.Error = err.Error()
			} else if answer, err := nc.Request(inbox(request.Holder, request.Key), request.Payload, opTimeout); err != nil {
				reply.Error = err.Error()
			} else {
				reply = wireReply{Holder: request.Holder, Payload: answer.Data}
			}
			body, _ := json.Marshal(reply)
			_ = m.Respond(body)
		}()
	})
	return err
}

func inbox(holder, key string) string { return "dagnats.lease.inbox." + holder + "." + key }

// serveChild is this program as a server process of its own, so that what the
// service uses can be told from what the load uses.
func serveChild(what, urls string) error {
	serve, ok := map[string]func(*nats.Conn) error{"naive": serveNaive, "proxy": serveProxy}[what]
	if !ok {
		return fmt.Errorf("no service %q", what)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	nc, err := nats.Connect(urls)
	if err != nil {
		return err
	}
	defer nc.Close()
	if err := serve(nc); err != nil {
		return err
	}
	if err := nc.Flush(); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// startService runs this program as a service beside the servers of s.
func (s *natsSystem) startService(ctx context.Context, e *env, what, readySubject string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p, err := e.nursery.start(e.dir, what, self, "serve", what, strings.Join(s.urls, ","))
	if err != nil {
		return err
	}
	s.children = append(s.children, p)
	return p.wait(ctx, 10*time.Second, func() error {
		_, err := s.ncs[0].Request(readySubject, []byte(`{}`), time.Second)
		return err
	})
}

func naiveTarget() target {
	return target{
		name:       "naive",
		about:      "a micro service of sixty lines over raw",
		topologies: []string{"r1", "r1sync", "r3"},
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			s, err := startNATSSystem(ctx, e, t)
			if err != nil {
				return nil, err
			}
			err = createBucket(ctx, s.ncs[0], t.nodes)
			if err == nil {
				err = s.startService(ctx, e, "naive", "naive.leases.owner")
			}
			if err != nil {
				s.close()
				return nil, err
			}
			s.make = func(nc *nats.Conn) caller { return &wireCaller{nc: nc, prefix: "naive.leases."} }
			return s, nil
		},
	}
}

// proxyTarget is the yardstick of forward alone.
func proxyTarget() target {
	return target{
		name:       "proxy",
		about:      "a bare two-hop proxy that reads no lease; for forward alone",
		topologies: []string{"r1", "r1sync", "r3"},
		grantless:  true,
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			s, err := startNATSSystem(ctx, e, t)
			if err != nil {
				return nil, err
			}
			if err := s.startService(ctx, e, "proxy", "proxy.leases.forward"); err != nil {
				s.close()
				return nil, err
			}
			s.make = func(nc *nats.Conn) caller { return &wireCaller{nc: nc, prefix: "proxy.leases."} }
			return s, nil
		},
	}
}
