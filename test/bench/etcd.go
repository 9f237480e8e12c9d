//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// etcdTarget is a lease as etcd's own lock makes it: a lease of its own, a key
// in a transaction, keep-alives, revoke.
func etcdTarget() target {
	return target{
		name:       "etcd",
		about:      "a granted lease and a transaction per key, one keep-alive call a renewal, revoke",
		topologies: []string{"r1", "r1sync", "r3"},
		maxHeld:    30_000,
		missing:    etcdMissing,
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			return startEtcd(ctx, e, t, false)
		},
	}
}

// etcdSpareTarget is the fastest that etcd can be asked: leases are granted
// beforehand and kept, renewals go through one stream and live in the memory
// of the leader.
func etcdSpareTarget() target {
	return target{
		name:       "etcd-spare",
		about:      "spare leases granted beforehand, one keep-alive stream a connection (renewals in memory only)",
		topologies: []string{"r1", "r1sync", "r3"},
		maxHeld:    30_000,
		missing:    etcdMissing,
		start: func(ctx context.Context, e *env, t topology) (system, error) {
			return startEtcd(ctx, e, t, true)
		},
	}
}

func etcdMissing(e *env) string {
	if _, err := exec.LookPath(e.opts.etcd); err != nil {
		return "etcd is not installed (Debian: etcd-server)"
	}
	return ""
}

type etcdSystem struct {
	children []*child
	conns    []*etcdConn
	spare    bool

	mu     sync.Mutex
	leases map[string]int64 // key: the lease it hangs on
	free   []spareLease     // of leaseTTL, the last used at the end
}

type spareLease struct {
	id    int64
	alive time.Time // it was kept alive then, or later
}

func startEtcd(ctx context.Context, e *env, t topology, spare bool) (system, error) {
	s := &etcdSystem{spare: spare, leases: map[string]int64{}}
	type node struct{ name, peer, client string }
	var nodes []node
	var cluster []string
	for i := range t.nodes {
		peer, err := freePort()
		if err != nil {
			return nil, err
		}
		client, err := freePort()
		if err != nil {
			return nil, err
		}
		n := node{fmt.Sprintf("n%d", i), fmt.Sprintf("http://127.0.0.1:%d", peer), fmt.Sprintf("http://127.0.0.1:%d", client)}
		nodes, cluster = append(nodes, n), append(cluster, n.name+"="+n.peer)
	}
	for _, n := range nodes {
		dir, err := e.tempDir("etcd")
		if err != nil {
			s.close()
			return nil, err
		}
		p, err := e.nursery.start(dir, "etcd", e.opts.etcd, "--name", n.name, "--data-dir", filepath.Join(dir, "data"),
			"--listen-peer-urls", n.peer, "--initial-advertise-peer-urls", n.peer,
			"--listen-client-urls", n.client, "--advertise-client-urls", n.client,
			"--initial-cluster", strings.Join(cluster, ","), "--log-level", "error", "--quota-backend-bytes", "8589934592")
		if err != nil {
			s.close()
			return nil, err
		}
		s.children = append(s.children, p)
	}
	for i := range max(e.opts.conns, t.nodes) {
		s.conns = append(s.conns, newEtcdConn(nodes[i%len(nodes)].client))
	}
	err := s.children[0].wait(ctx, 30*time.Second, func() error {
		for _, c := range s.conns {
			if _, err := c.kv("x"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *etcdSystem) procs() []*child { return s.children }

func (s *etcdSystem) caller(i int) (caller, error) {
	return &etcdCaller{s: s, conn: s.conns[i%len(s.conns)]}, nil
}

func (s *etcdSystem) close() {
	for _, c := range s.conns {
		c.close()
	}
	stopAll(s.children)
}

// lease is a lease for key: a spare one if there is one and that is the mode.
func (s *etcdSystem) lease(c *etcdConn, key string, ttl time.Duration) (int64, error) {
	var id int64
	s.mu.Lock()
	if s.spare && ttl == leaseTTL && len(s.free) > 0 {
		last := s.free[len(s.free)-1]
		s.free = s.free[:len(s.free)-1]
		if time.Since(last.alive) < leaseTTL/2 {
			id = last.id
		} else {
			s.free = s.free[:0] // the others lay idle for longer, nobody kept them alive
		}
	}
	s.mu.Unlock()
	if id == 0 {
		granted, err := c.grant(ttl)
		if err != nil {
			return 0, err
		}
		id = granted
	}
	s.mu.Lock()
	s.leases[key] = id
	s.mu.Unlock()
	return id, nil
}

func (s *etcdSystem) leaseOf(key string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leases[key]
}

func (s *etcdSystem) forget(key string, reuse bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if reuse {
		s.free = append(s.free, spareLease{s.leases[key], time.Now()})
	}
	delete(s.leases, key)
}

type etcdCaller struct {
	s    *etcdSystem
	conn *etcdConn
}

func (c *etcdCaller) acquire(key, holder string, ttl time.Duration) (uint64, error) {
	id, err := c.s.lease(c.conn, key, ttl)
	if err != nil {
		return 0, err
	}
	revision, ok, err := c.conn.create(key, holder, id)
	if err == nil && !ok {
		err = errHeld
	}
	if err != nil {
		c.s.forget(key, false)
	}
	return revision, err
}

func (c *etcdCaller) renew(key, _ string, revision uint64, _ time.Duration) (uint64, error) {
	id := c.s.leaseOf(key)
	if c.s.spare {
		return revision, c.conn.keepAlive(id)
	}
	return revision, c.conn.keepAliveOnce(id)
}

func (c *etcdCaller) release(key, _ string, revision uint64) error {
	id := c.s.leaseOf(key)
	defer c.s.forget(key, c.s.spare)
	if c.s.spare {
		return c.conn.remove(key, revision)
	}
	return c.conn.revoke(id)
}

func (c *etcdCaller) owner(key string) (string, error) { return c.conn.kv(key) }

// contend grants its lease once and then tries the transaction alone.
func (c *etcdCaller) contend(ctx context.Context, key, holder string, ttl, poll time.Duration) (uint64, error) {
	id, err := c.s.lease(c.conn, holder, ttl) // kept under the holder until it has the key
	if err != nil {
		return 0, err
	}
	defer c.s.forget(holder, false)
	revision, err := contend(ctx, poll, func() (uint64, bool, error) {
		return c.conn.create(key, holder, id)
	})
	if err != nil {
		_ = c.conn.revoke(id)
		return 0, err
	}
	c.s.mu.Lock()
	c.s.leases[key] = id
	c.s.mu.Unlock()
	return revision, nil
}

// An etcdConn is one HTTP/2 connection that speaks gRPC, written out for the
// six calls that are needed, so that the module needs no gRPC for its rivals.
type etcdConn struct {
	url    string
	client *http.Client

	mu      sync.Mutex
	alive   chan int64             // to the keep-alive stream, nil until it is open
	waiting map[int64][]chan error // its answers by lease
	cancel  context.CancelFunc
}

func newEtcdConn(url string) *etcdConn {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &etcdConn{
		url:     url,
		client:  &http.Client{Transport: &http.Transport{Protocols: protocols, DisableCompression: true}},
		waiting: map[int64][]chan error{},
	}
}

func (c *etcdConn) close() {
	c.mu.Lock()
	cancel := c.cancel
	c.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	c.client.CloseIdleConnections()
}

// frame puts the five bytes of a gRPC message before b.
func frame(b []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

func (c *etcdConn) request(ctx context.Context, method string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/etcdserverpb."+method, body)
	if err != nil {
		return nil, err
	}
	req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
	return c.client.Do(req)
}

// call makes one unary call and returns the message.
func (c *etcdConn) call(method string, message []byte) ([]byte, error) {
	ctx, cancel := opContext()
	defer cancel()
	resp, err := c.request(ctx, method, bytes.NewReader(frame(message)))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	status := resp.Trailer.Get("Grpc-Status")
	if status == "" {
		status = resp.Header.Get("Grpc-Status")
	}
	if status != "0" {
		return nil, fmt.Errorf("etcd %s: status %s %s%s", method, status, resp.Header.Get("Grpc-Message"), resp.Trailer.Get("Grpc-Message"))
	}
	if len(b) < 5 {
		return nil, fmt.Errorf("etcd %s: no message", method)
	}
	return b[5:], nil
}

func (c *etcdConn) grant(ttl time.Duration) (int64, error) {
	b, err := c.call("Lease/LeaseGrant", protoInt(nil, 1, uint64(ttl/time.Second)))
	if err != nil {
		return 0, err
	}
	id, _ := protoField(b, 2)
	return int64(id), nil
}

func (c *etcdConn) revoke(id int64) error {
	_, err := c.call("Lease/LeaseRevoke", protoInt(nil, 1, uint64(id)))
	return err
}

// create puts the key if it does not exist.
func (c *etcdConn) create(key, value string, lease int64) (revision uint64, ok bool, err error) {
	compare := protoInt(nil, 2, 1) // target: create revision, equal to the 0 that is left out
	compare = protoBytes(compare, 3, []byte(key))
	compare = protoInt(compare, 5, 0)
	put := protoBytes(nil, 1, []byte(key))
	put = protoBytes(put, 2, []byte(value))
	put = protoInt(put, 3, uint64(lease))
	txn := protoBytes(nil, 1, compare)
	txn = protoBytes(txn, 2, protoBytes(nil, 2, put))
	return c.txn(txn)
}

// remove deletes the key if its revision is still the one that was granted.
func (c *etcdConn) remove(key string, revision uint64) error {
	compare := protoInt(nil, 2, 2) // target: mod revision
	compare = protoBytes(compare, 3, []byte(key))
	compare = protoInt(compare, 6, revision)
	txn := protoBytes(nil, 1, compare)
	txn = protoBytes(txn, 2, protoBytes(nil, 3, protoBytes(nil, 1, []byte(key))))
	_, ok, err := c.txn(txn)
	if err == nil && !ok {
		err = errNotHeld
	}
	return err
}

func (c *etcdConn) txn(message []byte) (revision uint64, ok bool, err error) {
	b, err := c.call("KV/Txn", message)
	if err != nil {
		return 0, false, err
	}
	succeeded, _ := protoField(b, 2)
	_, header := protoField(b, 1)
	revision, _ = protoField(header, 3)
	return revision, succeeded == 1, nil
}

// kv is the value of a key by a linearizable read, "" for none.
func (c *etcdConn) kv(key string) (string, error) {
	b, err := c.call("KV/Range", protoBytes(nil, 1, []byte(key)))
	if err != nil {
		return "", err
	}
	_, kv := protoField(b, 2)
	_, value := protoField(kv, 5)
	return string(value), nil
}

// keepAliveOnce opens a stream for one keep-alive, as KeepAliveOnce of etcd's
// client does.
func (c *etcdConn) keepAliveOnce(id int64) error {
	b, err := c.call("Lease/LeaseKeepAlive", protoInt(nil, 1, uint64(id)))
	if err != nil {
		return err
	}
	return keptAlive(b)
}

func keptAlive(b []byte) error {
	if ttl, _ := protoField(b, 3); ttl == 0 {
		return errNotHeld
	}
	return nil
}

// keepAlive sends one keep-alive on the connection's stream and waits for its
// answer.
func (c *etcdConn) keepAlive(id int64) error {
	answer := make(chan error, 1)
	c.mu.Lock()
	if c.alive == nil {
		if err := c.openStream(); err != nil {
			c.mu.Unlock()
			return err
		}
	}
	c.waiting[id] = append(c.waiting[id], answer)
	alive := c.alive
	c.mu.Unlock()
	timeout := time.NewTimer(opTimeout)
	defer timeout.Stop()
	select {
	case alive <- id:
	case <-timeout.C:
		return errors.New("etcd: the keep-alive stream takes nothing")
	}
	select {
	case err := <-answer:
		return err
	case <-timeout.C:
		return errors.New("etcd: no answer on the keep-alive stream")
	}
}

// openStream starts the two goroutines of the stream. What waits to be sent
// goes out in one write.
func (c *etcdConn) openStream() error {
	ctx, cancel := context.WithCancel(context.Background())
	read, write := io.Pipe()
	alive := make(chan int64, 1024)
	go func() {
		defer write.Close()
		var b []byte
		for {
			b = b[:0]
			select {
			case id := <-alive:
				b = append(b, frame(protoInt(nil, 1, uint64(id)))...)
			case <-ctx.Done():
				return
			}
			for len(b) < 16<<10 && len(alive) > 0 {
				b = append(b, frame(protoInt(nil, 1, uint64(<-alive)))...)
			}
			if _, err := write.Write(b); err != nil {
				return
			}
		}
	}()
	go func() {
		resp, err := c.request(ctx, "Lease/LeaseKeepAlive", read)
		if err != nil {
			return // its callers time out
		}
		defer resp.Body.Close()
		in := make([]byte, 0, 64<<10)
		chunk := make([]byte, 64<<10)
		for {
			n, err := resp.Body.Read(chunk)
			in = append(in, chunk[:n]...)
			for len(in) >= 5 {
				size := 5 + int(binary.BigEndian.Uint32(in[1:5]))
				if len(in) < size {
					break
				}
				c.answered(in[5:size])
				in = append(in[:0], in[size:]...)
			}
			if err != nil {
				return
			}
		}
	}()
	c.alive, c.cancel = alive, cancel
	return nil
}

func (c *etcdConn) answered(message []byte) {
	id, _ := protoField(message, 2)
	c.mu.Lock()
	defer c.mu.Unlock()
	if q := c.waiting[int64(id)]; len(q) > 0 {
		q[0] <- keptAlive(message)
		if len(q) == 1 {
			delete(c.waiting, int64(id))
		} else {
			c.waiting[int64(id)] = q[1:]
		}
	}
}

// protoInt and protoBytes append a field of a protobuf message.
func protoInt(b []byte, field int, v uint64) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(field)<<3), v)
}

func protoBytes(b []byte, field int, v []byte) []byte {
	b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(field)<<3|2), uint64(len(v)))
	return append(b, v...)
}

// protoField is the first field of that number in a message of varints and
// bytes: its number or its bytes, zero values when it is left out.
func protoField(b []byte, field int) (uint64, []byte) {
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		if n <= 0 {
			return 0, nil
		}
		b = b[n:]
		v, n := binary.Uvarint(b)
		if n <= 0 {
			return 0, nil
		}
		b = b[n:]
		var value []byte
		if tag&7 == 2 {
			if uint64(len(b)) < v {
				return 0, nil
			}
			value, b = b[:v], b[v:]
		}
		if int(tag>>3) == field {
			return v, value
		}
	}
	return 0, nil
}
