package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{key: must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key))
	a.cert = must[*x509.Certificate](t)(x509.ParseCertificate(der))
	a.file = filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, a.file, "CERTIFICATE", der)
	return a
}

// issue writes a certificate for 127.0.0.1 that serves both ends.
func (a *authority) issue(t *testing.T, certFile, keyFile string) {
	t.Helper()
	key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "leased"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key))
	writePEM(t, certFile, "CERTIFICATE", der)
	writePEM(t, keyFile, "PRIVATE KEY", must[[]byte](t)(x509.MarshalPKCS8PrivateKey(key)))
}

func (a *authority) client(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	a.issue(t, certFile, keyFile)
	return certFile, keyFile
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// realm is an operator with one account that has JetStream.
type realm struct {
	conf    string // of a nats-server that trusts it
	account nkeys.KeyPair
}

func newRealm(t *testing.T) realm {
	t.Helper()
	operator := must[nkeys.KeyPair](t)(nkeys.CreateOperator())
	claims := jwt.NewOperatorClaims(must[string](t)(operator.PublicKey()))
	operatorJWT := must[string](t)(claims.Encode(operator))
	account := func(jetStream bool) (nkeys.KeyPair, string, string) {
		pair := must[nkeys.KeyPair](t)(nkeys.CreateAccount())
		public := must[string](t)(pair.PublicKey())
		claims := jwt.NewAccountClaims(public)
		if jetStream {
			claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
		}
		return pair, public, must[string](t)(claims.Encode(operator))
	}
	pair, public, text := account(true)
	_, system, systemText := account(false)
	return realm{account: pair, conf: fmt.Sprintf("operator: %s, system_account: %s, resolver: MEMORY, resolver_preload { %s: %s, %s: %s }",
		operatorJWT, system, public, text, system, systemText)}
}

// creds is the text of a credentials file for a new user of the account.
func (r realm) creds(t *testing.T) string {
	t.Helper()
	user := must[nkeys.KeyPair](t)(nkeys.CreateUser())
	claims := jwt.NewUserClaims(must[string](t)(user.PublicKey()))
	text := must[string](t)(claims.Encode(r.account))
	return string(must[[]byte](t)(jwt.FormatUserConfig(text, must[[]byte](t)(user.Seed()))))
}

func testCreds(t *testing.T) string { return newRealm(t).creds(t) }

func testSeed(t *testing.T) string {
	user := must[nkeys.KeyPair](t)(nkeys.CreateUser())
	return string(must[[]byte](t)(user.Seed()))
}

func publicKey(t *testing.T, seed string) string {
	t.Helper()
	pair := must[nkeys.KeyPair](t)(nkeys.FromSeed([]byte(seed)))
	return must[string](t)(pair.PublicKey())
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	return string(must[[]byte](t)(os.ReadFile(path)))
}

func overwrite(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
