// Package embedded runs a nats-server with JetStream inside this process.
//
// The server is an ordinary one: other programs connect to it over TCP, and everything that is not
// an option here (authorization, accounts, TLS, clustering, limits) comes from a nats-server
// configuration file. What this package adds is care for leases: writes are synced to disk before
// they are acknowledged, one process at a time owns a store, and no port is open to the network
// without authentication.
//
// # The in-process connection
//
// [Server.Connect] reaches the server without a socket. Where the configuration asks for
// credentials, the package adds nkey users of its own for the life of the server, one for each of
// [Options.Users]: their seeds never leave the process, they are accepted on in-process connections
// only, and they are all in one account:
//
//   - no accounts in the file: the global account, $G, as for any user outside an account;
//   - one account in the file beside the system account: that account;
//   - several: the one that [Options.Account] names. Without that, Start refuses.
//
// A file without any authentication puts every connection, this one too, in $G. A file with an
// operator (JWT) leaves no way to make a user here: the caller hands its own credentials to
// Connect, see [Server.NeedsCredentials], and they decide the account.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/leased/leased/internal/coalesce"
)

// DefaultListen is where clients find the server when neither Options nor the file says otherwise.
const DefaultListen = "127.0.0.1:4222"

const globalAccount = "$G"

// maxPending is max_pending where the file does not say: what may wait for one connection. Requests
// of many callers come over one connection of the service, faster than any reader reads: with
// nats-server's own 64 MiB, 70 requests of 1 MB at once are enough to have it cut off.
const maxPending = 512 << 20

// Options say how to run the server. What is left zero is taken from ConfigFile, and where the file
// is silent too, from the default given here.
type Options struct {
	// Listen is the host:port for clients; port 0 picks a free one. Default DefaultListen.
	Listen string

	// StoreDir is the directory JetStream keeps its data in; made with mode 0700 when missing.
	// No default: it must be given here or as jetstream.store_dir in the file.
	StoreDir string

	// SyncAlways syncs every write to disk before it is acknowledged. This is the default.
	SyncAlways bool
	// SyncInterval, when positive, syncs that often instead: a power loss may then take back
	// acknowledged writes of that long, and fences may be issued twice.
	SyncInterval time.Duration

	// ConfigFile is a file in nats-server's configuration format. Default none.
	ConfigFile string

	// Account names the account of the in-process connection; see the package comment.
	Account string

	// Users are those of in-process connections and what each may do, where the configuration asks
	// for credentials; nil lets it do everything. Elsewhere every connection may.
	Users map[string]*server.Permissions

	// ServerName is the name of the server in its cluster. Default: its random id.
	ServerName string

	// Logger takes what the server has to say: warnings and errors at their level, notices at
	// debug, the server's own debug and trace lines below that. Default: nothing is logged.
	Logger *slog.Logger
}

// Server is a running nats-server.
type Server struct {
	ns     *server.Server
	lock   *os.File
	users  map[string]nkeys.KeyPair // none when the server asks for no credentials, or for ones we cannot make
	jwt    bool                     // an operator decides who may connect
	once   sync.Once
	closed chan struct{} // closed when nothing runs any more and the store is free
}

// Start runs a server and returns when it accepts connections and JetStream has recovered its
// store. It fails, and leaves nothing behind, when the options or the file are wrong, when a
// listener would be open to the network without authentication, when another process has the
// store, and when a port is taken.
func Start(o Options) (*Server, error) {
	log := newLogger(o.Logger)
	opts, err := o.serverOptions(log)
	if err != nil {
		return nil, err
	}
	s := &Server{closed: make(chan struct{})}
	account, err := s.addUsers(opts, o)
	if err != nil {
		return nil, err
	}

	ns, err := server.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("embedded nats-server: %w", err)
	}
	s.ns = ns
	// NewServer has filled in the defaults, and it makes a no_auth_user of its own when the file
	// has a system account only: what will be open is known from here on.
	if err := checkExposure(opts, o.listenSource()); err != nil {
		ns.Shutdown()
		return nil, err
	}
	if s.lock, err = lockStore(opts.StoreDir); err != nil {
		ns.Shutdown()
		return nil, err
	}

	debug, trace := log.wants()
	ns.SetLoggerV2(log, debug, trace, false)
	ns.Start()
	if err := log.fatal(); err != nil {
		s.stop()
		return nil, fmt.Errorf("embedded nats-server: %w", err)
	}
	if !ns.ReadyForConnections(10 * time.Second) {
		s.stop()
		return nil, errors.New("embedded nats-server: not ready for connections within 10s of its start")
	}
	if !s.jwt {
		if acc, err := ns.LookupAccount(account); err != nil || !acc.JetStreamEnabled() {
			s.stop()
			return nil, fmt.Errorf("--nats-config %s: account %s, where the leases would be kept, has no JetStream: add `jetstream: enabled` to it", o.ConfigFile, account)
		}
	}
	return s, nil
}

// ClientURL is the URL of the listener for clients, without credentials.
func (s *Server) ClientURL() string { return s.ns.ClientURL() }

// SyncsAlways tells whether every write is on disk before it is acknowledged.
func (s *Server) SyncsAlways() bool {
	c := s.ns.JetStreamConfig()
	return c != nil && c.SyncAlways
}

// Version is the version of nats-server built in, such as 2.15.3.
func (s *Server) Version() string { return server.VERSION }

// NeedsCredentials tells whether Connect needs credentials from its caller, which is so when the
// configuration file names an operator.
func (s *Server) NeedsCredentials() bool { return s.jwt }

// Connect opens an in-process connection as user, one of [Options.Users]; opts come after, and so win
// over, what InProcess sets.
func (s *Server) Connect(user string, opts ...nats.Option) (*nats.Conn, error) {
	all := nats.GetDefaultOptions()
	for _, opt := range append([]nats.Option{s.InProcess(user)}, opts...) {
		if opt == nil {
			continue
		}
		if err := opt(&all); err != nil {
			return nil, fmt.Errorf("in-process connection: %w", err)
		}
	}
	if s.jwt && all.UserJWT == nil {
		return nil, errors.New("in-process connection: the NATS configuration names an operator, so it needs credentials (--creds)")
	}
	nc, err := all.Connect()
	if s.jwt && errors.Is(err, io.ErrClosedPipe) {
		// A pipe has no buffer: a refusal met halfway through long credentials is never read.
		return nil, fmt.Errorf("in-process connection: the server refused the credentials: %w", nats.ErrAuthorization)
	}
	if err != nil {
		return nil, fmt.Errorf("in-process connection: %w", err)
	}
	return nc, nil
}

// InProcess makes nats.Connect use this server without a socket, whatever its URL says, and
// present the credentials made for user.
func (s *Server) InProcess(user string) nats.Option {
	return func(o *nats.Options) error {
		o.InProcessServer = coalesce.InProcess{InProcessConnProvider: s.ns}
		pair := s.users[user]
		if pair == nil {
			return nil
		}
		public, err := pair.PublicKey()
		if err != nil {
			return err
		}
		return nats.Nkey(public, pair.Sign)(o)
	}
}

// Shutdown stops the server and waits until nothing of it runs any more and its store is free for
// another process. When ctx ends first, its error is returned and the stop goes on.
func (s *Server) Shutdown(ctx context.Context) error {
	go s.stop()
	select {
	case <-s.closed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("embedded nats-server: still stopping: %w", ctx.Err())
	}
}

// stop may be called more than once and at the same time; only one call does the work.
func (s *Server) stop() {
	s.ns.Shutdown()
	s.ns.WaitForShutdown()
	s.once.Do(func() {
		s.lock.Close()
		close(s.closed)
	})
}

// serverOptions reads the file and lays the options over it.
func (o Options) serverOptions(log *logger) (*server.Options, error) {
	if o.SyncAlways && o.SyncInterval != 0 {
		return nil, errors.New("--sync: always and an interval exclude each other")
	}
	if o.SyncInterval < 0 {
		return nil, fmt.Errorf("--sync %v: an interval must be positive", o.SyncInterval)
	}
	opts, err := readConfig(o.ConfigFile, log)
	if err != nil {
		return nil, err
	}
	// Without a file name in its options the server refuses to be told to reload over $SYS, which
	// would drop the user added here and skip the checks.
	opts.ConfigFile = ""

	switch {
	case o.Listen != "":
		if opts.Host, opts.Port, err = splitListen(o.Listen); err != nil {
			return nil, fmt.Errorf("--nats-listen %q: %w", o.Listen, err)
		}
	case opts.Host == "" && opts.Port == 0:
		opts.Host, opts.Port, _ = splitListen(DefaultListen)
	}
	if o.StoreDir != "" {
		opts.StoreDir = o.StoreDir
	}
	if opts.StoreDir == "" {
		return nil, errors.New("--store-dir: a directory is needed, here or as jetstream.store_dir in --nats-config")
	}
	if opts.StoreDir, err = filepath.Abs(opts.StoreDir); err != nil {
		return nil, fmt.Errorf("--store-dir: %w", err)
	}
	switch {
	case o.SyncAlways:
		opts.SyncAlways = true
	case o.SyncInterval > 0:
		opts.SyncAlways, opts.SyncInterval = false, o.SyncInterval
	case opts.SyncInterval == 0:
		opts.SyncAlways = true
	}
	if o.ServerName != "" {
		opts.ServerName = o.ServerName
	}
	if opts.MaxPending == 0 {
		opts.MaxPending = maxPending
	}
	opts.JetStream = true
	opts.DisableJetStreamBanner = true
	opts.NoSigs = true
	return opts, nil
}

// listenSource names what decided the client listener, for messages.
func (o Options) listenSource() string {
	if o.Listen != "" || o.ConfigFile == "" {
		return "--nats-listen"
	}
	return "listen in --nats-config"
}

func readConfig(file string, log *logger) (*server.Options, error) {
	opts := &server.Options{}
	if file == "" {
		return opts, nil
	}
	err := opts.ProcessConfigFile(file)
	var details interface {
		Errors() []error
		Warnings() []error
	}
	if errors.As(err, &details) && len(details.Errors()) == 0 {
		for _, w := range details.Warnings() {
			log.Warnf("%v", w)
		}
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("--nats-config %s: %s", file, strings.TrimSpace(err.Error()))
	}
	return opts, nil
}

func splitListen(listen string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(listen)
	if err != nil {
		return "", 0, errors.New("must be host:port")
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, errors.New("the port must be 0 to 65535")
	}
	if n == 0 {
		return host, server.RANDOM_PORT, nil
	}
	return host, int(n), nil
}

// addUsers gives in-process connections users of their own where the file asks for credentials,
// and returns the account they will be in; that is unknown, "", with an operator.
func (s *Server) addUsers(opts *server.Options, o Options) (account string, err error) {
	want := o.Account
	if hasOperator(opts) {
		if want != "" {
			return "", errors.New("--nats-account: with an operator in --nats-config the credentials (--creds) decide the account")
		}
		s.jwt = true
		return "", nil
	}
	acc, err := pickAccount(opts, want)
	if err != nil {
		return "", err
	}
	if !asksForCredentials(opts) {
		if acc != nil && want != "" && acc.Name != globalAccount {
			return "", fmt.Errorf("--nats-account %s: --nats-config has no users, so every connection is in account %s", want, globalAccount)
		}
		return globalAccount, nil
	}
	s.users = map[string]nkeys.KeyPair{}
	for name, permissions := range o.Users {
		pair, err := nkeys.CreateUser()
		if err != nil {
			return "", fmt.Errorf("embedded nats-server: make its user: %w", err)
		}
		public, err := pair.PublicKey()
		if err != nil {
			return "", fmt.Errorf("embedded nats-server: make its user: %w", err)
		}
		s.users[name] = pair
		opts.Nkeys = append(opts.Nkeys, &server.NkeyUser{
			Nkey:                   public,
			Account:                acc,
			Permissions:            permissions,
			AllowedConnectionTypes: map[string]struct{}{jwt.ConnectionTypeInProcess: {}},
		})
		if opts.AuthCallout != nil {
			opts.AuthCallout.AuthUsers = append(opts.AuthCallout.AuthUsers, public)
		}
	}
	if acc == nil {
		return globalAccount, nil
	}
	return acc.Name, nil
}

// pickAccount finds the account of the package comment's rule; nil is the global one.
func pickAccount(opts *server.Options, want string) (*server.Account, error) {
	system := opts.SystemAccount
	if system == "" {
		system = server.DEFAULT_SYSTEM_ACCOUNT
	}
	var names []string
	var last *server.Account
	for _, acc := range opts.Accounts {
		if acc.Name == system {
			continue
		}
		if acc.Name == want {
			return acc, nil
		}
		names = append(names, acc.Name)
		last = acc
	}
	switch {
	case want == globalAccount:
		return nil, nil
	case want != "":
		return nil, fmt.Errorf("--nats-account %s: --nats-config has no such account beside the system account", want)
	case len(names) > 1:
		return nil, fmt.Errorf("--nats-account: --nats-config has the accounts %s; say which one keeps the leases", strings.Join(names, ", "))
	}
	return last, nil
}

// portTaken puts the commonest reason for a failed start in plain words. The server passes that
// reason on as text for some listeners, so text is what is looked at.
func portTaken(message string) error {
	switch {
	case !strings.Contains(message, syscall.EADDRINUSE.Error()):
		return nil
	case strings.HasPrefix(message, "Error listening on port:"):
		return fmt.Errorf("--nats-listen: the port is taken by another process: %s", message)
	default:
		return fmt.Errorf("--nats-config: a port in it is taken by another process: %s", message)
	}
}
