//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// rawTarget is the yardstick: a caller that writes its leases itself, with one
// CAS publish a call, on the bucket that the lease service would have made.
// It checks nothing that the server does not check for it.
func rawTarget() target {
	return target{
		name:       "raw",
		about:      "JetStream CAS publishes by the caller itself",
		topologies: []string{"r1", "r1sync", "r3"},
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			s, err := startNATSSystem(ctx, e, t)
			if err != nil {
				return nil, err
			}
			if err := createBucket(ctx, s.ncs[0], t.nodes); err != nil {
				s.close()
				return nil, err
			}
			s.make = func(nc *nats.Conn) caller { return rawCaller{nc} }
			return s, nil
		},
	}
}

// A natsSystem is nats-servers, what stands beside them, and the connections
// of the callers.
type natsSystem struct {
	children []*child
	ncs      []*nats.Conn // of the callers, conns of them; then those of owners
	conns    int
	urls     []string
	make     func(nc *nats.Conn) caller
	cleanup  func()
}

func startNATSSystem(ctx context.Context, e *env, t topology) (*natsSystem, error) {
	procs, urls, err := startNATS(ctx, e, t)
	if err != nil {
		return nil, err
	}
	ncs, err := connect(urls, max(e.opts.conns, len(urls)))
	if err != nil {
		stopAll(procs)
		return nil, err
	}
	return &natsSystem{children: procs, ncs: ncs, conns: len(ncs), urls: urls}, nil
}

func (s *natsSystem) address() string { return strings.Join(s.urls, ",") }

func (s *natsSystem) procs() []*child { return s.children }

func (s *natsSystem) caller(i int) (caller, error) { return s.make(s.ncs[i%s.conns]), nil }

func (s *natsSystem) close() {
	if s.cleanup != nil {
		s.cleanup()
	}
	closeAll(s.ncs)
	stopAll(s.children)
}

type rawCaller struct{ nc *nats.Conn }

var errConflict = errors.New("wrong last sequence")

// casWrite is the one write of a lease call: a record under an expected
// sequence and a TTL.
func casWrite(nc *nats.Conn, key, holder, event string, expected uint64, ttl time.Duration, purge bool) (uint64, error) {
	m := &nats.Msg{Subject: "$KV.leases." + key, Data: record(key, holder, event, ttl), Header: nats.Header{
		"Nats-Expected-Stream":                {bucketStream},
		"Nats-Expected-Last-Subject-Sequence": {strconv.FormatUint(expected, 10)},
		"Nats-TTL":                            {strconv.Itoa(int(ttl/time.Second)) + "s"},
		"Dagnats-Lease-Event":                 {event},
	}}
	if purge {
		m.Header["KV-Operation"] = []string{"PURGE"}
		m.Header["Nats-TTL"] = []string{strconv.Itoa(int((ttl+32*time.Second)/time.Second)) + "s"}
	}
	reply, err := nc.RequestMsg(m, opTimeout)
	if err != nil {
		return 0, err
	}
	if bytes.Contains(reply.Data, []byte(`"error"`)) {
		if bytes.Contains(reply.Data, []byte(`10071`)) || bytes.Contains(reply.Data, []byte(`10164`)) {
			return 0, errConflict
		}
		return 0, fmt.Errorf("publish: %s", reply.Data)
	}
	return number(reply.Data, `"seq":`)
}

// record has the members and the size of a record of the lease service.
func record(key, holder, event string, ttl time.Duration) []byte {
	now := time.Now()
	b := make([]byte, 0, 320)
	b = fmt.Appendf(b, `{"v":1,"key":%q,"holder":%q,"ttl_ms":%d,"acquired_at":"`, key, holder, ttl.Milliseconds())
	b = now.AppendFormat(b, time.RFC3339Nano)
	b = append(b, `","written_at":"`...)
	b = now.AppendFormat(b, time.RFC3339Nano)
	b = fmt.Appendf(b, `","event":%q,"nonce":"%016x","horizon":"`, event, rand.Uint64())
	b = now.Add(ttl).AppendFormat(b, time.RFC3339Nano)
	return append(b, `"}`...)
}

// number is the unsigned integer after name in a JSON text of ours or the
// server's, which both write without spaces.
func number(b []byte, name string) (uint64, error) {
	_, rest, ok := bytes.Cut(b, []byte(name))
	if !ok {
		return 0, fmt.Errorf("no %s in %.200s", name, b)
	}
	end := 0
	for end < len(rest) && rest[end] >= '0' && rest[end] <= '9' {
		end++
	}
	return strconv.ParseUint(string(rest[:end]), 10, 64)
}

// text is the string after name, "" if there is none. It has no escapes.
func text(b []byte, name string) string {
	_, rest, _ := bytes.Cut(b, append([]byte(name), '"'))
	s, _, _ := bytes.Cut(rest, []byte{'"'})
	return string(s)
}

// lastWrite reads the newest message of a key through the stream leader:
// holder "" for none and for a tombstone, whose sequence it tells.
func lastWrite(nc *nats.Conn, key string) (holder string, sequence uint64, err error) {
	reply, err := nc.Request("$JS.API.STREAM.MSG.GET."+bucketStream, []byte(`{"last_by_subj":"$KV.leases.`+key+`"}`), opTimeout)
	if err != nil {
		return "", 0, err
	}
	if bytes.Contains(reply.Data, []byte(`"error"`)) {
		if bytes.Contains(reply.Data, []byte(`10037`)) {
			return "", 0, nil
		}
		return "", 0, fmt.Errorf("read: %s", reply.Data)
	}
	if sequence, err = number(reply.Data, `"seq":`); err != nil {
		return "", 0, err
	}
	headers, err := base64.StdEncoding.DecodeString(text(reply.Data, `"hdrs":`))
	if err != nil {
		return "", 0, err
	}
	if bytes.Contains(headers, []byte("KV-Operation: PURGE")) {
		return "", sequence, nil
	}
	body, err := base64.StdEncoding.DecodeString(text(reply.Data, `"data":`))
	if err != nil {
		return "", 0, err
	}
	return text(body, `"holder":`), sequence, nil
}

func (c rawCaller) acquire(key, holder string, ttl time.Duration) (uint64, error) {
	return casWrite(c.nc, key, holder, "acquired", 0, ttl, false)
}

func (c rawCaller) renew(key, holder string, revision uint64, ttl time.Duration) (uint64, error) {
	return casWrite(c.nc, key, holder, "renewed", revision, ttl, false)
}

func (c rawCaller) release(key, holder string, revision uint64) error {
	_, err := casWrite(c.nc, key, holder, "released", revision, leaseTTL, true)
	return err
}

func (c rawCaller) owner(key string) (string, error) {
	holder, _, err := lastWrite(c.nc, key)
	return holder, err
}

func (c rawCaller) poll(key, holder string, ttl time.Duration) (uint64, error) {
	other, sequence, err := lastWrite(c.nc, key)
	if err != nil {
		return 0, err
	}
	if other != "" {
		return 0, errHeld
	}
	revision, err := casWrite(c.nc, key, holder, "acquired", sequence, ttl, false)
	if errors.Is(err, errConflict) {
		err = errHeld
	}
	return revision, err
}

func (c rawCaller) contend(ctx context.Context, key, holder string, ttl, poll time.Duration) (uint64, error) {
	return contend(ctx, poll, func() (uint64, bool, error) {
		revision, err := c.poll(key, holder, ttl)
		if errors.Is(err, errHeld) {
			return 0, false, nil
		}
		return revision, err == nil, err
	})
}
