//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// A wireCaller asks a lease service by NATS requests with JSON bodies. It
// reads from the replies only what a holder needs, so that the load costs
// little beside what is measured.
type wireCaller struct {
	nc     *nats.Conn
	prefix string
	waits  bool // the service knows wait_ms
	many   bool // the service knows renew_many
	buf    []byte
}

func (c *wireCaller) call(name string, body []byte, timeout time.Duration) ([]byte, error) {
	c.buf = body[:0]
	reply, err := c.nc.Request(c.prefix+name, body, timeout)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if bytes.HasPrefix(reply.Data, []byte(`{"error"`)) || reply.Header.Get("Nats-Service-Error-Code") != "" {
		return nil, fmt.Errorf("%s: %.300s", name, reply.Data)
	}
	return reply.Data, nil
}

// body starts a request; names of the load need no escapes.
func (c *wireCaller) body(key, holder string) []byte {
	b := append(c.buf[:0], `{"key":"`...)
	b = append(b, key...)
	if holder != "" {
		b = append(b, `","holder":"`...)
		b = append(b, holder...)
	}
	return append(b, '"')
}

func withTTL(b []byte, ttl time.Duration) []byte {
	return strconv.AppendInt(append(b, `,"ttl_ms":`...), ttl.Milliseconds(), 10)
}

func withRevision(b []byte, revision uint64) []byte {
	return strconv.AppendUint(append(b, `,"revision":`...), revision, 10)
}

func (c *wireCaller) acquire(key, holder string, ttl time.Duration) (uint64, error) {
	reply, err := c.call("acquire", append(withTTL(c.body(key, holder), ttl), '}'), opTimeout)
	if err != nil {
		return 0, err
	}
	if !bytes.Contains(reply, []byte(`"granted":true`)) {
		return 0, fmt.Errorf("acquire: %w: %.300s", errHeld, reply)
	}
	return number(reply, `"revision":`)
}

func (c *wireCaller) renew(key, holder string, revision uint64, ttl time.Duration) (uint64, error) {
	reply, err := c.call("renew", append(withRevision(withTTL(c.body(key, holder), ttl), revision), '}'), opTimeout)
	if err != nil {
		return 0, err
	}
	return number(reply, `"revision":`)
}

func (c *wireCaller) release(key, holder string, revision uint64) error {
	_, err := c.call("release", append(withRevision(c.body(key, holder), revision), '}'), opTimeout)
	return err
}

func (c *wireCaller) owner(key string) (string, error) {
	reply, err := c.call("owner", append(c.body(key, ""), '}'), opTimeout)
	if err != nil {
		return "", err
	}
	return text(reply, `"holder":`), nil
}

// waitInLine is the wait_ms of one acquire that waits.
const waitInLine = time.Second

func (c *wireCaller) contend(ctx context.Context, key, holder string, ttl, poll time.Duration) (uint64, error) {
	if c.waits {
		poll = 0
	}
	return contend(ctx, poll, func() (uint64, bool, error) {
		b, limit := withTTL(c.body(key, holder), ttl), opTimeout
		if c.waits {
			b = strconv.AppendInt(append(b, `,"wait_ms":`...), waitInLine.Milliseconds(), 10)
			limit += waitInLine
		}
		reply, err := c.call("acquire", append(b, '}'), limit)
		if err != nil || !bytes.Contains(reply, []byte(`"granted":true`)) {
			return 0, false, err
		}
		revision, err := number(reply, `"revision":`)
		return revision, err == nil, err
	})
}

func (c *wireCaller) forward(key, holder string, payload []byte) error {
	// The bare proxy must be told the holder, which the service finds out and
	// does not look at here.
	b := append(c.body(key, holder), `,"payload":"`...)
	b = append(base64.StdEncoding.AppendEncode(b, payload), `"}`...)
	reply, err := c.call("forward", b, opTimeout)
	if err != nil {
		return err
	}
	if got := text(reply, `"payload":`); len(got) != base64.StdEncoding.EncodedLen(len(payload)) {
		return fmt.Errorf("forward: %.300s", reply)
	}
	return nil
}

// list is asked beside the session's other calls: it has a body of its own.
func (c *wireCaller) list(after string, limit int) (next string, err error) {
	body := strconv.AppendInt([]byte(`{"limit":`), int64(limit), 10)
	if after != "" {
		body = append(append(append(body, `,"after":"`...), after...), '"')
	}
	reply, err := c.nc.Request(c.prefix+"list", append(body, '}'), opTimeout)
	if err != nil {
		return "", fmt.Errorf("list: %w", err)
	}
	if reply.Header.Get("Nats-Service-Error-Code") != "" {
		return "", fmt.Errorf("list: %.300s", reply.Data)
	}
	tail := reply.Data[max(0, len(reply.Data)-200):] // next is the last member
	return text(tail, `"next":`), nil
}

func (c *wireCaller) batches() bool { return c.many }

func (c *wireCaller) renewMany(holder string, keys []string, revisions []uint64, ttl time.Duration) ([]uint64, error) {
	b := append(c.buf[:0], `{"holder":"`...)
	b = append(withTTL(append(append(b, holder...), '"'), ttl), `,"leases":[`...)
	for i, key := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, `{"key":"`...), key...), '"')
		b = append(withRevision(b, revisions[i]), '}')
	}
	reply, err := c.call("renew_many", append(b, `]}`...), opTimeout)
	if err != nil {
		return nil, err
	}
	out := make([]uint64, len(keys))
	rest := reply
	for i, key := range keys {
		one, ok := []byte(nil), false
		if _, rest, ok = bytes.Cut(rest, []byte(`"key":"`+key+`"`)); ok {
			one, _, _ = bytes.Cut(rest, []byte(`"key":`))
		}
		if out[i], err = number(one, `"revision":`); err != nil {
			return nil, fmt.Errorf("renew_many: %s was not renewed: %.200s", key, one)
		}
	}
	return out, nil
}
