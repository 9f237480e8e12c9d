package embedded

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/bcrypt"
)

// whoami asks the server which account and user a connection has.
func whoami(t *testing.T, nc *nats.Conn) (account, user string) {
	t.Helper()
	msg, err := nc.Request("$SYS.REQ.USER.INFO", nil, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		Data struct{ Account, User string }
	}
	if err := json.Unmarshal(msg.Data, &info); err != nil {
		t.Fatal(err)
	}
	return info.Data.Account, info.Data.User
}

// TestInProcessConnection: whatever the file asks of clients, the in-process connection works, is
// in the account that the package comment says, and opens the door to nobody else.
func TestInProcessConnection(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, key := certificate(t)
	tls := fmt.Sprintf("cert_file: %q, key_file: %q, ca_file: %q", cert, key, cert)
	user := []nats.Option{nats.UserInfo("a", "secret")}
	rootCA := nats.RootCAs(cert)

	for name, c := range map[string]struct {
		conf    string
		account string // option
		want    string // account of the in-process connection
		known   []nats.Option
		open    bool // a stranger may connect
	}{
		"no file":         {want: "$G", open: true},
		"nothing of auth": {conf: `max_payload: 65536`, want: "$G", open: true},
		"token":           {conf: `authorization { token: secret }`, want: "$G", known: []nats.Option{nats.Token("secret")}},
		"one user":        {conf: `authorization { user: a, password: secret }`, want: "$G", known: user},
		"one user bcrypt": {conf: fmt.Sprintf(`authorization { user: a, password: %q }`, hash), want: "$G", known: user},
		"users":           {conf: `authorization { users: [{user: a, password: secret}] }`, want: "$G", known: user},
		"default permissions": {conf: `authorization { default_permissions { publish: "nothing", subscribe: "_INBOX.>" }, users: [{user: a, password: secret}] }`,
			want: "$G", known: user},
		"nkeys":                   {conf: fmt.Sprintf(`authorization { users: [{nkey: %s}] }`, public), want: "$G", known: []nats.Option{nats.Nkey(public, pair.Sign)}},
		"one account":             {conf: `accounts { A { jetstream: on, users: [{user: a, password: secret}] } }`, want: "A", known: user},
		"one account and a user":  {conf: `accounts { A { jetstream: on } }, authorization { users: [{user: a, password: secret}] }`, want: "A", known: user},
		"one account and system":  {conf: `system_account: S, accounts { A { jetstream: on, users: [{user: a, password: secret}] }, S { users: [{user: s, password: s}] } }`, want: "A", known: user},
		"one account and $SYS":    {conf: `accounts { A { jetstream: on, users: [{user: a, password: secret}] }, $SYS { users: [{user: s, password: s}] } }`, want: "A", known: user},
		"system account only":     {conf: `accounts { $SYS { users: [{user: a, password: secret}] } }`, want: "$G", known: user, open: true},
		"named among two":         {conf: `accounts { A { jetstream: on, users: [{user: a, password: secret}] }, B { jetstream: on } }`, account: "B", want: "B", known: user},
		"named $G":                {conf: `authorization { token: secret }`, account: "$G", want: "$G", known: []nats.Option{nats.Token("secret")}},
		"no_auth_user":            {conf: `no_auth_user: a, accounts { A { jetstream: on, users: [{user: a, password: secret}] } }`, want: "A", known: user, open: true},
		"no_auth_user elsewhere":  {conf: `no_auth_user: b, accounts { A { jetstream: on, users: [{user: a, password: secret}] }, B { users: [{user: b, password: b}] } }`, account: "A", want: "A", known: user, open: true},
		"tls":                     {conf: `tls { ` + tls + ` }, authorization { token: secret }`, want: "$G", known: []nats.Option{rootCA, nats.Token("secret")}},
		"tls without auth":        {conf: `tls { ` + tls + ` }`, want: "$G", known: []nats.Option{rootCA}},
		"tls first":               {conf: `tls { handshake_first: true, ` + tls + ` }`, want: "$G", known: []nats.Option{rootCA, nats.TLSHandshakeFirst()}},
		"tls verify":              {conf: `tls { verify: true, ` + tls + ` }`, want: "$G", known: []nats.Option{rootCA, nats.ClientCert(cert, key)}},
		"tls verify_and_map":      {conf: `tls { verify_and_map: true, ` + tls + ` }, authorization { users: [{user: "localhost"}] }`, want: "$G", known: []nats.Option{rootCA, nats.ClientCert(cert, key)}},
		"auth callout, no answer": {conf: `accounts { A { jetstream: on, users: [{user: a, password: secret}] } }, authorization { timeout: 1, auth_callout { issuer: ` + accountKey(t) + `, account: A, auth_users: [a] } }`, want: "A", known: user},
		"websocket's own user":    {conf: `websocket { port: -1, host: 127.0.0.1, no_tls: true, authorization { username: w, password: w } }`, want: "$G", open: true},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Account: c.account}
			if c.conf != "" {
				o.ConfigFile = writeFile(t, c.conf)
			}
			s := start(t, o)
			nc := connect(t, s)
			account, me := whoami(t, nc)
			if account != c.want {
				t.Errorf("in account %q, want %q", account, c.want)
			}
			put(t, nc)

			if c.known != nil {
				known, err := nats.Connect(s.ClientURL(), c.known...)
				if err != nil {
					t.Fatalf("a client that the file knows: %v", err)
				}
				known.Close()
			}
			stranger, err := nats.Connect(s.ClientURL())
			if err == nil {
				stranger.Close()
			}
			if open := err == nil; open != c.open {
				t.Errorf("open to a client without credentials: %v, want %v (%v)", open, c.open, err)
			}
			if pair := s.users[all]; pair != nil {
				thief, err := nats.Connect(s.ClientURL(), rootCA, nats.Nkey(me, pair.Sign))
				if err == nil {
					thief.Close()
					t.Error("the internal user is accepted from outside the process")
				}
			}
			// A reconnect goes the same way.
			if err := nc.ForceReconnect(); err != nil {
				t.Fatal(err)
			}
			if err := nc.Flush(); err != nil {
				t.Fatal(err)
			}
			if account, _ := whoami(t, nc); account != c.want {
				t.Errorf("after a reconnect in account %q", account)
			}
		})
	}
}

// TestOperator: with an operator the caller's credentials decide.
func TestOperator(t *testing.T) {
	conf, creds := operator(t)
	conf += `, write_deadline: "500ms"`
	s := start(t, Options{ConfigFile: writeFile(t, conf)})
	if !s.NeedsCredentials() {
		t.Error("NeedsCredentials is false")
	}
	_, err := s.Connect(all)
	if err == nil || !strings.Contains(err.Error(), "--creds") {
		t.Errorf("without credentials: %v", err)
	}
	put(t, connect(t, s, nats.UserCredentials(creds)))

	_, foreign := operator(t)
	if _, err := s.Connect(all, nats.UserCredentials(foreign)); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("with another operator's credentials: %v", err)
	}

	_, err = Start(Options{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), ConfigFile: writeFile(t, conf), Account: "A"})
	if err == nil || !strings.Contains(err.Error(), "--nats-account") {
		t.Errorf("an account named beside an operator: %v", err)
	}
}

// TestNoReloadFromOutside: a reload would drop the internal user and what the options set.
func TestNoReloadFromOutside(t *testing.T) {
	s := start(t, Options{ConfigFile: writeFile(t, `accounts { A { jetstream: on, users: [{user: a, password: a}] }, $SYS { users: [{user: s, password: s}] } }`)})
	sys, err := nats.Connect(s.ClientURL(), nats.UserInfo("s", "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close()
	reply, err := sys.Request("$SYS.REQ.SERVER."+s.ns.ID()+".RELOAD", nil, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(reply.Data), "can only reload config when a file is provided") {
		t.Errorf("a reload from outside was answered %s", reply.Data)
	}
	put(t, connect(t, s))
}

func TestExposure(t *testing.T) {
	cert, key := certificate(t)
	tls := fmt.Sprintf("cert_file: %q, key_file: %q, ca_file: %q", cert, key, cert)
	conf, _ := operator(t)
	const (
		wide  = `listen: "0.0.0.0:4222", `
		local = `listen: "127.0.0.1:4222", `
		users = `authorization { users: [{user: a, password: b}] }, `
		wuser = `authorization { username: a, password: b } `
	)
	for name, c := range map[string]struct {
		listen  string
		conf    string
		refused string // what the refusal must name; "" is accepted
	}{
		"default":            {},
		"loopback 4":         {listen: "127.0.0.9:4222"},
		"loopback 6":         {listen: "[::1]:4222"},
		"localhost":          {listen: "localhost:4222"},
		"flag any 4":         {listen: "0.0.0.0:0", refused: "--nats-listen: 0.0.0.0:0"},
		"flag any 6":         {listen: "[::]:4222", refused: "--nats-listen: [::]:4222"},
		"flag empty":         {listen: ":4222", refused: "--nats-listen"},
		"flag address":       {listen: "192.0.2.1:4222", refused: "--nats-listen: 192.0.2.1:4222"},
		"flag mapped":        {listen: "[::ffff:0.0.0.0]:4222", refused: "--nats-listen"},
		"flag unresolvable":  {listen: "no-such-host.invalid:4222", refused: "cannot be resolved"},
		"flag over file":     {listen: "0.0.0.0:4222", conf: local, refused: "--nats-listen"},
		"file over nothing":  {conf: wide, refused: "listen in --nats-config: 0.0.0.0:4222"},
		"loopback flag wins": {listen: "127.0.0.1:0", conf: wide},
		"file port only":     {conf: `port: 4223`, refused: "listen in --nats-config: 0.0.0.0:4223"},
		"file host only":     {conf: `host: "0.0.0.0"`, refused: "listen in --nats-config: 0.0.0.0:4222"},
		"file says nothing":  {conf: `max_payload: 65536`},

		"users":                     {conf: wide + users},
		"flag with users":           {listen: "0.0.0.0:4222", conf: users},
		"one user":                  {conf: wide + `authorization { user: a, password: b }`},
		"token":                     {conf: wide + `authorization { token: t }`},
		"accounts":                  {conf: wide + `accounts { A { users: [{user: a, password: b}] } }`},
		"operator":                  {conf: wide + conf},
		"tls alone":                 {conf: wide + `tls { ` + tls + ` }`, refused: "listen"},
		"tls verify":                {conf: wide + `tls { verify: true, ` + tls + ` }`},
		"tls verify, plain allowed": {conf: wide + `allow_non_tls: true, tls { verify: true, ` + tls + ` }`, refused: "listen"},
		"no_auth_user":              {conf: wide + users + `no_auth_user: a`, refused: "listen"},
		"system account only":       {conf: wide + `accounts { $SYS { users: [{user: a, password: b}] } }`, refused: "listen"},
		"accounts without users":    {conf: wide + `accounts { A { jetstream: on } }`, refused: "listen"},
		"empty authorization":       {conf: wide + `authorization { timeout: 1 }`, refused: "listen"},

		"websocket":              {conf: local + `websocket { port: 8080, no_tls: true }`, refused: "websocket"},
		"websocket local":        {conf: local + `websocket { listen: "127.0.0.1:8080", no_tls: true }`},
		"websocket users":        {conf: local + users + `websocket { port: 8080, no_tls: true }`},
		"websocket own":          {conf: local + `websocket { port: 8080, no_tls: true, ` + wuser + ` }`},
		"websocket no_auth_user": {conf: local + users + `websocket { port: 8080, no_tls: true, no_auth_user: a }`, refused: "websocket"},
		"websocket tls verify":   {conf: local + `websocket { port: 8080, tls { verify: true, ` + tls + ` } }`},
		"websocket random":       {conf: local + `websocket { port: -1, no_tls: true }`, refused: "websocket"},
		"mqtt":                   {conf: local + `server_name: n, mqtt { port: 1883 }`, refused: "mqtt"},
		"mqtt own":               {conf: local + `server_name: n, mqtt { port: 1883, ` + wuser + ` }`},
		"mqtt no_auth_user":      {conf: local + users + `server_name: n, mqtt { port: 1883, no_auth_user: a }`, refused: "mqtt"},
		"leafnodes":              {conf: local + `leafnodes { port: 7422 }`, refused: "leafnodes"},
		"leafnodes local":        {conf: local + `leafnodes { listen: "127.0.0.1:7422" }`},
		"leafnodes own":          {conf: local + `leafnodes { port: 7422, authorization { user: a, password: b } }`},
		"leafnodes own users":    {conf: local + `leafnodes { port: 7422, authorization { users: [{user: a, password: b}] } }`},
		"leafnodes users":        {conf: local + users + `leafnodes { port: 7422 }`},
		"leafnodes no_auth_user": {conf: local + users + `no_auth_user: a, leafnodes { port: 7422 }`, refused: "leafnodes"},
		"cluster":                {conf: local + users + `server_name: n, cluster { name: c, port: 6222 }`, refused: "cluster"},
		"cluster local":          {conf: local + `server_name: n, cluster { name: c, listen: "127.0.0.1:6222" }`},
		"cluster own":            {conf: local + `server_name: n, cluster { name: c, port: 6222, authorization { user: a, password: b } }`},
		"cluster tls":            {conf: local + `server_name: n, cluster { name: c, port: 6222, tls { ` + tls + ` } }`},
		"gateway":                {conf: local + users + `server_name: n, gateway { name: g, port: 7222 }`, refused: "gateway"},
		"gateway own":            {conf: local + `server_name: n, gateway { name: g, port: 7222, authorization { user: a, password: b } }`},
		"monitoring":             {conf: local + users + `http: "0.0.0.0:8222"`, refused: "http in"},
		"monitoring follows":     {conf: wide + users + `http_port: 8222`, refused: "http in"},
		"monitoring local":       {conf: wide + users + `http: "127.0.0.1:8222"`},
		"monitoring tls":         {conf: local + users + `https: "0.0.0.0:8222", tls { verify: true, ` + tls + ` }`, refused: "https in"},
		"profiling":              {conf: wide + users + `prof_port: 6060`, refused: "prof_port"},
		"profiling local":        {conf: local + `prof_port: 6060`},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Listen: c.listen, StoreDir: t.TempDir()}
			if c.conf != "" {
				o.ConfigFile = writeFile(t, c.conf)
			}
			// As Start does, but without opening anything.
			opts, err := o.serverOptions(newLogger(nil))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := new(Server).addUsers(opts, o); err != nil {
				t.Fatal(err)
			}
			ns, err := server.NewServer(opts)
			if err != nil {
				t.Fatal(err)
			}
			defer ns.Shutdown()
			err = checkExposure(opts, o.listenSource())
			switch {
			case err == nil && c.refused != "":
				t.Error("accepted")
			case err != nil && c.refused == "":
				t.Errorf("refused: %v", err)
			case err != nil && (!strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), "authentication")):
				t.Errorf("the refusal %q does not name %q and the rule", err, c.refused)
			case err != nil:
				t.Log(err)
				if _, err := Start(o); err == nil {
					t.Error("Start accepted it")
				}
			}
		})
	}
}

// certificate makes a certificate for localhost and 127.0.0.1 that is its own authority.
func certificate(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "localhost"},
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IsCA:         true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: der},
		keyFile:  {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func accountKey(t *testing.T) string {
	t.Helper()
	kp, err := nkeys.CreateAccount()
	if err != nil {
		t.Fatal(err)
	}
	public, err := kp.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return public
}

// operator makes an operator, one account with JetStream and a user in it: the configuration that
// trusts them and the user's credentials file.
func operator(t *testing.T) (conf, creds string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	okp, err := nkeys.CreateOperator()
	must(err)
	opub, err := okp.PublicKey()
	must(err)
	ojwt, err := jwt.NewOperatorClaims(opub).Encode(okp)
	must(err)

	account := func(jetStream bool) (nkeys.KeyPair, string, string) {
		kp, err := nkeys.CreateAccount()
		must(err)
		pub, err := kp.PublicKey()
		must(err)
		claims := jwt.NewAccountClaims(pub)
		if jetStream {
			claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
		}
		text, err := claims.Encode(okp)
		must(err)
		return kp, pub, text
	}
	akp, apub, ajwt := account(true)
	_, spub, sjwt := account(false)

	ukp, err := nkeys.CreateUser()
	must(err)
	upub, err := ukp.PublicKey()
	must(err)
	ujwt, err := jwt.NewUserClaims(upub).Encode(akp)
	must(err)
	seed, err := ukp.Seed()
	must(err)
	text, err := jwt.FormatUserConfig(ujwt, seed)
	must(err)
	creds = filepath.Join(t.TempDir(), "user.creds")
	must(os.WriteFile(creds, text, 0o600))
	return fmt.Sprintf("operator: %s, system_account: %s, resolver: MEMORY, resolver_preload { %s: %s, %s: %s }", ojwt, spub, apub, ajwt, spub, sjwt), creds
}
