package service

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/leased/leased/internal/testnats"
)

// TestReplySubjectsCannotBeGuessed: who has seen some reply subjects of a connection, and
// the ids that this process shows to everybody, knows nothing of the next one.
func TestReplySubjectsCannotBeGuessed(t *testing.T) {
	nc := testnats.Server(t).Connect(nats.CustomInboxPrefix("_INBOX_leased"))
	asked := make(chan *nats.Msg, 1000)
	if _, err := nc.ChanSubscribe("ask", asked); err != nil {
		t.Fatal(err)
	}
	r := &requests{nc: nc}
	shown := nuid.Next()
	ids := map[uint64]bool{}
	var last uint64
	for range 200 {
		r.start(&nats.Msg{Subject: "ask"}, time.Minute, func(*nats.Msg, error) {})
		reply := (<-asked).Reply
		parts := strings.Split(reply, ".")
		if len(parts) != 3 || parts[0] != "_INBOX_leased" || strings.HasPrefix(parts[1], shown[:8]) {
			t.Fatalf("reply subject %s, and %s is shown", reply, shown)
		}
		id, err := strconv.ParseUint(parts[2], 36, 64)
		if err != nil {
			t.Fatal(err)
		}
		// That two of 200 random ones are so near has a chance of one in 10 million.
		if d := int64(id - last); -1<<32 < d && d < 1<<32 || ids[id] {
			t.Fatalf("%d follows %d", id, last)
		}
		last, ids[id] = id, true
	}
	for _, under := range []string{"", PeersInbox} {
		if got := newInbox(nc, under); strings.Contains(got, shown[:8]) || !strings.HasPrefix(got, "_INBOX_leased."+under) || len(got) < 38 {
			t.Errorf("inbox %s", got)
		}
	}
	if got := newInbox(testnats.Server(t).Connect(), ""); !strings.HasPrefix(got, "_INBOX.") {
		t.Errorf("inbox %s", got)
	}
}

// TestAnswersToNobodyAreDropped: only who has the id of a request answers it, and once.
func TestAnswersToNobodyAreDropped(t *testing.T) {
	nc := testnats.Server(t).Connect()
	r := &requests{nc: nc}
	forged := make(chan string, 1)
	sub, err := nc.Subscribe("ask", func(m *nats.Msg) {
		prefix := m.Reply[:strings.LastIndexByte(m.Reply, '.')+1]
		id, _ := strconv.ParseUint(m.Reply[len(prefix):], 36, 64)
		for _, token := range []string{"1", "2", strconv.FormatUint(id+1, 36), strconv.FormatUint(id-1, 36), "zzzzzzzzzzzzzzzz", "-", strings.ToUpper(m.Reply[len(prefix):]) + "0"} {
			nc.Publish(prefix+token, []byte("forged"))
		}
		m.Respond([]byte("true"))
		m.Respond([]byte("again"))
		nc.Flush()
		forged <- prefix
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for range 3 {
		m, err := r.ask(ctx, &nats.Msg{Subject: "ask"})
		if err != nil || string(m.Data) != "true" {
			t.Fatalf("%+v, %v", m, err)
		}
		<-forged
	}
}

// TestAskEnds: with the context, with its deadline, without anybody to answer; and nothing
// is left of it.
func TestAskEnds(t *testing.T) {
	nc := testnats.Server(t).Connect()
	r := &requests{nc: nc}
	sub, err := nc.SubscribeSync("silent")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		if _, err := sub.NextMsg(10 * time.Second); err == nil {
			cancel()
		}
	}()
	if _, err := r.ask(ctx, &nats.Msg{Subject: "silent"}); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that was cancelled: %v", err)
	}
	if _, err := r.ask(ctx, &nats.Msg{Subject: "silent"}); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that was cancelled before: %v", err)
	}
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.ask(short, &nats.Msg{Subject: "silent"}); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("a deadline: %v", err)
	}
	if n, _, _ := sub.Pending(); n != 1 {
		t.Errorf("%d requests were sent after the first, want 1", n)
	}
	long, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := r.ask(long, &nats.Msg{Subject: "nobody"}); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("nobody: %v", err)
	}
	nc.Close()
	if _, err := r.ask(long, &nats.Msg{Subject: "silent"}); !errors.Is(err, nats.ErrConnectionClosed) {
		t.Errorf("a closed connection: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.open) != 0 {
		t.Errorf("%d requests are left", len(r.open))
	}
}

// TestRepliesOfNothingAreNoAnswer: what is not of JetStream's contract says neither that a
// key is free nor that a bucket has been seen whole.
func TestRepliesOfNothingAreNoAnswer(t *testing.T) {
	for _, body := range []string{`{}`, `{"held":false,"key":"k"}`, `{"stream":"KV_leases","seq":7}`, `{"message":{}}`, `null`, `[]`, ``, `{"message":{"seq":0}}`} {
		if e, err := readMessage("k", &nats.Msg{Data: []byte(body)}, nil, nil); !errors.Is(err, ErrNoAnswer) {
			t.Errorf("%s: %+v, %v", body, e, err)
		}
	}
	none := `{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","error":{"code":404,"err_code":10037,"description":"no message found"}}`
	for _, body := range []string{none, " " + none} {
		if e, err := readMessage("k", &nats.Msg{Data: []byte(body)}, nil, nil); err != nil || e.Revision != 0 || e.Key != "k" {
			t.Errorf("%s: %+v, %v", body, e, err)
		}
	}

	// Somebody in the place of JetStream.
	nc := testnats.Server(t, testnats.WithoutJetStream).Connect()
	other := testnats.Connect(t, nc.ConnectedUrl())
	if _, err := other.Subscribe("hub.API.CONSUMER.CREATE.>", func(m *nats.Msg) { m.Respond([]byte(`{"stream":"KV_leases","seq":7}`)) }); err != nil {
		t.Fatal(err)
	}
	if err := other.Flush(); err != nil {
		t.Fatal(err)
	}
	j, err := newJS(nc, "", "hub.API", &clock{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (&watcher{js: j}).create(t.Context(), "c", "_INBOX.x"); !errors.Is(err, ErrNoAnswer) {
		t.Errorf("a consumer that was not made: %v", err)
	}
}
