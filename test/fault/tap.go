package fault

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Tap copies the stream while it happens: history is 1, so a message is there
// only until the next one of its key. It reads a consumer through one server
// and the change events through every server; what each misses in a fault the
// other may have seen.
type Tap struct {
	log   *Log
	conns []*nats.Conn
	stop  context.CancelFunc
	done  chan struct{}
	reads atomic.Uint64 // messages the consumer brought
}

// StartTap starts copying into log. urls are the client URLs of the servers,
// options more ways to connect to them.
func StartTap(log *Log, urls []string, options ...nats.Option) (*Tap, error) {
	ctx, stop := context.WithCancel(context.Background())
	t := &Tap{log: log, stop: stop}
	for i, url := range urls {
		// One server each and no other: an order is promised per server only.
		nc, err := nats.Connect(url, append(connOptions(fmt.Sprintf("tap-%d", i)), options...)...)
		if err == nil {
			t.conns = append(t.conns, nc)
			_, err = nc.Subscribe(eventPrefix+">", func(m *nats.Msg) { log.republished(i, m) })
		}
		if err != nil {
			t.Close()
			return nil, err
		}
		if err := nc.FlushTimeout(5 * time.Second); err != nil {
			t.Close()
			return nil, err
		}
	}
	t.done = make(chan struct{})
	go t.consume(ctx)
	return t, nil
}

// connOptions are those of every connection of the harness: nothing is sent
// after its caller gave up, and a silent server is found out within seconds.
func connOptions(name string) []nats.Option {
	return []nats.Option{
		nats.Name(name), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond),
		nats.ReconnectJitter(20*time.Millisecond, 20*time.Millisecond), nats.PingInterval(500 * time.Millisecond), nats.MaxPingsOutstanding(3),
		nats.RetryOnFailedConnect(true), nats.DontRandomize(), nats.Timeout(2 * time.Second),
	}
}

// consume keeps one ordered consumer alive, on another server each time the
// last one failed.
func (t *Tap) consume(ctx context.Context) {
	defer close(t.done)
	var next uint64
	for i := 0; ctx.Err() == nil; i++ {
		nc := t.conns[i%len(t.conns)]
		js, err := jetstream.New(nc)
		if err != nil {
			return
		}
		cfg := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy}
		if next != 0 {
			cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, next
		}
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		cons, err := js.OrderedConsumer(one, bucketStream, cfg)
		cancel()
		if err != nil {
			pause(ctx, 100*time.Millisecond)
			continue
		}
		failed := make(chan struct{}, 1)
		cc, err := cons.Consume(func(m jetstream.Msg) {
			meta, err := m.Metadata()
			if err != nil {
				return
			}
			next = meta.Sequence.Stream + 1
			t.reads.Add(1)
			t.log.Stored(meta.Sequence.Stream, m.Subject(), meta.Timestamp, m.Headers(), m.Data())
		}, jetstream.PullHeartbeat(time.Second), jetstream.PullExpiry(5*time.Second), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			select {
			case failed <- struct{}{}:
			default:
			}
		}))
		if err != nil {
			pause(ctx, 100*time.Millisecond)
			continue
		}
		select {
		case <-ctx.Done():
		case <-failed:
		}
		cc.Stop()
		<-cc.Closed()
	}
}

// Drain waits until everything stored so far has been copied, or was removed
// before it could be.
func (t *Tap) Drain(ctx context.Context) error {
	for {
		if last, err := lastSeq(ctx, t.conns); err == nil {
			t.log.mu.Lock()
			seen := t.log.last
			t.log.mu.Unlock()
			if seen >= last {
				return nil
			}
		}
		if !pause(ctx, 50*time.Millisecond) {
			return fmt.Errorf("the copy of the stream is not complete: %w", context.Cause(ctx))
		}
	}
}

// Close ends the copy.
func (t *Tap) Close() {
	t.stop()
	if t.done != nil {
		<-t.done
	}
	for _, nc := range t.conns {
		nc.Close()
	}
}

// pause sleeps for d unless ctx ends before.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// streamInfo is what the harness needs of a STREAM.INFO reply.
type streamInfo struct {
	Error *struct {
		Code    int    `json:"err_code"`
		Message string `json:"description"`
	} `json:"error"`
	Config  map[string]any `json:"config"`
	Created time.Time      `json:"created"`
	State   struct {
		Messages  uint64 `json:"messages"`
		FirstSeq  uint64 `json:"first_seq"`
		LastSeq   uint64 `json:"last_seq"`
		Consumers int    `json:"consumer_count"`
	} `json:"state"`
	Cluster *struct {
		Leader   string `json:"leader"`
		Replicas []struct {
			Name    string `json:"name"`
			Current bool   `json:"current"`
			Offline bool   `json:"offline"`
		} `json:"replicas"`
	} `json:"cluster"`
	TS time.Time `json:"ts"`
}

// bucketInfo asks for the state of the bucket; an answer without a leader is
// an error.
func bucketInfo(ctx context.Context, nc *nats.Conn) (*streamInfo, error) {
	var si streamInfo
	if err := jsCall(ctx, nc, "STREAM.INFO."+bucketStream, nil, &si); err != nil {
		return nil, err
	}
	if si.Error != nil {
		return nil, fmt.Errorf("stream info: %d %s", si.Error.Code, si.Error.Message)
	}
	if si.Cluster != nil && si.Cluster.Leader == "" && len(si.Cluster.Replicas) > 0 {
		return nil, fmt.Errorf("the bucket has no leader")
	}
	return &si, nil
}

// jsCall makes one raw request to the JetStream API.
func jsCall(ctx context.Context, nc *nats.Conn, what string, body any, into any) error {
	var data []byte
	if body != nil {
		data, _ = json.Marshal(body)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	m, err := nc.RequestWithContext(ctx, "$JS.API."+what, data)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return json.Unmarshal(m.Data, into)
}

func lastSeq(ctx context.Context, conns []*nats.Conn) (uint64, error) {
	var err error
	for _, nc := range conns {
		var si *streamInfo
		if si, err = bucketInfo(ctx, nc); err == nil {
			return si.State.LastSeq, nil
		}
	}
	return 0, err
}
