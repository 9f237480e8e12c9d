package hostile

import (
	"cmp"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// role is a user of deploy/permissions.conf.
type role struct {
	name, password string
	inbox          string // what its inboxes begin with
	may            *server.Permissions
}

// hears says whether the role may subscribe to subject.
func (r role) hears(subject string) bool {
	return r.may == nil || r.may.Subscribe == nil || slices.ContainsFunc(r.may.Subscribe.Allow, func(allowed string) bool { return covers(allowed, subject) })
}

// sends says whether the role may publish on subject.
func (r role) sends(subject string) bool {
	return r.may == nil || r.may.Publish == nil || slices.ContainsFunc(r.may.Publish.Allow, func(allowed string) bool { return covers(allowed, subject) })
}

// covers says whether every subject of inner is one of outer.
func covers(outer, inner string) bool {
	o, i := strings.Split(outer, "."), strings.Split(inner, ".")
	for n, token := range o {
		switch {
		case token == ">":
			return len(i) > n
		case n >= len(i), token != "*" && token != i[n], i[n] == ">":
			return false
		}
	}
	return len(o) == len(i)
}

// judgeRole is a user of the test's own that may do anything.
var judgeRole = role{name: "judge", password: "judge-only", inbox: "_JUDGE"}

// ownerRole is whom the permissions let take forwards, and honestRole stands for many of
// these, one for each holder id of the honest: they are many and change, so one user has
// the inboxes of all. No attacker is one of them.
const ownerRole, honestRole = "worker-1", "honest"

// shipped are the users of deploy/permissions.conf, and the text of it with their
// passwords set and the judge and the honest as two more.
func shipped(t testing.TB) (roles map[string]role, conf string) {
	t.Helper()
	text, err := os.ReadFile("../../deploy/permissions.conf")
	if err != nil {
		t.Fatal(err)
	}
	set := regexp.MustCompile(`\$([A-Z0-9_]+_PASSWORD)`).ReplaceAllFunc(text, func(name []byte) []byte {
		return []byte(strings.ToLower(string(name[1:])) + "-of-the-test")
	})
	users := regexp.MustCompile(`users\s*[:=]?\s*\[`)
	if n := len(users.FindAll(set, -1)); n != 1 {
		t.Fatalf("deploy/permissions.conf has %d lists of users, not one", n)
	}
	owner := regexp.MustCompile(`(?s)\{ user: ` + ownerRole + `,.*?\n    \} \}`).Find(set)
	if owner == nil {
		t.Fatalf("deploy/permissions.conf has no user %s", ownerRole)
	}
	honest := strings.ReplaceAll(strings.ReplaceAll(string(owner), "lease.inbox."+ownerRole+".>", "lease.inbox.*.>"), ownerRole, honestRole)
	set = users.ReplaceAllFunc(set, func(list []byte) []byte {
		return fmt.Appendf(nil, "%s\n    { user: %s, password: %q }\n    %s", list, judgeRole.name, judgeRole.password, honest)
	})
	file := filepath.Join(t.TempDir(), "permissions.conf")
	if err := os.WriteFile(file, set, 0o600); err != nil {
		t.Fatal(err)
	}
	var o server.Options
	if err := o.ProcessConfigFile(file); err != nil {
		t.Fatalf("deploy/permissions.conf: %v", err)
	}
	roles = map[string]role{}
	for _, u := range o.Users {
		r := role{name: u.Username, password: u.Password, inbox: "_INBOX", may: u.Permissions}
		if u.Permissions != nil && u.Permissions.Subscribe != nil {
			for _, subject := range u.Permissions.Subscribe.Allow {
				if strings.HasPrefix(subject, "_INBOX") {
					r.inbox = strings.TrimRight(subject, ".>*")
				}
			}
		}
		roles[r.name] = r
	}
	for _, name := range []string{"leased", "leased-front", "leased-hop", "holder", ownerRole, "watcher"} {
		if _, ok := roles[name]; !ok {
			t.Fatalf("deploy/permissions.conf has no user %s", name)
		}
	}
	delete(roles, judgeRole.name)
	return roles, string(set)
}

// outsiders are the roles of people, the service's own aside.
func outsiders(roles map[string]role) (all []role) {
	for _, r := range roles {
		if !strings.HasPrefix(r.name, "leased") && r.name != honestRole {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b role) int { return cmp.Compare(a.name, b.name) })
	return all
}

func (r role) userinfo() *url.Userinfo { return url.UserPassword(r.name, r.password) }

func TestRoles(t *testing.T) {
	roles, _ := shipped(t)
	watcher, leased := roles["watcher"], roles["leased"]
	for _, subject := range []string{"$KV.leases.k", "api.leases.evict", "$JS.API.STREAM.PURGE.KV_leases"} {
		if watcher.sends(subject) {
			t.Errorf("watcher may publish on %s", subject)
		}
	}
	if !watcher.sends("api.leases.owner") || !roles["leased-front"].hears("api.leases.acquire") || leased.hears("api.leases.acquire") || watcher.hears(">") || watcher.hears("api.leases.*") {
		t.Errorf("the permissions are not read as they are written")
	}
}
