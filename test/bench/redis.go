//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// redisTarget is the well-known lock of one redis: SET NX PX and two scripts.
// It has no fence, and one node.
func redisTarget() target {
	return target{
		name:       "redis",
		about:      "SET NX PX and compare-and-expire scripts, appendfsync always; no fence, one node",
		topologies: []string{"r1", "r1sync"},
		missing: func(*env) string {
			if _, err := exec.LookPath("redis-server"); err != nil {
				return "redis-server is not installed (Debian: redis-server)"
			}
			return ""
		},
		start: startRedis,
	}
}

type redisSystem struct {
	child  *child
	socket string
	conns  []net.Conn
	hashes map[string]string // script: SHA1
}

const (
	redisRenew   = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('pexpire',KEYS[1],ARGV[2]) end return 0"
	redisRelease = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0"
)

func startRedis(ctx context.Context, e *env, _ topology) (system, error) {
	dir, err := e.tempDir("redis")
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p, err := e.nursery.start(dir, "redis", "redis-server", "--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir,
		"--save", "", "--appendonly", "yes", "--appendfsync", "always", "--logfile", filepath.Join(dir, "redis.log"))
	if err != nil {
		return nil, err
	}
	s := &redisSystem{child: p, socket: fmt.Sprintf("127.0.0.1:%d", port), hashes: map[string]string{}}
	err = p.wait(ctx, 10*time.Second, func() error {
		c, err := s.caller(0)
		if err != nil {
			return err
		}
		for _, script := range []string{redisRenew, redisRelease} {
			hash, err := c.(*redisCaller).do("SCRIPT", "LOAD", script)
			if err != nil {
				return err
			}
			s.hashes[script] = hash
		}
		return nil
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *redisSystem) procs() []*child { return []*child{s.child} }

// caller has a connection of its own, as in a pool that is large enough.
func (s *redisSystem) caller(int) (caller, error) {
	conn, err := net.Dial("tcp", s.socket)
	if err != nil {
		return nil, err
	}
	s.conns = append(s.conns, conn)
	return &redisCaller{s: s, conn: conn, r: bufio.NewReader(conn)}, nil
}

func (s *redisSystem) close() {
	for _, c := range s.conns {
		c.Close()
	}
	s.child.stop()
}

type redisCaller struct {
	s    *redisSystem
	conn net.Conn
	r    *bufio.Reader
	out  []byte
}

// do sends one command and returns its reply as text, "" for nil.
func (c *redisCaller) do(args ...string) (string, error) {
	b := append(c.out[:0], '*')
	b = append(strconv.AppendInt(b, int64(len(args)), 10), "\r\n"...)
	for _, a := range args {
		b = append(strconv.AppendInt(append(b, '$'), int64(len(a)), 10), "\r\n"...)
		b = append(append(b, a...), "\r\n"...)
	}
	c.out = b
	if err := c.conn.SetDeadline(time.Now().Add(opTimeout)); err != nil {
		return "", err
	}
	if _, err := c.conn.Write(b); err != nil {
		return "", err
	}
	line, err := c.r.ReadSlice('\n')
	if err != nil {
		return "", err
	}
	if len(line) < 3 {
		return "", errors.New("redis: short reply")
	}
	kind, value := line[0], string(line[1:len(line)-2])
	switch kind {
	case '+', ':':
		return value, nil
	case '-':
		return "", errors.New("redis: " + value)
	case '$':
		n, err := strconv.Atoi(value)
		if err != nil || n < 0 {
			return "", err
		}
		body := make([]byte, n+2)
		if _, err := io.ReadFull(c.r, body); err != nil {
			return "", err
		}
		return string(body[:n]), nil
	}
	return "", fmt.Errorf("redis: reply of kind %q", kind)
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

func (c *redisCaller) acquire(key, holder string, ttl time.Duration) (uint64, error) {
	reply, err := c.do("SET", key, holder, "NX", "PX", millis(ttl))
	if err == nil && reply != "OK" {
		err = errHeld
	}
	return 1, err
}

func (c *redisCaller) renew(key, holder string, _ uint64, ttl time.Duration) (uint64, error) {
	reply, err := c.do("EVALSHA", c.s.hashes[redisRenew], "1", key, holder, millis(ttl))
	if err == nil && reply != "1" {
		err = errNotHeld
	}
	return 1, err
}

func (c *redisCaller) release(key, holder string, _ uint64) error {
	reply, err := c.do("EVALSHA", c.s.hashes[redisRelease], "1", key, holder)
	if err == nil && reply != "1" {
		err = errNotHeld
	}
	return err
}

func (c *redisCaller) owner(key string) (string, error) { return c.do("GET", key) }

func (c *redisCaller) contend(ctx context.Context, key, holder string, ttl, poll time.Duration) (uint64, error) {
	return contend(ctx, poll, func() (uint64, bool, error) {
		_, err := c.acquire(key, holder, ttl)
		if errors.Is(err, errHeld) {
			return 0, false, nil
		}
		return 1, err == nil, err
	})
}
