package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/coalesce"
	"github.com/leased/leased/internal/embedded"
	"github.com/leased/leased/metrics"
	"github.com/leased/leased/service"
)

// Time limits of a serve that ends.
const (
	drainTime    = 30 * time.Second // for the calls already received
	embeddedTime = 15 * time.Second // for the NATS server inside to close its store
)

// readyTime is how long the line "serving" waits for the service to be ready
// when NATS is there.
const readyTime = 3 * time.Second

// serveCmd is `leased serve`.
type serveCmd struct {
	NATSListen  string `name:"nats-listen" group:"embedded" placeholder:"HOST:PORT" help:"Where clients reach it, port 0 for any free one (default 127.0.0.1:4222, or what --nats-config says). Outside loopback only with authentication in --nats-config."`
	StoreDir    string `name:"store-dir" group:"embedded" placeholder:"DIR" help:"Where it keeps leases (default $$XDG_STATE_HOME/leased or ~/.local/state/leased, or what --nats-config says)."`
	Sync        string `group:"embedded" placeholder:"WHEN" help:"always: a write is on disk before it is answered. A duration such as 2m: on disk that often, faster, and fences may repeat after a power loss (default always, or what --nats-config says)."`
	NATSConfig  string `name:"nats-config" group:"embedded" placeholder:"FILE" help:"nats-server configuration for everything else: users, TLS, cluster, leaf nodes, limits."`
	NATSAccount string `name:"nats-account" group:"embedded" placeholder:"NAME" help:"Account of --nats-config that keeps the leases, where it has several."`

	connFlags
	FrontContext string   `name:"front-context" group:"connection" env:"NATS_FRONT_CONTEXT" placeholder:"NAME" help:"Context whose credentials the connection that receives calls and replies uses, in place of the others. Its user should be allowed to publish to inboxes alone."`
	HopContext   string   `name:"hop-context" group:"connection" env:"NATS_HOP_CONTEXT" placeholder:"NAME" help:"The same for the connection that carries forwards to owners."`
	ReplyTo      []string `name:"reply-to" group:"embedded" placeholder:"SUBJECT" default:"_INBOX.>,_R_.>" help:"Inboxes of callers, where --nats-config has users: nothing else can be replied to (default _INBOX.>,_R_.>; the latter are those of other accounts)."`

	Replicas           int    `group:"service" default:"1" placeholder:"N" help:"Replicas of the bucket when it is made: 1, 3 or 5 (default 1)."`
	GroupCommit        string `name:"group-commit" group:"service" default:"auto" placeholder:"WHEN" help:"Store concurrent writes together: on, off, or auto. It pays where the NATS server has each write on disk before it answers, which auto knows of the server inside only (default auto)."`
	MaxInFlight        int    `name:"max-in-flight" group:"service" default:"4096" placeholder:"N" help:"Calls answered at once, forwards aside; one more is answered busy (default 4096)."`
	MaxForwards        int    `name:"max-forwards" group:"service" default:"512" placeholder:"N" help:"Forwards answered at once; one more is answered busy (default 512)."`
	MaxLeases          int    `name:"max-leases" group:"service" placeholder:"N" help:"Leases held at a time; an acquire over it is answered over_quota. The same on every instance (default no limit)."`
	MaxLeasesPerHolder int    `name:"max-leases-per-holder" group:"service" placeholder:"N" help:"The same of one holder (default no limit)."`
	APIPrefix          string `name:"api-prefix" group:"service" default:"${apiPrefix}" placeholder:"SUBJECT" help:"Subject of the calls: SUBJECT.acquire and so on (default ${apiPrefix})."`
	EventPrefix        string `name:"event-prefix" group:"service" default:"${eventPrefix}" placeholder:"SUBJECT" help:"Subject of events and inboxes: SUBJECT.changed.KEY, SUBJECT.inbox.HOLDER.KEY (default ${eventPrefix})."`

	HTTPListen string `name:"http-listen" group:"http" default:"127.0.0.1:9422" placeholder:"HOST:PORT" help:"Where /metrics, /healthz and /readyz are; empty for nowhere (default 127.0.0.1:9422)."`
	HTTPConfig string `name:"http-config" group:"http" placeholder:"FILE" help:"TLS and users of that port, in the web configuration format of the Prometheus exporters."`

	logFlags
}

// Help is the long text of leased serve --help.
func (serveCmd) Help() string {
	return `With nothing else said it runs a NATS server of its own: the leases are kept in
--store-dir, clients connect to nats://127.0.0.1:4222. With --server or --context
(or NATS_URL, NATS_CONTEXT) it uses that NATS instead; it needs JetStream and
nats-server 2.11.10, 2.12.1 or newer. The two do not mix: flags of the one are
refused with the other. A flag wins over the environment, and that over the context.

Any number of processes may serve the same NATS; each call is answered by one.
Beside a NATS that runs already, one uses half of the CPUs, unless GOMAXPROCS is set.

It starts without a reachable NATS too, keeps trying, and tells at /readyz:

    curl 127.0.0.1:9422/readyz?verbose

SIGTERM or SIGINT: it takes no more calls, answers those it has within 30 seconds,
and exits. Leases stay. A second signal ends it at once. SIGHUP is logged, and
changes nothing.

Exit codes: 0 told to stop, every call answered; 1 it could not start, or calls had
to be broken off; 64 a flag is wrong; 130 or 143 ended by a second signal.

Logs go to stderr and hold no payloads and no secrets. Under systemd use Type=notify.

    leased serve
    leased serve --store-dir /var/lib/leased --nats-config /etc/leased/nats.conf
    leased serve --server nats://n1,nats://n2,nats://n3 --creds leased.creds --replicas 3
    leased serve --context production
    leased serve --context store.json --front-context front.json --hop-context hop.json`
}

// Run serves until a signal ends it.
func (c *serveCmd) Run(command *kong.Context) error {
	p, err := c.plan(given(command))
	if err != nil {
		return err
	}
	ctx, leave := context.WithCancelCause(context.Background())
	defer leave(nil)
	logs := c.openLog()
	defer logs.close()
	signal.Ignore(syscall.SIGPIPE) // whoever read the log is gone
	signals, hangups := make(chan os.Signal, 2), make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	signal.Notify(hangups, syscall.SIGHUP) // the terminal is gone, or somebody means "reload"
	go func() {
		for range hangups {
			logs.at(slog.LevelWarn).Warn("SIGHUP: nothing is read again; restart for another configuration")
		}
	}()
	go func() {
		leave(fmt.Errorf("signal %v", <-signals))
		second := <-signals
		os.Exit(exitSignal + int(second.(syscall.Signal)))
	}()
	return c.serve(ctx, p, logs)
}

// plan is what the flags come to.
type plan struct {
	inside *embedded.Options              // nil with a NATS that runs already
	users  map[string]*server.Permissions // of the one inside
	nats   endpoint                       // how to connect; to the one inside, what it asks for
	// as are connections with other credentials.
	as map[metrics.Connection]endpoint
}

// endpoint is how the connection name is made.
func (p plan) endpoint(name metrics.Connection) endpoint {
	if e, ok := p.as[name]; ok {
		return e
	}
	return p.nats
}

// plan checks the flags, each alone and all together, and opens nothing.
func (c *serveCmd) plan(given map[string]bool) (plan, error) {
	if err := leased.CheckReplicas(c.Replicas); err != nil {
		return plan{}, usagef("--replicas %d: %w", c.Replicas, err)
	}
	for flag, n := range map[string]int{"--max-leases": c.MaxLeases, "--max-leases-per-holder": c.MaxLeasesPerHolder} {
		if err := leased.CheckQuota(n); err != nil {
			return plan{}, usagef("%s %d: %w", flag, n, err)
		}
	}
	for flag, n := range map[string]int{"--max-in-flight": c.MaxInFlight, "--max-forwards": c.MaxForwards} {
		if err := leased.CheckLimit(n); err != nil {
			return plan{}, usagef("%s %d: %w", flag, n, err)
		}
	}
	if c.GroupCommit != "auto" && c.GroupCommit != "on" && c.GroupCommit != "off" {
		return plan{}, usagef("--group-commit %q: must be on, off or auto", c.GroupCommit)
	}
	for flag, prefix := range map[string]string{"--api-prefix": c.APIPrefix, "--event-prefix": c.EventPrefix} {
		if err := leased.CheckPrefix(prefix); err != nil {
			return plan{}, usagef("%s %q: %w", flag, prefix, err)
		}
	}
	if c.HTTPListen != "" {
		if err := checkListen("--http-listen", c.HTTPListen); err != nil {
			return plan{}, err
		}
	} else if c.HTTPConfig != "" {
		return plan{}, usagef("--http-config: there is no HTTP port with --http-listen ''")
	}
	if by, ok := c.external(given); ok {
		return c.planExternal(given, by)
	}
	return c.planEmbedded(given)
}

func (c *serveCmd) planExternal(given map[string]bool, by string) (plan, error) {
	for _, flag := range []string{"nats-listen", "store-dir", "sync", "nats-config", "nats-account", "reply-to"} {
		if given[flag] {
			return plan{}, usagef("--%s: is for the NATS server inside, but %s names one that runs already", flag, by)
		}
	}
	return c.planConnections(given)
}

// planConnections plans connections that need credentials.
func (c *serveCmd) planConnections(given map[string]bool) (p plan, err error) {
	if p.nats, err = c.resolve(given, false); err != nil {
		return plan{}, err
	}
	p.as = map[metrics.Connection]endpoint{}
	for _, own := range []struct {
		of            metrics.Connection
		flag, context string
	}{
		{metrics.Front, "--front-context", c.FrontContext}, {metrics.Hop, "--hop-context", c.HopContext},
	} {
		if own.context == "" {
			continue
		}
		if p.as[own.of], err = c.as(given, own.flag, own.context); err != nil {
			return plan{}, err
		}
	}
	return p, nil
}

func (c *serveCmd) planEmbedded(given map[string]bool) (plan, error) {
	if c.NATSListen != "" {
		if err := checkListen("--nats-listen", c.NATSListen); err != nil {
			return plan{}, err
		}
	}
	file, err := readNATSConfig(c.NATSConfig)
	if err != nil {
		return plan{}, err
	}
	operator := len(file.TrustedOperators) > 0 || len(file.TrustedKeys) > 0
	ofOperator := map[string]bool{"creds": true, "nkey": true, "front-context": true, "hop-context": true}
	for _, flag := range []string{"creds", "nkey", "front-context", "hop-context", "user", "password", "token", "tlscert", "tlskey", "tlsca", "tlsfirst"} {
		if given[flag] && !(operator && ofOperator[flag]) {
			return plan{}, usagef("--%s: is for a NATS that runs already: name it with --server or --context", flag)
		}
	}
	if given["reply-to"] && operator {
		return plan{}, usagef("--reply-to: with an operator in --nats-config the user of --front-context says where replies go")
	}
	for _, subject := range c.ReplyTo {
		first, _, _ := strings.Cut(subject, ".")
		if !server.IsValidSubject(subject) || first == "*" || first == ">" || strings.HasPrefix(first, "$") || len(subject) > 128 {
			return plan{}, usagef("--reply-to %q: must be a subject of at most 128 bytes that begins with neither a wildcard nor $", subject)
		}
	}
	if c.Replicas > 1 && file.Cluster.Port == 0 {
		return plan{}, usagef("--replicas %d: the NATS server inside is alone, so it can be only 1: give a cluster in --nats-config, or --server", c.Replicas)
	}

	o := &embedded.Options{Listen: c.NATSListen, StoreDir: c.StoreDir, ConfigFile: c.NATSConfig, Account: c.NATSAccount}
	switch interval, err := time.ParseDuration(c.Sync); {
	case c.Sync == "":
	case c.Sync == "always":
		o.SyncAlways = true
	case err != nil || interval <= 0:
		return plan{}, usagef("--sync %q: must be always or a duration such as 2m", c.Sync)
	default:
		o.SyncInterval = interval
	}
	if o.StoreDir == "" && file.StoreDir == "" {
		if o.StoreDir, err = stateDir(); err != nil {
			return plan{}, err
		}
	}

	if operator {
		if c.Creds == "" && c.NKey == "" {
			return plan{}, usagef("--creds: is needed, because --nats-config names an operator")
		}
		alone := *c
		alone.connFlags = connFlags{Creds: c.Creds, NKey: c.NKey, Timeout: c.Timeout, JSDomain: c.JSDomain,
			JSAPIPrefix: c.JSAPIPrefix, InboxPrefix: c.InboxPrefix}
		p, err := alone.planConnections(given)
		p.inside = o
		return p, err
	}
	inbox := cmp.Or(c.InboxPrefix, "_INBOX_leased")
	below := func(prefix string) endpoint {
		return endpoint{jsDomain: c.JSDomain, jsAPIPrefix: c.JSAPIPrefix, options: []nats.Option{nats.CustomInboxPrefix(prefix)}}
	}
	return plan{inside: o, users: c.users(inbox), nats: below(inbox), as: map[metrics.Connection]endpoint{
		metrics.Front: below(inbox + frontInboxes), metrics.Hop: below(inbox + hopInboxes),
	}}, nil
}

// What the inbox prefixes of these connections to the NATS server inside end with.
const frontInboxes, hopInboxes = "_front", "_hop"

// users are what the connections to the NATS server inside may do, where its
// configuration has users. The one that replies publishes where a caller says, and may
// therefore publish to inboxes alone. Nobody tells the one to the store where to write.
func (c *serveCmd) users(inbox string) map[string]*server.Permissions {
	below := func(prefix string) string { return prefix + ".>" }
	return map[string]*server.Permissions{
		string(metrics.Front): {
			Subscribe: &server.SubjectPermission{Allow: []string{below(c.APIPrefix), "$SRV.>", below(inbox + frontInboxes)}},
			Publish: &server.SubjectPermission{
				Allow: append(slices.Clone(c.ReplyTo), below(inbox+"."+strings.TrimSuffix(service.PeersInbox, "."))),
				Deny:  []string{below(c.APIPrefix), below(c.EventPrefix)},
			},
		},
		string(metrics.Hop): {
			Subscribe: &server.SubjectPermission{Allow: []string{below(inbox + hopInboxes)}},
			Publish:   &server.SubjectPermission{Allow: []string{below(c.EventPrefix + ".inbox")}},
		},
		string(metrics.Store): nil,
	}
}

// readNATSConfig reads a nats-server configuration for what flags depend on;
// the server inside reads it again. Warnings in it are the server's to log.
func readNATSConfig(path string) (*server.Options, error) {
	o := &server.Options{}
	if path == "" {
		return o, nil
	}
	err := o.ProcessConfigFile(path)
	var found interface{ Errors() []error }
	if errors.As(err, &found) && len(found.Errors()) == 0 {
		err = nil
	}
	if err != nil {
		return nil, usagef("--nats-config %s: %s", path, oneLine(err.Error()))
	}
	return o, nil
}

func checkListen(flag, listen string) error {
	_, port, err := net.SplitHostPort(listen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return usagef("%s %q: must be host:port", flag, listen)
	}
	return nil
}

// stateDir is where the leases are kept when nobody says where.
func stateDir() (string, error) {
	// A relative path in an XDG variable is to be ignored.
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "leased"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", usagef("--store-dir: is needed, because there is no home directory: %w", err)
	}
	return filepath.Join(home, ".local", "state", "leased"), nil
}

// serve runs the parts, and takes them down in the opposite order when ctx
// ends: the service, its connections, the NATS server inside, the HTTP port.
func (c *serveCmd) serve(ctx context.Context, p plan, logs *logs) (err error) {
	log := logs.at(slog.LevelDebug)
	if p.inside == nil {
		halveCPUs()
		go tune(ctx, garbage)
	} else {
		go tune(ctx, garbageInside)
	}
	var rows []metrics.Endpoint
	for _, row := range leased.Endpoints() {
		rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
	}
	m := metrics.New(rows, metrics.Build{Version: version()})
	h := health{log: logs}
	m.SetReady(h.ready)
	m.SetLogDropped(logs.dropped.Load)

	address := ""
	if c.HTTPListen != "" {
		port, err := serveHTTP(c.HTTPListen, c.HTTPConfig, []page{
			{"/metrics", "for Prometheus", m.Handler(log)},
			{"/healthz", "200 while the process runs", text(h.healthz)},
			{"/readyz", "200 while calls are answered; ?verbose says why not", text(h.readyz)},
		}, logs.at(slog.LevelWarn))
		if err != nil {
			return err
		}
		defer port.close()
		address = port.address()
	}

	connect := func(name metrics.Connection, options ...nats.Option) (*nats.Conn, error) {
		return p.endpoint(name).dial(options...)
	}
	where := redact(p.nats.urls)
	groupCommit := c.GroupCommit == "on"
	if p.inside != nil {
		p.inside.Logger, p.inside.Users = log, p.users
		inside, err := embedded.Start(*p.inside)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, shutdown(inside)) }()
		where = inside.ClientURL()
		groupCommit = groupCommit || c.GroupCommit == "auto" && inside.SyncsAlways()
		connect = func(name metrics.Connection, options ...nats.Option) (*nats.Conn, error) {
			return inside.Connect(string(name), slices.Concat(p.endpoint(name).options, options)...)
		}
		m.SetNATSServer(inside.Version())
	}

	connections, err := openLinks(connect, log, m, h.look)
	if err != nil {
		return err
	}
	defer connections.close()
	go connections.watch(ctx, log)

	var dial func(...nats.Option) (*nats.Conn, error) // the server inside is the nearest
	if p.inside == nil {
		dial = connections.more(connect, log, m)
	}
	svc, err := leased.Start(leased.Options{
		Front: connections.front, Store: connections.store, Hop: connections.hop, Dial: dial,
		JSDomain: p.nats.jsDomain, JSAPIPrefix: p.nats.jsAPIPrefix, Replicas: c.Replicas,
		APIPrefix: c.APIPrefix, EventPrefix: c.EventPrefix, GroupCommit: groupCommit,
		MaxInFlight: c.MaxInFlight, MaxForwards: c.MaxForwards, MaxLeases: c.MaxLeases, MaxLeasesPerHolder: c.MaxLeasesPerHolder,
		Version: version(), Logger: log, Metrics: m,
	})
	if err != nil {
		return err
	}
	h.links = connections
	h.service.Store(svc)

	connections.waitReady(ctx, h.ready)
	log.Info("serving", "nats", where, "http", address, "embedded", p.inside != nil, "version", version(),
		"connected", connections.connected(), "ready", h.ready())
	notify(log, daemon.SdNotifyReady)

	<-ctx.Done()
	h.leaving.Store(true)
	notify(log, daemon.SdNotifyStopping)
	log.Info("leaving", "cause", context.Cause(ctx))
	return leave(svc, m, log, drainTime)
}

// leave has every call answered, or broken off after limit.
func leave(svc *leased.Service, m *metrics.Metrics, log *slog.Logger, limit time.Duration) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	var left atomic.Int64
	timer := time.AfterFunc(limit, func() {
		left.Store(inFlight(m))
		cancel(fmt.Errorf("not over within %v", limit))
	})
	defer timer.Stop()
	start := time.Now()
	if err := svc.Drain(ctx); err != nil {
		log.Error("left before every call was answered", "unanswered", left.Load(), "error", err)
		return fmt.Errorf("%d calls were broken off: %w", left.Load(), err)
	}
	log.Info("every call is answered", "took", time.Since(start).Round(time.Millisecond).String())
	return nil
}

// inFlight is how many requests are received and not answered.
func inFlight(m *metrics.Metrics) (n int64) {
	for _, row := range leased.Endpoints() {
		n += m.Endpoint(row.Name).Snapshot().InFlight
	}
	return n
}

func shutdown(inside *embedded.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), embeddedTime)
	defer cancel()
	return inside.Shutdown(ctx)
}

// notify tells systemd, where it asked to be told.
func notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd could not be told", "state", state, "error", err)
	}
}

// dial connects to a NATS that runs already.
func (e endpoint) dial(options ...nats.Option) (*nats.Conn, error) {
	all := slices.Concat(e.options, options, []nats.Option{coalesce.Dial()})
	return nats.Connect(e.urls, all...)
}

// waitReady waits until ready, for readyTime at most and not without NATS.
func (l *links) waitReady(ctx context.Context, ready func() bool) {
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	for !ready() && l.connected() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}
