package hostile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// stage is a running system with the shipped permissions.
type stage struct {
	t         testing.TB
	topology  string
	length    time.Duration
	roles     map[string]role
	outsiders []role
	urls      []string // of the servers, without a user
	services  []*testnats.Service
	servers   *testnats.Processes // r3 only
	rejoin    chan struct{}       // has the last instance leave and join again
	judge     *judge
	honest    *honest
}

// newStage starts the servers and two instances.
func newStage(t testing.TB, topology string, length time.Duration) *stage {
	t.Helper()
	s := &stage{t: t, topology: topology, length: length, rejoin: make(chan struct{})}
	var conf string
	s.roles, conf = shipped(t)
	s.outsiders = outsiders(s.roles)
	switch topology {
	case "embedded":
		file := filepath.Join(t.TempDir(), "nats.conf")
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			t.Fatal(err)
		}
		listen := fmt.Sprintf("127.0.0.1:%d", testnats.FreePort(t))
		s.urls = []string{"nats://" + listen}
		s.services = append(s.services, testnats.Leased(t, "serve", "--nats-listen", listen, "--nats-config", file,
			"--store-dir", filepath.Join(t.TempDir(), "store"), "--http-listen", "127.0.0.1:0"))
	case "r3":
		s.servers = testnats.ChildCluster(t, 3, testnats.ChildOptions{Sync: "always", User: judgeRole.userinfo(), Config: conf})
		for _, url := range s.servers.URLs() {
			s.urls = append(s.urls, strings.Replace(url, judgeRole.userinfo().String()+"@", "", 1))
		}
	default:
		t.Fatalf("-hostile.topology %q: must be embedded or r3", topology)
	}
	replicas := fmt.Sprint(len(s.urls))
	for len(s.services) < 2 {
		s.services = append(s.services, testnats.Leased(t, append([]string{"serve", "--server", strings.Join(s.urls, ","),
			"--replicas", replicas, "--http-listen", "127.0.0.1:0"}, s.serviceUser()...)...))
	}
	return s
}

// serviceUser are the flags with which an instance shows who each of its connections is.
func (s *stage) serviceUser() []string {
	own := func(name string) string {
		r := s.roles[name]
		text, err := json.Marshal(map[string]string{"user": r.name, "password": r.password, "inbox_prefix": r.inbox})
		file := filepath.Join(s.t.TempDir(), name+".json")
		if err := errors.Join(err, os.WriteFile(file, text, 0o600)); err != nil {
			s.t.Fatal(err)
		}
		return file
	}
	r := s.roles["leased"]
	return []string{"--user", r.name, "--password", r.password, "--inbox-prefix", r.inbox,
		"--front-context", own("leased-front"), "--hop-context", own("leased-hop")}
}

// options are those of a connection of r whose inboxes are told from all others by
// its name.
func options(r role, name string) []nats.Option {
	return []nats.Option{
		nats.Name(name), nats.UserInfo(r.name, r.password), nats.CustomInboxPrefix(r.inbox + "." + name),
		nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond), nats.ReconnectBufSize(-1), nats.Timeout(5 * time.Second),
	}
}

// connect opens a connection; what the server refuses it counts in t. It is nil
// when there is none, which is counted too.
func (s *stage) connect(r role, name string, t *tally) *nats.Conn {
	nc, err := nats.Connect(strings.Join(s.urls, ","), append(options(r, name), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		switch {
		case errors.Is(err, nats.ErrPermissionViolation):
			t.end("not permitted")
		default:
			t.end("connection error")
		}
	}))...)
	if err != nil {
		t.end("not connected")
		return nil
	}
	return nc
}
