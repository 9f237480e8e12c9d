package leased

import "strings"

// replySubjects says where a reply may go. The caller names the subject, and the reply is
// published with the rights of the service: without this rule whoever may ask anything at
// all could have a lease overwritten, an owner sent something, or JetStream given an order.
type replySubjects struct {
	own []string // prefixes below which the service listens or writes, each with its dot
}

func newReplySubjects(o Options) replySubjects {
	own := []string{o.APIPrefix + ".", o.EventPrefix + "."}
	// The JetStream of another account is given orders, and written to, below this prefix.
	if js := strings.TrimSuffix(o.JSAPIPrefix, "."); js != "" {
		own = append(own, js+".")
	}
	return replySubjects{own}
}

// allow tells whether subject can be the inbox of a caller. No reply goes to a subject of
// NATS' own, which begin with $; to one of the service's; to one with a wildcard; or to
// what is no subject, "" included.
func (r replySubjects) allow(subject string) bool {
	if subject == "" || subject[0] == '$' || strings.ContainsAny(subject, " \t\r\n\x00") {
		return false
	}
	for token := range strings.SplitSeq(subject, ".") {
		if token == "" || token == "*" || token == ">" {
			return false
		}
	}
	for _, prefix := range r.own {
		if strings.HasPrefix(subject, prefix) || subject == prefix[:len(prefix)-1] {
			return false
		}
	}
	return true
}
