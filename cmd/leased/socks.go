package main

import (
	"context"
	"errors"
	"net"
	"net/url"
	"time"

	"golang.org/x/net/proxy"
)

// socks is a nats.CustomDialer that goes through a SOCKS5 proxy. It is used in place of the
// contexts' own, which waits for a silent proxy for ever.
type socks struct {
	proxy   proxy.ContextDialer
	timeout time.Duration
}

func newSocks(by string, timeout time.Duration) (*socks, error) {
	u, err := url.Parse(by)
	if err != nil || u.Scheme != "socks5" && u.Scheme != "socks5h" || u.Host == "" {
		return nil, errors.New("must be socks5://HOST:PORT") // what it is may hold a password
	}
	d, err := proxy.FromURL(u, proxy.Direct)
	if err != nil {
		return nil, err
	}
	through, ok := d.(proxy.ContextDialer)
	if !ok {
		return nil, errors.New("the proxy cannot be dialled within a time")
	}
	return &socks{through, timeout}, nil
}

// Dial implements nats.CustomDialer.
func (s *socks) Dial(network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.timeout)
	defer cancel()
	return s.proxy.DialContext(ctx, network, address)
}
