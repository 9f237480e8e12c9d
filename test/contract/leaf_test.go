package contract

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/leased/leased/internal/testnats"
)

// leafLimit is the max_payload of the leaf; the hub has the default, 1 MiB.
const leafLimit = 64 << 10

// hubDomain is the hub's JetStream domain, without which a leaf cannot use it.
const hubDomain = "hub"

// hubAndLeaf runs two servers; the leaf has no JetStream and uses the hub's.
func hubAndLeaf(t testing.TB) (hub, leaf *testnats.Node) {
	t.Helper()
	port := testnats.FreePort(t)
	hub = testnats.Server(t, func(o *server.Options) {
		o.LeafNode.Host, o.LeafNode.Port = "127.0.0.1", port
		o.JetStreamDomain = hubDomain
	})
	leaf = testnats.Server(t, testnats.WithoutJetStream, func(o *server.Options) {
		o.ServerName = "leaf"
		o.MaxPayload = leafLimit
		o.LeafNode.ReconnectInterval = 50 * time.Millisecond
		o.LeafNode.Remotes = []*server.RemoteLeafOpts{{URLs: []*url.URL{{Scheme: "nats-leaf", Host: fmt.Sprintf("127.0.0.1:%d", port)}}}}
	})
	testnats.Eventually(t, 10*time.Second, func() bool { return hub.NS().NumLeafNodes() == 1 }, "the leaf is not connected")
	return hub, leaf
}

// smallHop is a service whose connection to owners goes through the leaf, and
// a lease of holder A on key k, who listens.
func smallHop(t testing.TB) (*rig, *reply) {
	t.Helper()
	hub, leaf := hubAndLeaf(t)
	r := newRig(t, setup{node: hub, dial: func(_ int, connection string) string {
		if connection == "hop" {
			return leaf.URL
		}
		return ""
	}})
	l := r.acquire("k", "A", 600000)
	return r, l
}
