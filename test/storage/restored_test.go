package storage

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// backup is a snapshot of the bucket as JetStream's API gives it.
type backup struct {
	config, state json.RawMessage
	chunks        [][]byte
}

func takeBackup(t *testing.T, nc *nats.Conn) *backup {
	t.Helper()
	inbox := nc.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	var got struct {
		Config json.RawMessage `json:"config"`
		State  json.RawMessage `json:"state"`
	}
	if err := api(nc, "STREAM.SNAPSHOT.KV_leases", map[string]any{"deliver_subject": inbox, "no_consumers": true}, &got); err != nil {
		t.Fatal(err)
	}
	b := &backup{config: got.Config, state: got.State}
	for {
		msg, err := sub.NextMsg(10 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if len(msg.Data) == 0 {
			return b
		}
		b.chunks = append(b.chunks, msg.Data)
		if msg.Reply != "" {
			if err := msg.Respond(nil); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func (b *backup) restore(t *testing.T, nc *nats.Conn) {
	t.Helper()
	var to struct {
		Subject string `json:"deliver_subject"`
	}
	if err := api(nc, "STREAM.RESTORE.KV_leases", map[string]any{"config": b.config, "state": b.state}, &to); err != nil {
		t.Fatal(err)
	}
	send := func(chunk []byte) {
		t.Helper()
		msg, err := nc.Request(to.Subject, chunk, 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(msg.Data), `"error"`) {
			t.Fatalf("restore: %s", msg.Data)
		}
	}
	for _, c := range b.chunks {
		send(c)
	}
	send(nil)
}

func deleteBucket(t *testing.T, nc *nats.Conn) {
	t.Helper()
	if err := api(nc, "STREAM.DELETE.KV_leases", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// lift is what the cure of a bucket that went back in time does.
func lift(t *testing.T, nc *nats.Conn) {
	t.Helper()
	if err := api(nc, "STREAM.PURGE.KV_leases", map[string]any{"seq": time.Now().UnixMicro()}, nil); err != nil {
		t.Fatal(err)
	}
}

// distrusted proves that a bucket that went back in time grants nothing and
// that all else goes on, until it is lifted. held is a lease that is in it. What
// an instance says of such a bucket is why.
func distrusted(t *testing.T, c *caller, in *instance, why string, held reply, highest uint64) {
	t.Helper()
	testnats.Eventually(t, 10*time.Second, func() bool { return strings.HasPrefix(in.bucket(), why) }, "the bucket is ", late(in.bucket))
	last := bucketOf(t, c.nc).State.LastSeq
	for _, r := range []reply{
		c.acquire("free", "B", time.Second), c.acquire(held.Key, "B", time.Second), c.acquire(held.Key, held.Holder, time.Second), c.renew(held, time.Minute),
	} {
		if r.Kind != "unavailable" || why == "distrusted" && !strings.Contains(r.Error, "back in time") {
			t.Errorf("got %s: %s", r.Kind, r.Error)
		}
	}
	if now := bucketOf(t, c.nc).State.LastSeq; now != last {
		t.Errorf("written to: last revision %d, then %d", last, now)
	}
	if r := c.owner(held.Key); r.Kind != "held" || r.Holder != held.Holder {
		t.Errorf("owner: %s %s", r.Kind, r.Holder)
	}
	// Nobody listens there, which is found out behind the bucket.
	if r := c.forward(held.Key, "x", time.Second); r.Kind != "owner_unavailable" {
		t.Errorf("forward: %s: %s", r.Kind, r.Error)
	}
	c.want(c.release(held), "released")
	lift(t, c.nc)
	testnats.Eventually(t, 25*time.Second, func() bool { return len(in.failing()) == 0 }, late(func() string { return fmt.Sprint(in.failing()) }))
	var r reply
	testnats.Eventually(t, 10*time.Second, func() bool { r = c.acquire("free", "B", time.Second); return r.Kind == "granted" }, late(func() string { return r.Kind + " " + r.Error }))
	if r.Revision <= highest {
		t.Errorf("after the lift revision %d was issued, after %d before", r.Revision, highest)
	}
	if r := c.owner(held.Key); r.Kind != "free" {
		t.Errorf("after the lift: %s", r.Kind)
	}
}

// TestRestoredBackupOfAnOldBucket: no instance has a memory of it, and each one
// sees that it went back: its last revision is older than its making.
func TestRestoredBackupOfAnOldBucket(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	c := callerOn(t, n.URL)
	// A bucket that was made an hour ago and holds one lease, as the service
	// stores it.
	_, stop := serveUntil(t, n.URL)
	testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("held").Kind == "free" }, "nobody serves")
	held := c.grant("held", "A", 10*time.Minute)
	stop()
	record := lastOf(t, c.nc, "held")
	deleteBucket(t, c.nc)
	config := ours()
	config["first_seq"] = time.Now().Add(-time.Hour).UnixMicro()
	create(t, c.nc, config)
	msg := &nats.Msg{Subject: "$KV.leases.held", Data: record.Data, Header: record.header}
	ack, err := c.nc.RequestMsg(msg, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	held.Revision = lastOf(t, c.nc, "held").Seq
	if held.Revision == 0 {
		t.Fatalf("not stored: %s", ack.Data)
	}
	b := takeBackup(t, c.nc)
	deleteBucket(t, c.nc)
	b.restore(t, c.nc)

	in := serve(t, n.URL)
	testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("held").Kind == "held" }, "nobody serves")
	distrusted(t, c, in, "distrusted", held, bucketOf(t, c.nc).State.LastSeq)
}

// TestRestoredBackupOfAYoungBucket: the revisions say nothing, but instances
// that are there remember higher ones, and tell a new one.
func TestRestoredBackupOfAYoungBucket(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	c := callerOn(t, n.URL)
	link := testnats.Relay(t, n.URL)
	in := serve(t, link.URL()).waitReady(t)
	// What was granted before the deletion holds until its end, lifted or not.
	held := c.grant("held", "A", 20*time.Second)
	b := takeBackup(t, c.nc)
	var last reply
	for i := range 100 {
		last = c.grant(fmt.Sprintf("after-%d", i), "A", time.Second)
	}
	// While the service is held up it cannot make the bucket itself.
	link.Set(testnats.Stall)
	deleteBucket(t, c.nc)
	b.restore(t, c.nc)
	if s := bucketOf(t, c.nc); s.State.LastSeq >= last.Revision {
		t.Fatalf("the restored bucket is at %d, and %d was issued", s.State.LastSeq, last.Revision)
	}
	link.Set(testnats.Pass)
	// It waits for the end of the leases it knew first of all; a new instance has
	// its word for what was issued.
	testnats.Eventually(t, 10*time.Second, func() bool { return strings.HasPrefix(in.bucket(), "waiting") }, "the bucket is ", late(in.bucket))
	young := serve(t, n.URL)
	testnats.Eventually(t, 10*time.Second, func() bool { return strings.HasPrefix(young.bucket(), "distrusted") }, "to a new instance the bucket is ", late(young.bucket))
	distrusted(t, c, in, "waiting", held, last.Revision)
	testnats.Eventually(t, 10*time.Second, func() bool { return len(young.failing()) == 0 }, late(func() string { return fmt.Sprint(young.failing()) }))
}

// TestRestoredBackupAlmostCurrent: a bucket that went back by one revision only
// is above all that was issued again after a moment of trying; what was granted
// before the restore holds all the same.
func TestRestoredBackupAlmostCurrent(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	c := callerOn(t, n.URL)
	link := testnats.Relay(t, n.URL)
	serve(t, link.URL()).waitReady(t)
	c.grant("other", "A", time.Minute)
	b := takeBackup(t, c.nc)
	const ttl = 8 * time.Second
	held := c.grant("k", "A", ttl)
	end := held.sent.Add(ttl)
	link.Set(testnats.Stall)
	deleteBucket(t, c.nc)
	b.restore(t, c.nc)
	link.Set(testnats.Pass)

	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := 0; time.Now().Before(end); j++ {
				key := "k"
				if i%2 == 0 {
					key = fmt.Sprintf("new-%d-%d", i, j)
				}
				r, err := call(c.nc, "acquire", map[string]any{"key": key, "holder": "B", "ttl_ms": 1000})
				if err != nil {
					t.Error(err)
					return
				}
				if r.Kind == "granted" && r.got.Before(end) {
					t.Errorf("%s granted with revision %d, %v before the end of a lease from before the restore", key, r.Revision, end.Sub(r.got))
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	wg.Wait()
}
