package service

import (
	"context"
	"time"
)

// The calls, as tests write them.

func (l *Leases) Acquire(ctx context.Context, key, holder string, ttl time.Duration, meta string) (Result, error) {
	return l.Do(ctx, Command{Op: OpAcquire, Key: key, Holder: holder, TTL: ttl, Meta: meta})
}

func (l *Leases) Renew(ctx context.Context, key, holder string, revision uint64, ttl time.Duration) (Result, error) {
	return l.Do(ctx, Command{Op: OpRenew, Key: key, Holder: holder, Revision: revision, TTL: ttl})
}

func (l *Leases) Release(ctx context.Context, key, holder string, revision uint64) (Result, error) {
	return l.Do(ctx, Command{Op: OpRelease, Key: key, Holder: holder, Revision: revision})
}

func (l *Leases) Owner(ctx context.Context, key string) (Result, error) {
	return l.Do(ctx, Command{Op: OpOwner, Key: key})
}
