package service

import (
	"context"
	"time"
)

// Renewal is one of many renewals that were begun together.
type Renewal struct {
	l      *Leases
	c      Command
	bucket int64
	first  *attempt
	err    error
}

// KeyRevision is a lease as its holder knows it.
type KeyRevision struct {
	Key      string
	Revision uint64
}

// StartRenewals writes those renewals of holder's leases that the view knows to
// be current, all at once, and waits for the verdicts. Finish must follow for
// each. The keys must differ.
func (l *Leases) StartRenewals(ctx context.Context, holder string, ttl time.Duration, leases []KeyRevision) []Renewal {
	bucket := l.Bucket() // before Allow, as in run
	err := l.Allow(OpRenew)
	rs := make([]Renewal, len(leases))
	var sent []*Renewal
	var writes []*Write
	for i, k := range leases {
		r := &rs[i]
		*r = Renewal{l: l, c: Command{Op: OpRenew, Key: k.Key, Holder: holder, Revision: k.Revision, TTL: ttl}, bucket: bucket, err: err}
		if err != nil {
			continue
		}
		st, ok := l.guess(r.c)
		if !ok {
			continue
		}
		if d := Decide(st, r.c); d.Write != nil {
			r.first = l.prepare(k.Key, d)
			sent, writes = append(sent, r), append(writes, r.first.w)
		}
	}
	at := time.Now()
	for i, v := range l.store.PutMany(ctx, writes) {
		a := sent[i].first
		a.sent, a.rev, a.err = at, v.Revision, v.Err
	}
	return rs
}

// Stored says that Finish will not have to wait.
func (r *Renewal) Stored() bool { return r.err != nil || r.first != nil && r.first.err == nil }

// Finish answers for the renewal like Renew.
func (r *Renewal) Finish(ctx context.Context) (Result, error) {
	if r.err != nil {
		return Result{}, r.err
	}
	return r.l.runFrom(ctx, r.c, r.bucket, r.first)
}
