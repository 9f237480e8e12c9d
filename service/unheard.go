package service

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
)

// Replies sends replies on a connection and finds out which of them nobody heard: each
// has a reply subject of its own, and NATS answers there when nobody subscribes to
// where it went. Where it cannot know that (in another account, behind a leaf node or
// a gateway) it says nothing (P20).
type Replies struct{ out requests }

// NewReplies makes Replies on nc. Listen must be called before the first is sent.
func NewReplies(nc *nats.Conn) *Replies { return &Replies{requests{nc: nc}} }

// Listen subscribes to what NATS answers: one subscription, until nc is closed.
func (r *Replies) Listen() error {
	r.out.mu.Lock()
	defer r.out.mu.Unlock()
	return r.out.listen()
}

// hearing is how long NATS may take to say that nobody heard a reply.
const hearing = 2 * time.Second

// Send sends msg. If nobody hears it unheard is called, once and soon; it must not block.
func (r *Replies) Send(msg *nats.Msg, unheard func()) (err error) {
	r.out.start(msg, hearing, func(_ *nats.Msg, failed error) {
		switch {
		case errors.Is(failed, nats.ErrNoResponders):
			unheard()
		case failed != nil && !errors.Is(failed, nats.ErrTimeout):
			err = failed // of the publishing, before start returns
		}
	})
	return err
}

// TakeBack frees a lease that was granted to an acquire that waited, because nobody
// heard the reply: else it would keep the key from others for its whole TTL. It is a
// release under the lease's own revision, so that it does nothing once the holder, or
// anybody else, did something with it.
func (l *Leases) TakeBack(ctx context.Context, g Lease) {
	_, err := l.Do(ctx, Command{Op: OpRelease, Key: g.Key, Holder: g.Holder, Revision: g.Revision})
	switch kinds.Of(err) {
	case "":
		l.obs.TakenBack()
		l.log.Info("a grant that nobody heard was taken back", "key", g.Key, "holder", g.Holder, "revision", g.Revision)
	case kinds.Lost:
	default:
		l.log.Warn("a grant that nobody heard could not be taken back", "key", g.Key, "holder", g.Holder, "revision", g.Revision, "error", err)
	}
}
