//go:build linux

package main

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// kvTarget is what an application does that takes the KV API of nats.go. That
// API cannot give a renewal a TTL: its leases never end once renewed. It is
// here for its speed alone.
func kvTarget() target {
	return target{
		name:       "kv",
		about:      "KV API of nats.go by the caller itself; its renewals carry no TTL",
		topologies: []string{"r1", "r1sync", "r3"},
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			s, err := startNATSSystem(ctx, e, t)
			if err != nil {
				return nil, err
			}
			ctx, cancel := context.WithTimeout(ctx, 2*opTimeout)
			defer cancel()
			kvs := make(map[*nats.Conn]jetstream.KeyValue)
			for i, nc := range s.ncs {
				js, err := jetstream.New(nc)
				if err != nil {
					s.close()
					return nil, err
				}
				var kv jetstream.KeyValue
				if i == 0 {
					kv, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "leases", Replicas: t.nodes, LimitMarkerTTL: time.Minute})
				} else {
					kv, err = js.KeyValue(ctx, "leases")
				}
				if err != nil {
					s.close()
					return nil, err
				}
				kvs[nc] = kv
			}
			s.make = func(nc *nats.Conn) caller { return kvCaller{kvs[nc]} }
			return s, nil
		},
	}
}

type kvCaller struct{ kv jetstream.KeyValue }

func opContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), opTimeout)
}

func (c kvCaller) acquire(key, holder string, ttl time.Duration) (uint64, error) {
	ctx, cancel := opContext()
	defer cancel()
	revision, err := c.kv.Create(ctx, key, record(key, holder, "acquired", ttl), jetstream.KeyTTL(ttl))
	const inFlight = 10164 // another write of the key is being decided
	if e, ok := errors.AsType[*jetstream.APIError](err); errors.Is(err, jetstream.ErrKeyExists) || ok && e.ErrorCode == inFlight {
		err = errHeld
	}
	return revision, err
}

func (c kvCaller) renew(key, holder string, revision uint64, ttl time.Duration) (uint64, error) {
	ctx, cancel := opContext()
	defer cancel()
	return c.kv.Update(ctx, key, record(key, holder, "renewed", ttl), revision)
}

func (c kvCaller) release(key, _ string, revision uint64) error {
	ctx, cancel := opContext()
	defer cancel()
	return c.kv.Purge(ctx, key, jetstream.LastRevision(revision), jetstream.PurgeTTL(leaseTTL+32*time.Second))
}

func (c kvCaller) owner(key string) (string, error) {
	ctx, cancel := opContext()
	defer cancel()
	entry, err := c.kv.Get(ctx, key)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return text(entry.Value(), `"holder":`), nil
}

func (c kvCaller) contend(ctx context.Context, key, holder string, ttl, poll time.Duration) (uint64, error) {
	return contend(ctx, poll, func() (uint64, bool, error) {
		revision, err := c.acquire(key, holder, ttl)
		if errors.Is(err, errHeld) {
			return 0, false, nil
		}
		return revision, err == nil, err
	})
}
