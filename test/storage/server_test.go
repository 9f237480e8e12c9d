package storage

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/internal/testnats"
)

// What nats-server does that the service has to live with, without the service:
// each test fails when the server does it no longer, and then what the service
// does about it has to be thought over again. docs/RELIABILITY.md names them.

// client asks JetStream on nc.
func client(t *testing.T, nc *nats.Conn, opts ...jetstream.JetStreamOpt) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// bare makes a stream of one message a subject with TTLs, such as the bucket is,
// that republishes below told.
func bare(t *testing.T, js jetstream.JetStream, replicas int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "bare", Subjects: []string{"bare.*"}, MaxMsgsPerSubject: 1, AllowMsgTTL: true, Replicas: replicas,
		RePublish: &jetstream.RePublish{Source: "bare.*", Destination: "told.{{wildcard(1)}}"}})
	if err != nil {
		t.Fatal(err)
	}
}

// message is value for a key, with a TTL.
func message(key, value, ttl string) *nats.Msg {
	return &nats.Msg{Subject: "bare." + key, Data: []byte(value), Header: nats.Header{"Nats-TTL": {ttl}}}
}

// put publishes value with a TTL.
func put(t *testing.T, js jetstream.JetStream, key, value, ttl string) {
	t.Helper()
	if _, err := js.PublishMsg(t.Context(), message(key, value, ttl)); err != nil {
		t.Fatal(err)
	}
}

// three is a cluster with the stream on all of it, healed in the end.
func three(t *testing.T) *testnats.Nodes {
	t.Helper()
	c := testnats.Cluster(t, 3)
	t.Cleanup(c.Heal)
	bare(t, client(t, c.Connect()), 3)
	return c
}

// succeed waits until a new leader has stored value for the key k, and says as what.
func succeed(t *testing.T, nc *nats.Conn, value string) (sequence uint64) {
	t.Helper()
	js := client(t, nc, jetstream.WithDefaultTimeout(200*time.Millisecond))
	testnats.Eventually(t, 60*time.Second, func() bool {
		ack, err := js.PublishMsg(t.Context(), message("k", value, "60s"), jetstream.WithRetryAttempts(0))
		if err == nil {
			sequence = ack.Sequence
		}
		return err == nil
	}, "no new leader took the write")
	return sequence
}

// shown is what a read of the key k shows, "" for nothing.
func shown(t *testing.T, js jetstream.JetStream) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	s, err := js.Stream(ctx, "bare")
	if err != nil {
		return "no answer"
	}
	m, err := s.GetLastMsgForSubject(ctx, "bare.k")
	switch {
	case err == nil:
		return string(m.Data)
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return ""
	default:
		return "no answer"
	}
}

// TestServerShowsWhatWasReplaced: after a kill -9 a server shows a message again
// that had been replaced by one that has run out since.
func TestServerShowsWhatWasReplaced(t *testing.T) {
	t.Parallel()
	s := testnats.Child(t, testnats.ChildOptions{Sync: "always"})
	js := client(t, s.Connect())
	bare(t, js, 1)
	put(t, js, "k", "the first, for a minute", "60s")
	put(t, js, "k", "the second, for a second", "1s")
	put(t, js, "another", "so that the block of messages stays", "60s")
	testnats.Eventually(t, 10*time.Second, func() bool { return shown(t, js) == "" }, "the second is not removed")
	s.Kill()
	s.Restart()
	var got string
	testnats.Eventually(t, 20*time.Second, func() bool { got = shown(t, js); return got != "no answer" }, "no answer after the restart")
	if got != "the first, for a minute" {
		t.Errorf("after the restart the key holds %q: what was replaced stays away now", got)
	}
}

// TestServerReadsFromADeposedLeader: a stream leader that is cut off from its peers
// goes on answering reads, when another leads and has stored more. It notices after
// some ten seconds, about when the others elect, so it takes a few tries to see it (P13).
func TestServerReadsFromADeposedLeader(t *testing.T) {
	t.Parallel()
	c := three(t)
	for range 8 {
		leader := c.WaitLeader("bare")
		before := client(t, c.Servers[leader].Connect())
		after := c.Servers[(leader+1)%3].Connect()
		put(t, before, "k", "old", "60s")
		c.Isolate(leader, testnats.Stall)
		succeed(t, after, "new")
		if shown(t, before) == "old" {
			return
		}
		c.Heal()
		c.WaitReady()
	}
	t.Error("a leader that was cut off does not answer reads any more when another leads")
}

// TestServerRefusesWhatIsStored: a stream leader that is deposed and does not know it
// answers writes from what it has, asking nobody: it refuses what its successor stores,
// and the writer hears both. Nothing the old one sends arrives, and what its new leader
// sends is lost to it; that takes a few tries, as above.
func TestServerRefusesWhatIsStored(t *testing.T) {
	t.Parallel()
	c := three(t)
	var said []string
	for range 12 {
		old := c.WaitLeader("bare")
		silent, near := c.Servers[(old+1)%3], c.Servers[(old+2)%3]
		writer := near.Connect()
		put(t, client(t, writer), "k", "old", "60s")
		inbox := nats.NewInbox()
		// What the old leader answers stays at its own clients for now.
		toWriter, toNeighbour := subscribe(t, writer, inbox), subscribe(t, c.Servers[old].Connect(), inbox)
		after := silent.Connect()

		c.Block(old, (old+1)%3, testnats.Stall)
		c.Block(old, (old+2)%3, testnats.Stall)
		c.Block((old+1)%3, old, testnats.Stall)
		last := succeed(t, after, "new")
		m := message("k", "newer", "60s")
		m.Header.Set("Nats-Expected-Last-Subject-Sequence", strconv.FormatUint(last, 10))
		m.Reply = inbox
		if err := writer.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
		stored, refused := next(t, toWriter), next(t, toNeighbour)
		if strings.Contains(stored, `"seq":`+strconv.FormatUint(last+1, 10)) && strings.Contains(refused, "wrong last sequence: ") {
			return
		}
		said = append(said, stored, refused)
		c.Heal()
		c.WaitReady()
	}
	t.Errorf("a leader that was deposed does not refuse any more what is stored: %q", said)
}

// TestServerRepublishesLate: what a leader stored and republished can reach a
// subscriber after what its successor stored.
func TestServerRepublishesLate(t *testing.T) {
	t.Parallel()
	c := three(t)
	var said [][]string
	for range 4 {
		old := c.WaitLeader("bare")
		far := c.Servers[(old+1)%3].Connect()
		events := subscribe(t, far, "told.k")
		c.WaitReady() // and all know of the subscription

		c.Block(old, (old+1)%3, testnats.Stall)
		put(t, client(t, c.Servers[old].Connect()), "k", "first", "60s") // the third server agreed
		c.Isolate(old, testnats.Stall)
		succeed(t, far, "second")
		// A successor that had not heard that the first was agreed on tells it too.
		told := []string{next(t, events)}
		if told[0] == "first" {
			told = append(told, next(t, events))
		}
		c.Heal()
		late := next(t, events)
		if told[len(told)-1] == "second" && late == "first" {
			return
		}
		said = append(said, append(told, late))
		c.WaitReady()
	}
	t.Errorf("told %q, where first was expected after second", said)
}

func subscribe(t *testing.T, nc *nats.Conn, subject string) *nats.Subscription {
	t.Helper()
	s, err := nc.SubscribeSync(subject)
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// next is the text that comes next, or why none does.
func next(t *testing.T, s *nats.Subscription) string {
	t.Helper()
	m, err := s.NextMsg(10 * time.Second)
	if err != nil {
		return err.Error()
	}
	return string(m.Data)
}
