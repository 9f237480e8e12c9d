//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A topology is how many servers stand behind a contestant and when they sync.
type topology struct {
	name  string
	nodes int
	sync  string // sync_interval of nats-server
}

var topologies = []topology{
	{"r1", 1, "2m"},
	{"r1sync", 1, "always"},
	{"r3", 3, "2m"},
}

const bucketStream = "KV_leases"

// startNATS runs the servers of one contestant and returns when JetStream
// answers. urls has one address a server.
func startNATS(ctx context.Context, e *env, t topology) (procs []*child, urls []string, err error) {
	bin, err := e.natsServer(ctx)
	if err != nil {
		return nil, nil, err
	}
	routes := make([]string, t.nodes)
	for i := range routes {
		port, err := freePort()
		if err != nil {
			return nil, nil, err
		}
		routes[i] = fmt.Sprintf("nats://127.0.0.1:%d", port)
	}
	defer func() {
		if err != nil {
			stopAll(procs)
		}
	}()
	for i := range t.nodes {
		dir, err := e.tempDir("nats")
		if err != nil {
			return procs, nil, err
		}
		conf := fmt.Sprintf("listen: \"127.0.0.1:-1\"\nserver_name: n%d\nports_file_dir: %q\njetstream { store_dir: %q, sync_interval: %s }\n",
			i, dir, filepath.Join(dir, "js"), t.sync)
		if t.nodes > 1 {
			conf += fmt.Sprintf("cluster { name: bench, listen: %q, routes: [%s] }\n",
				strings.TrimPrefix(routes[i], "nats://"), strings.Join(routes, ", "))
		}
		file := filepath.Join(dir, "nats.conf")
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			return procs, nil, err
		}
		p, err := e.nursery.start(dir, "nats", bin, "-c", file)
		if err != nil {
			return procs, nil, err
		}
		procs = append(procs, p)
		err = p.wait(ctx, 20*time.Second, func() error {
			url, err := clientURL(dir)
			if err == nil {
				urls = append(urls, url)
			}
			return err
		})
		if err != nil {
			return procs, nil, err
		}
	}
	err = procs[0].wait(ctx, 30*time.Second, func() error { return jetStreamReady(ctx, urls, t.nodes) })
	return procs, urls, err
}

// clientURL reads the file in which a nats-server tells its ports.
func clientURL(dir string) (string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.ports"))
	if err != nil {
		return "", err
	}
	if len(files) == 0 {
		return "", fmt.Errorf("no ports file in %s yet", dir)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		return "", err
	}
	var ports struct {
		Nats []string `json:"nats"`
	}
	if err := json.Unmarshal(b, &ports); err != nil {
		return "", err
	}
	if len(ports.Nats) == 0 {
		return "", fmt.Errorf("no client port in %s", files[0])
	}
	return ports.Nats[0], nil
}

// jetStreamReady makes and deletes a stream with as many replicas as there are
// servers, which needs all that a bucket will need.
func jetStreamReady(ctx context.Context, urls []string, nodes int) error {
	nc, err := nats.Connect(strings.Join(urls, ","), nats.Timeout(time.Second))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second) // a cluster without a leader does not answer at all
	defer cancel()
	_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "ready", Subjects: []string{"ready"}, Replicas: nodes})
	if err != nil {
		return err
	}
	return js.DeleteStream(ctx, "ready")
}

// createBucket makes the stream that the lease service would make.
func createBucket(ctx context.Context, nc *nats.Conn, replicas int) error {
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*opTimeout)
	defer cancel()
	_, err = js.CreateStream(ctx, jetstream.StreamConfig{
		Name:               bucketStream,
		Subjects:           []string{"$KV.leases.>"},
		MaxMsgsPerSubject:  1,
		MaxBytes:           -1,
		MaxMsgs:            -1,
		Storage:            jetstream.FileStorage,
		Discard:            jetstream.DiscardNew,
		DenyDelete:         true,
		AllowRollup:        true,
		AllowMsgTTL:        true,
		AllowAtomicPublish: true,
		Replicas:           replicas,
		FirstSeq:           uint64(time.Now().UnixMicro()),
		RePublish:          &jetstream.RePublish{Source: "$KV.leases.>", Destination: "dagnats.lease.changed.>"},
	})
	return err
}

// connect opens n connections, spread over urls. Nothing is buffered while a
// connection is down: an operation then fails and is counted as failed.
func connect(urls []string, n int) ([]*nats.Conn, error) {
	ncs := make([]*nats.Conn, 0, n)
	for i := range n {
		nc, err := nats.Connect(urls[i%len(urls)], nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.Timeout(5*time.Second))
		if err != nil {
			closeAll(ncs)
			return nil, err
		}
		ncs = append(ncs, nc)
	}
	return ncs, nil
}

func closeAll(ncs []*nats.Conn) {
	for _, nc := range ncs {
		nc.Close()
	}
}

// freePort finds a port that was free a moment ago, for servers that must know
// each other's before they start.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
