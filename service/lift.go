package service

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
)

// Lifted is what Lift did to the bucket.
type Lifted struct {
	Was    uint64 // the last revision before
	Next   uint64 // what the next write will get at least
	Purged uint64 // messages that are gone: leases and tombstones
	// Claimed, if it is not 0, is a revision not below Next that an instance says was
	// issued, and By how it names itself. Nothing proves it, so the bucket was not lifted
	// above it; instances that have seen it go on refusing.
	Claimed uint64
	By      string
}

// maxLift is the highest revision that a bucket is lifted to: far above any that a
// clock gives, and as far below the number after which revisions would begin again.
const maxLift = 1 << 63

// Lift raises the revisions of a bucket that went back in time above what the bucket
// and the present microsecond on the NATS server's clock prove to have been issued. What
// instances claim beyond that is told and not followed: revisions that are burned
// do not come back. All leases end, without events, and holders find out at their next
// renewal. The instances serve again by themselves within seconds.
//
// Run it after a backup was restored, and before serving after a store directory
// was copied back by hand, which nothing can detect.
func Lift(ctx context.Context, nc *nats.Conn, domain, apiPrefix, microName string) (Lifted, error) {
	j, err := newJS(nc, domain, apiPrefix, &clock{})
	if err != nil {
		return Lifted{}, err
	}
	si, err := j.info(ctx)
	if err != nil {
		return Lifted{}, err
	}
	if si.State.LastSeq >= maxLift {
		return Lifted{}, fmt.Errorf("the last revision of the bucket is %d: too close to the end of all revisions to lift it; delete the bucket", si.State.LastSeq)
	}
	next := max(uint64(max(0, si.Now.UnixMicro())), uint64(max(0, si.Created.UnixMicro())), si.State.LastSeq+1)
	news := askPeers(ctx, nc, microName, nuid.Next(), askLong, next-1)
	if err := j.lift(ctx, next); err != nil {
		return Lifted{}, fmt.Errorf("the bucket could not be lifted: %w", err)
	}
	after, err := j.info(ctx)
	switch {
	case err != nil:
		return Lifted{}, fmt.Errorf("the bucket was lifted, but not seen after: %w", err)
	case after.State.LastSeq+1 < next:
		return Lifted{}, errors.New("the bucket was purged but its revisions were not lifted; run it again")
	}
	done := Lifted{Was: si.State.LastSeq, Next: after.State.LastSeq + 1, Purged: si.State.Messages}
	if news.absurd.fence >= done.Next {
		done.Claimed, done.By = news.absurd.fence, news.absurd.who
	}
	return done, nil
}

// Stored reads the revision of what is stored for key, whoever wrote it, past the
// service: for an operator whom no call shows a record that is not a lease.
func Stored(ctx context.Context, nc *nats.Conn, domain, apiPrefix, key string) (uint64, error) {
	j, err := newJS(nc, domain, apiPrefix, &clock{})
	if err != nil {
		return 0, err
	}
	e, err := j.Get(ctx, key)
	if err == nil && e.Revision == 0 {
		err = errors.New("nothing is stored for this key")
	}
	return e.Revision, err
}
