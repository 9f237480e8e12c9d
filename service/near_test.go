package service

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// twoServers are a cluster where who says nothing of himself is in another account than
// user a, and store is a connection of user a to the first of them that was told of the
// second by it.
func twoServers(t *testing.T) (servers []*server.Server, store *nats.Conn) {
	t.Helper()
	routes := []int{testnats.FreePort(t), testnats.FreePort(t)}
	for i, port := range routes {
		a, b := server.NewAccount("A"), server.NewAccount("B")
		ns, err := server.NewServer(&server.Options{
			ServerName: fmt.Sprintf("n%d", i), Host: "127.0.0.1", Port: testnats.FreePort(t), NoLog: true, NoSigs: true,
			Accounts: []*server.Account{a, b}, NoAuthUser: "b",
			Users:   []*server.User{{Username: "a", Password: "pw", Account: a}, {Username: "b", Password: "pw", Account: b}},
			Cluster: server.ClusterOpts{Name: "two", Host: "127.0.0.1", Port: port},
			Routes:  server.RoutesFromStr(fmt.Sprintf("nats://127.0.0.1:%d", routes[1-i])),
		})
		if err != nil {
			t.Fatal(err)
		}
		ns.Start()
		t.Cleanup(func() {
			ns.Shutdown()
			ns.WaitForShutdown()
		})
		servers = append(servers, ns)
	}
	u, err := url.Parse(servers[0].ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	store, err = nats.Connect("nats://a:pw@"+u.Host, nats.ReconnectBufSize(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	testnats.Eventually(t, 20*time.Second, func() bool { return len(store.DiscoveredServers()) > 0 }, "the second server is not known")
	return servers, store
}

func asIs(*nats.Options) error { return nil }

// TestNearFinds: the way to a server that was not configured has the credentials of the
// one that told of it; one that leads into another account is none.
func TestNearFinds(t *testing.T) {
	servers, store := twoServers(t)
	find := func(name string, change func(*nats.Options) error) *nats.Conn {
		return newNear(store, testnats.Dial(change), slog.New(slog.DiscardHandler)).find(t.Context(), name)
	}
	nc := find("n1", asIs)
	if nc == nil {
		t.Fatal("there is no way to the second server")
	}
	if nc.ConnectedServerName() != "n1" || nc.RemoteAccount() != "A" {
		t.Errorf("it goes to %s in account %s", nc.ConnectedServerName(), nc.RemoteAccount())
	}
	nc.Close()
	stranger := func(o *nats.Options) error {
		u, err := url.Parse(o.Servers[0])
		if err != nil {
			return err
		}
		u.User = nil
		o.Servers = []string{u.String()}
		return nil
	}
	if nc := find("n1", stranger); nc != nil {
		t.Errorf("a connection in account %s is taken", nc.RemoteAccount())
		nc.Close()
	}
	if nc := find("n7", asIs); nc != nil {
		t.Errorf("%s is taken for a server that is not there", nc.ConnectedServerName())
		nc.Close()
	}
	testnats.Eventually(t, 20*time.Second, func() bool { return servers[0].NumClients() == 1 && servers[1].NumClients() == 0 }, "connections are left over")
}

// TestNearGivesWay: the way is there while its server leads and Store stands, and is lost
// when nobody answers over it.
func TestNearGivesWay(t *testing.T) {
	servers, store := twoServers(t)
	n := newNear(store, testnats.Dial(asIs), slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { n.run(ctx) })
	// As the keeper does it. What was lost comes back after nearLeast.
	leads := func(s seat, want bool, what string) {
		t.Helper()
		testnats.Eventually(t, 30*time.Second, func() bool {
			n.leads(s)
			return (n.way.Load() != nil) == want
		}, what)
	}
	second := seat{"two", "n1"}
	leads(second, true, "no way to the leader")
	leads(seat{"two", "n0"}, false, "a way to the leader beside Store that goes there")
	leads(second, true, "no way to the leader the second time")
	leads(seat{"other", "n1"}, false, "a way to a server of another cluster")
	leads(second, true, "no way to the leader the third time")
	leads(seat{}, false, "a way to nobody")
	leads(second, true, "no way to the leader the fourth time")

	j := &js{nc: store, out: requests{nc: store}, near: n, put: SubjectPrefix}
	_, err := await(func(done func(uint64, error)) {
		j.startOne(&Write{Key: "k", Event: Renewed, TTL: time.Second}, tryTimeout, done)
	})
	if err == nil || n.way.Load() != nil {
		t.Errorf("a write that nobody answers ends with %v, and the way is still there: %v", err, n.way.Load() != nil)
	}
	leads(second, true, "no way after one was lost")

	if err := store.ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 20*time.Second, func() bool { return n.way.Load() == nil }, "the way is there without Store")
	stop()
	done.Wait()
	testnats.Eventually(t, 20*time.Second, func() bool { return servers[0].NumClients()+servers[1].NumClients() == 1 }, "connections are left over")
}
