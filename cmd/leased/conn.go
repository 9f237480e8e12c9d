package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/nats-io/jsm.go/natscontext"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// connFlags say how to reach NATS. Every command has them, under the names and
// environment variables of the nats CLI; the last three variables are ours,
// where the nats CLI has none.
type connFlags struct {
	Server   string        `short:"s" group:"connection" env:"NATS_URL" placeholder:"URL" help:"NATS servers, comma separated."`
	Context  string        `group:"connection" env:"NATS_CONTEXT" placeholder:"NAME" help:"Context of the nats CLI, or a context file that ends in .json."`
	Creds    string        `group:"connection" env:"NATS_CREDS" placeholder:"FILE" help:"User credentials."`
	NKey     string        `name:"nkey" group:"connection" env:"NATS_NKEY" placeholder:"FILE" help:"User NKEY seed."`
	User     string        `group:"connection" env:"NATS_USER" placeholder:"USER" help:"User name; without a password, a token."`
	Password string        `group:"connection" env:"NATS_PASSWORD" placeholder:"PASSWORD" help:"Password. A command line can be read by others: better in the environment or a context."`
	Token    string        `group:"connection" env:"NATS_TOKEN" placeholder:"TOKEN" help:"Token; as with a password, better not on the command line."`
	TLSCert  string        `name:"tlscert" group:"connection" env:"NATS_CERT" placeholder:"FILE" help:"TLS client certificate."`
	TLSKey   string        `name:"tlskey" group:"connection" env:"NATS_KEY" placeholder:"FILE" help:"Its private key."`
	TLSCA    string        `name:"tlsca" group:"connection" env:"NATS_CA" placeholder:"FILE" help:"TLS authority that signed the server's certificate."`
	TLSFirst bool          `name:"tlsfirst" group:"connection" help:"Do the TLS handshake before the server's greeting."`
	Timeout  time.Duration `group:"connection" env:"NATS_TIMEOUT" default:"5s" placeholder:"DURATION" help:"How long to wait for a connection and for an answer (default 5s)."`

	JSDomain    string `name:"js-domain" group:"connection" env:"NATS_JS_DOMAIN" placeholder:"DOMAIN" help:"JetStream domain."`
	JSAPIPrefix string `name:"js-api-prefix" group:"connection" env:"NATS_JS_API_PREFIX" placeholder:"PREFIX" help:"Subject prefix of the JetStream API."`
	InboxPrefix string `name:"inbox-prefix" group:"connection" env:"NATS_INBOX_PREFIX" placeholder:"PREFIX" help:"Subject prefix of reply inboxes."`
}

// endpoint is a NATS to connect to, put together from flags, environment and
// context. Only options holds secrets; the rest may be logged.
type endpoint struct {
	urls        string // comma separated, may hold a password: see redact
	options     []nats.Option
	jsDomain    string
	jsAPIPrefix string
}

// external tells whether a NATS was named, and by what, for messages. An empty
// --server or --context on the command line takes back what the environment says.
func (f connFlags) external(given map[string]bool) (by string, ok bool) {
	switch {
	case given["server"] && f.Server != "":
		return "--server", true
	case given["context"] && f.Context != "":
		return "--context", true
	case given["server"] || given["context"]:
		return "", false
	case f.Server != "":
		return "NATS_URL", true
	case f.Context != "":
		return "NATS_CONTEXT", true
	}
	return "", false
}

// resolve puts the endpoint together. What stands on the command line wins over
// the environment, and that over the context; one way to authenticate replaces
// every other of a lower rank. With selected, the context that the nats CLI has
// selected is used where neither a server nor a context is named.
func (f connFlags) resolve(given map[string]bool, selected bool) (endpoint, error) {
	base, err := f.load(selected)
	if err != nil {
		return endpoint{}, err
	}
	who, err := f.credentials(given, base)
	if err != nil {
		return endpoint{}, err
	}
	return f.endpoint(given, base, who)
}

// as is resolve for a connection that has credentials of its own: those of the context
// that flag names, with its certificate and its inbox prefix. All else is as without it.
func (f connFlags) as(given map[string]bool, flag, name string) (endpoint, error) {
	own, err := loadContext(flag, name)
	if err != nil {
		return endpoint{}, err
	}
	base, err := f.load(false)
	if err != nil {
		return endpoint{}, err
	}
	who := credentialsOf(own)
	if who == (credentials{}) {
		if own.Certificate() == "" {
			return endpoint{}, usagef("%s %s: it has no credentials", flag, name)
		}
		if who, err = f.credentials(given, base); err != nil {
			return endpoint{}, err
		}
	}
	if own.Certificate() != "" {
		f.TLSCert, f.TLSKey = own.Certificate(), own.Key()
	}
	f.InboxPrefix = first(own.InboxPrefix(), f.InboxPrefix)
	return f.endpoint(given, base, who)
}

// endpoint is the one that the flags, base and who come to.
func (f connFlags) endpoint(given map[string]bool, base *natscontext.Context, who credentials) (endpoint, error) {
	if err := f.checkFiles(); err != nil {
		return endpoint{}, err
	}
	if f.Timeout <= 0 {
		return endpoint{}, usagef("--timeout %v: must be positive", f.Timeout)
	}
	switch {
	case given["js-domain"] && !given["js-api-prefix"]:
		f.JSAPIPrefix = ""
	case given["js-api-prefix"] && !given["js-domain"]:
		f.JSDomain = ""
	}
	if f.JSDomain != "" && f.JSAPIPrefix != "" {
		return endpoint{}, usagef("--js-domain and --js-api-prefix: give one of them")
	}

	e := endpoint{
		urls:        first(f.Server, base.ServerURL()),
		jsDomain:    f.JSDomain,
		jsAPIPrefix: f.JSAPIPrefix,
	}
	if e.jsDomain == "" && e.jsAPIPrefix == "" {
		e.jsDomain, e.jsAPIPrefix = base.JSDomain(), base.JSAPIPrefix()
	}
	if err := checkURLs(e.urls); err != nil {
		return endpoint{}, err
	}

	cert, key := first(f.TLSCert, base.Certificate()), first(f.TLSKey, base.Key())
	if (cert == "") != (key == "") {
		return endpoint{}, usagef("--tlscert and --tlskey: one needs the other")
	}
	merged := []natscontext.Option{
		natscontext.WithUser(who.user), natscontext.WithPassword(who.password),
		natscontext.WithToken(who.token), natscontext.WithCreds(who.creds), natscontext.WithNKey(who.nkey),
		natscontext.WithUserJWT(who.jwt), natscontext.WithUserSeed(who.seed),
		natscontext.WithCertificate(cert), natscontext.WithKey(key), natscontext.WithCA(first(f.TLSCA, base.CA())),
		natscontext.WithInboxPrefix(first(f.InboxPrefix, base.InboxPrefix())),
		natscontext.WithSocksProxy(base.SocksProxy()),
	}
	if f.TLSFirst || base.TLSHandshakeFirst() {
		merged = append(merged, natscontext.WithTLSHandshakeFirst())
	}
	all, err := natscontext.New("", false, merged...)
	if err != nil {
		return endpoint{}, usagef("NATS connection: %w", err)
	}
	if e.options, err = all.NATSOptions(nats.Timeout(f.Timeout)); err != nil {
		return endpoint{}, usagef("NATS connection: %w", err)
	}
	if by := all.SocksProxy(); by != "" {
		proxied, err := newSocks(by, f.Timeout)
		if err != nil {
			return endpoint{}, usagef("socks_proxy of the context: %w", err)
		}
		e.options = append(e.options, nats.SetCustomDialer(proxied))
	}
	// Options check their files only when they are applied: do it now, where a
	// mistake is still one of the command line.
	probe := nats.GetDefaultOptions()
	for _, option := range e.options {
		if err := option(&probe); err != nil {
			return endpoint{}, usagef("NATS connection: %w", err)
		}
	}
	return e, nil
}

// load reads the context that was named, or an empty one.
func (f connFlags) load(selected bool) (*natscontext.Context, error) {
	name := f.Context
	if name == "" && (!selected || f.Server != "") {
		return natscontext.New("", false)
	}
	return loadContext("--context", name)
}

func loadContext(flag, name string) (*natscontext.Context, error) {
	var c *natscontext.Context
	var err error
	if strings.HasSuffix(name, ".json") {
		c, err = natscontext.NewFromFile(name)
	} else {
		c, err = natscontext.New(name, true)
	}
	if err != nil {
		return nil, usagef("%s %s: %w", flag, name, err)
	}
	return c, nil
}

// credentials is one way to prove who one is; at most one of user, token,
// creds, nkey and jwt is set.
type credentials struct {
	user, password, token, creds, nkey string
	jwt, seed                          string // contexts only
}

func credentialsOf(c *natscontext.Context) credentials {
	return credentials{
		user: c.User(), password: c.Password(), token: c.Token(), creds: c.Creds(), nkey: c.NKey(),
		jwt: c.UserJWT(), seed: c.UserSeed(),
	}
}

// ways names those that are set, as flags or as environment variables.
func (c credentials) ways(env bool) (names []string) {
	for _, way := range []struct{ value, flag, env string }{
		{c.creds, "--creds", "NATS_CREDS"}, {c.nkey, "--nkey", "NATS_NKEY"},
		{c.user, "--user", "NATS_USER"}, {c.token, "--token", "NATS_TOKEN"},
	} {
		switch {
		case way.value == "":
		case env:
			names = append(names, way.env)
		default:
			names = append(names, way.flag)
		}
	}
	return names
}

// credentials picks the way of the highest rank.
func (f connFlags) credentials(given map[string]bool, base *natscontext.Context) (credentials, error) {
	var flags credentials
	for flag, v := range map[string]struct {
		value string
		to    *string
	}{
		"user": {f.User, &flags.user}, "password": {f.Password, &flags.password}, "token": {f.Token, &flags.token},
		"creds": {f.Creds, &flags.creds}, "nkey": {f.NKey, &flags.nkey},
	} {
		if given[flag] {
			*v.to = v.value
		}
	}
	env := credentials{
		user: os.Getenv("NATS_USER"), password: os.Getenv("NATS_PASSWORD"), token: os.Getenv("NATS_TOKEN"),
		creds: os.Getenv("NATS_CREDS"), nkey: os.Getenv("NATS_NKEY"),
	}
	fromContext := credentialsOf(base)

	// A name and its password may come from different places.
	if flags.password != "" && flags.user == "" {
		flags.user = first(env.user, fromContext.user)
	}
	if flags.user != "" && flags.password == "" && (env.user == "" || env.user == flags.user) {
		flags.password = env.password
	}
	if env.password != "" && env.user == "" && len(env.ways(true)) == 0 {
		env.user = fromContext.user
	}

	for i, rank := range []credentials{flags, env} {
		ways := rank.ways(i == 1)
		switch {
		case len(ways) > 1:
			return credentials{}, usagef("%s: give one way to authenticate", strings.Join(ways, " and "))
		case len(ways) == 0 && rank.password != "":
			return credentials{}, usagef("--password (NATS_PASSWORD): needs --user (NATS_USER)")
		case len(ways) == 0:
			continue
		}
		if rank.user == "" {
			rank.password = ""
		} else if rank.password == "" {
			rank.user, rank.token = "", rank.user
		}
		return rank, nil
	}
	return fromContext, nil
}

// checkFiles finds files that are not there, and credentials that are none,
// before anything starts. What is in them never becomes part of an error.
func (f connFlags) checkFiles() error {
	for _, file := range []struct {
		flag, path string
		parse      func([]byte) error
	}{
		{"--creds", f.Creds, userSeed}, {"--nkey", f.NKey, userSeed},
		{"--tlscert", f.TLSCert, nil}, {"--tlskey", f.TLSKey, nil}, {"--tlsca", f.TLSCA, nil},
	} {
		// Other schemes (op://, env://, ...) belong to the contexts' resolvers.
		if file.path == "" || strings.Contains(file.path, "://") {
			continue
		}
		text, err := os.ReadFile(file.path)
		if err != nil {
			return usagef("%s: %w", file.flag, err)
		}
		if file.parse != nil {
			if err := file.parse(text); err != nil {
				return usagef("%s %s: %w", file.flag, file.path, err)
			}
		}
	}
	return nil
}

func userSeed(text []byte) error {
	if _, err := nkeys.ParseDecoratedUserNKey(text); err != nil {
		return errors.New("no user NKEY seed in it")
	}
	return nil
}

// checkURLs refuses what nats.go would refuse, without repeating passwords.
func checkURLs(urls string) error {
	for u := range strings.SplitSeq(urls, ",") {
		u = strings.TrimSpace(u)
		if !strings.Contains(u, "://") {
			u = "nats://" + u
		}
		parsed, err := url.Parse(u)
		if err != nil || parsed.Hostname() == "" {
			return usagef("--server %s: must be host, host:port or a URL", afterUser(u))
		}
		switch parsed.Scheme {
		case "nats", "tls", "ws", "wss":
		default:
			return usagef("--server %s: the scheme must be nats, tls, ws or wss", afterUser(u))
		}
	}
	return nil
}

// redact takes user, password and token out of comma-separated URLs.
func redact(urls string) string {
	parts := strings.Split(urls, ",")
	for i, u := range parts {
		parts[i] = afterUser(strings.TrimSpace(u))
	}
	return strings.Join(parts, ",")
}

func afterUser(u string) string {
	at := strings.LastIndexByte(u, '@')
	if at < 0 {
		return u
	}
	scheme := ""
	if before, _, ok := strings.Cut(u, "://"); ok {
		scheme = before + "://"
	}
	return scheme + u[at+1:]
}

// connect makes a connection with no retries: for commands that ask and end.
func (e endpoint) connect(ctx context.Context, name string, options ...nats.Option) (*nats.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	nc, err := nats.Connect(e.urls, append(append([]nats.Option{nats.Name(name)}, e.options...), options...)...)
	switch {
	case err == nil:
		return nc, nil
	case authError(err):
		return nil, &exitError{exitNotPermitted, fmt.Errorf("NATS at %s: %w", redact(e.urls), err)}
	default:
		return nil, &exitError{exitNoService, fmt.Errorf("NATS at %s: %w", redact(e.urls), err)}
	}
}

// authError tells whether NATS refused who we are.
func authError(err error) bool {
	for _, known := range []error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}
