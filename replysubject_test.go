package leased

import "testing"

func TestReplySubjects(t *testing.T) {
	rule := newReplySubjects(Options{APIPrefix: "api.leases", EventPrefix: "dagnats.lease", JSAPIPrefix: "hub.API"})
	for subject, want := range map[string]bool{
		"_INBOX.a.b":                     true,
		"_INBOX.a":                       true,
		"mine":                           true,
		"team.inbox.7":                   true,
		"_R_.Zb3.x1":                     true, // a service import of another account
		"_GR_.c.s.x1":                    true, // through a gateway
		"_INBOX_leased.x":                true, // the caller may be configured like the service
		"api.leasesx.owner":              true,
		"api":                            true,
		"dagnats.leases.x":               true,
		"a*b.c>":                         true, // no wildcards: these are letters here
		"x.$KV.leases.k":                 true, // NATS' own subjects begin with the $
		"hub":                            true,
		"":                               false,
		"$KV.leases.victim":              false,
		"$":                              false,
		"$JS.API.STREAM.INFO":            false,
		"$SRV.PING":                      false,
		"api.leases":                     false,
		"api.leases.evict":               false,
		"dagnats.lease":                  false,
		"dagnats.lease.changed.k":        false,
		"dagnats.lease.inbox.h.k":        false,
		"hub.API.STREAM.PURGE.KV_leases": false,
		"hub.API.$KV.leases.victim":      false,
		"*":                              false,
		">":                              false,
		"_INBOX.*":                       false,
		"_INBOX.>":                       false,
		"_INBOX.*.b":                     false,
		"_INBOX..b":                      false,
		".a":                             false,
		"a.":                             false,
		"a b":                            false,
		"a\r\nPUB $KV.leases.victim 0":   false,
		"a\tb":                           false,
	} {
		if got := rule.allow(subject); got != want {
			t.Errorf("%q: allowed %v, want %v", subject, got, want)
		}
	}
}
