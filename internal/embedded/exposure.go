package embedded

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/nats-io/nats-server/v2/server"
)

// listener is one address the server will open.
type listener struct {
	source string // flag or configuration section
	host   string
	port   int // 0: not opened
	guard  bool
	remedy string
}

// checkExposure refuses listeners that others on the network could use without proving who they
// are. opts have their defaults filled in. Whoever reaches JetStream can end every lease, and a
// route or gateway is in every account.
func checkExposure(opts *server.Options, clientSource string) error {
	const (
		users      = "add users, a token, an operator or tls with verify to the file, or listen on 127.0.0.1"
		routes     = "add authorization or tls to that section, or listen on 127.0.0.1"
		monitoring = "nats-server has none for this one, so let it listen on 127.0.0.1"
	)
	ws, mqtt, leaf := &opts.Websocket, &opts.MQTT, &opts.LeafNode
	for _, l := range []listener{
		{clientSource, opts.Host, opts.Port, clientsKnown(opts), users},
		{"websocket in --nats-config", ws.Host, ws.Port,
			mutualTLS(ws.TLSConfig) || guarded(opts, ws.Username, ws.Token, ws.NoAuthUser), users},
		{"mqtt in --nats-config", mqtt.Host, mqtt.Port,
			mutualTLS(mqtt.TLSConfig) || guarded(opts, mqtt.Username, mqtt.Token, mqtt.NoAuthUser), users},
		{"leafnodes in --nats-config", leaf.Host, leaf.Port,
			mutualTLS(leaf.TLSConfig) || leaf.Username != "" || leaf.Nkey != "" || len(leaf.Users) > 0 || guarded(opts, "", "", ""), users},
		{"cluster in --nats-config", opts.Cluster.Host, opts.Cluster.Port,
			mutualTLS(opts.Cluster.TLSConfig) || opts.Cluster.Username != "", routes},
		{"gateway in --nats-config", opts.Gateway.Host, opts.Gateway.Port,
			mutualTLS(opts.Gateway.TLSConfig) || opts.Gateway.Username != "", routes},
		{"http in --nats-config", opts.HTTPHost, opts.HTTPPort, false, monitoring},
		{"https in --nats-config", opts.HTTPHost, opts.HTTPSPort, false, monitoring},
		{"prof_port in --nats-config", opts.Host, opts.ProfPort, false, monitoring},
	} {
		// The client port alone is always opened; 0 there means a free one.
		if l.guard || l.port == 0 && l.source != clientSource {
			continue
		}
		if err := loopback(l.host); err != nil {
			return fmt.Errorf("%s: %s %w: a listener outside loopback must ask for authentication: %s",
				l.source, net.JoinHostPort(l.host, strconv.Itoa(max(l.port, 0))), err, l.remedy)
		}
	}
	return nil
}

// clientsKnown tells whether the client listener accepts only clients that authenticate.
func clientsKnown(opts *server.Options) bool {
	return mutualTLS(opts.TLSConfig) && !opts.AllowNonTLS || guarded(opts, "", "", "")
}

// guarded does so for a listener that has its own user, token or no_auth_user, any of which takes
// the place of the server-wide settings.
func guarded(opts *server.Options, user, token, noAuthUser string) bool {
	if noAuthUser != "" {
		return false
	}
	if user != "" || token != "" {
		return true
	}
	return asksForCredentials(opts) && opts.NoAuthUser == ""
}

func asksForCredentials(opts *server.Options) bool {
	return hasOperator(opts) || opts.Users != nil || opts.Nkeys != nil || opts.Username != "" || opts.Authorization != ""
}

func hasOperator(opts *server.Options) bool {
	return len(opts.TrustedOperators) > 0 || len(opts.TrustedKeys) > 0
}

func mutualTLS(c *tls.Config) bool {
	return c != nil && c.ClientAuth == tls.RequireAndVerifyClientCert
}

// loopback returns why host is not, or not surely, reachable from this machine alone.
func loopback(host string) error {
	if host == "" {
		return errors.New("means every address of this machine")
	}
	ips := []net.IP{net.ParseIP(host)}
	if ips[0] == nil {
		var err error
		if ips, err = net.LookupIP(host); err != nil {
			return fmt.Errorf("cannot be resolved (%v)", err)
		}
	}
	for _, ip := range ips {
		if ip.IsUnspecified() {
			return errors.New("means every address of this machine")
		}
		if !ip.IsLoopback() {
			return fmt.Errorf("is not a loopback address (%s)", ip)
		}
	}
	return nil
}
