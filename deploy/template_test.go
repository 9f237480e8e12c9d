package deploy

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/leased/leased/internal/testnats"
)

// TestTemplate: with the permissions that docs/OPERATING.md gives for a scoped signing key,
// each user has the inbox of the holder that it is named like, and no other.
func TestTemplate(t *testing.T) {
	pair := func(make func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
		t.Helper()
		kp, err := make()
		if err != nil {
			t.Fatal(err)
		}
		public, err := kp.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		return kp, public
	}
	encode := func(c jwt.Claims, by nkeys.KeyPair) string {
		t.Helper()
		text, err := c.Encode(by)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	operator, operatorID := pair(nkeys.CreateOperator)
	_, accountID := pair(nkeys.CreateAccount)
	signer, signerID := pair(nkeys.CreateAccount)
	scope := jwt.NewUserScope()
	scope.Key, scope.Role = signerID, "worker"
	scope.Template.Pub.Allow = jwt.StringList{"api.leases.owner"}
	scope.Template.Sub.Allow = jwt.StringList{"_INBOX.{{name()}}.>", "dagnats.lease.changed.>", "dagnats.lease.inbox.{{name()}}.>"}
	scope.Template.Resp = &jwt.ResponsePermission{MaxMsgs: 1, Expires: 35 * time.Second}
	account := jwt.NewAccountClaims(accountID)
	account.SigningKeys.AddScopedSigner(scope)
	_, systemID := pair(nkeys.CreateAccount)
	node := testnats.Server(t, testnats.WithoutJetStream, func(o *server.Options) {
		if err := o.ProcessConfigString(fmt.Sprintf("operator: %s, system_account: %s, resolver: MEMORY, resolver_preload { %s: %s, %s: %s }",
			encode(jwt.NewOperatorClaims(operatorID), operator), systemID, accountID, encode(account, operator),
			systemID, encode(jwt.NewAccountClaims(systemID), operator))); err != nil {
			t.Fatal(err)
		}
	})
	user, userID := pair(nkeys.CreateUser)
	claims := jwt.NewUserClaims(userID)
	claims.Name, claims.IssuerAccount = "worker-7", accountID
	claims.SetScoped(true)
	refused := make(chan string, 10)
	text := encode(claims, signer)
	nc := node.Connect(nats.UserJWT(func() (string, error) { return text, nil }, user.Sign),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err.Error() }))
	for _, subject := range []string{"dagnats.lease.inbox.worker-7.>", "_INBOX.worker-7.>", "dagnats.lease.changed.>", "dagnats.lease.inbox.worker-8.>", "dagnats.lease.inbox.*.>", "_INBOX.worker-8.>"} {
		if _, err := nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dagnats.lease.inbox.worker-8.>", "dagnats.lease.inbox.*.>", "_INBOX.worker-8.>"} {
		select {
		case got := <-refused:
			if got != fmt.Sprintf(`nats: permissions violation: Permissions Violation for Subscription to "%s"`, want) {
				t.Errorf("refused: %s, want %s", got, want)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("not refused: %s", want)
		}
	}
}
