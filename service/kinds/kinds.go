// Package kinds is the closed set of reply kinds: what an answer of the lease
// service can be, the code it carries on the wire, and whether the call it
// answers was applied. The service, its metrics and every client share this one
// list; nothing else is ever counted or sent.
package kinds

// Kind names one way in which a call can end. The kinds of failures stand in
// the "kind" member of an error reply, all kinds in the counters.
type Kind string

// Answers: the call was understood and has a true result.
const (
	Granted   Kind = "granted"   // acquire: the caller holds the lease
	Denied    Kind = "denied"    // acquire: another holder has it
	Renewed   Kind = "renewed"   // renew: extended, the reply has the new revision
	Released  Kind = "released"  // release: the key is free
	Held      Kind = "held"      // owner: somebody holds the key
	Free      Kind = "free"      // owner: nobody holds the key
	Forwarded Kind = "forwarded" // forward: the owner answered
	Listed    Kind = "listed"    // list: one page of leases
	Evicted   Kind = "evicted"   // evict: the key is free
)

// Failures: the reply is {"error","kind"} with the two service error headers.
const (
	Invalid          Kind = "invalid"
	Lost             Kind = "lost"
	Unsupported      Kind = "unsupported"
	Busy             Kind = "busy"
	OverQuota        Kind = "over_quota"
	Unavailable      Kind = "unavailable"
	Unknown          Kind = "unknown"
	Internal         Kind = "internal"
	NotHeld          Kind = "not_held"
	OwnerUnavailable Kind = "owner_unavailable"
	OwnerRejected    Kind = "owner_rejected"
	OwnerTimeout     Kind = "owner_timeout"
	RequestTooLarge  Kind = "request_too_large"
	ReplyTooLarge    Kind = "reply_too_large"
)

// NoReply counts a request that named no reply subject, or one that no caller may
// name: nothing was done and nothing was sent.
const NoReply Kind = "no_reply"

// Applied says what a caller may conclude about its call from the kind alone.
type Applied int

const (
	// No: the call changed nothing, or (forward) the owner did not process it.
	No Applied = iota
	// Yes: the call took effect, or (forward) the owner processed it.
	Yes
	// Perhaps: the call may have taken effect or may yet do so.
	Perhaps
)

func (a Applied) String() string {
	return [...]string{"no", "yes", "perhaps"}[a]
}

// Info is what the contract says about one kind.
type Info struct {
	Kind    Kind
	Code    string // Nats-Service-Error-Code, "" for an answer
	Applied Applied
	Meaning string // one phrase for documents, metrics and help texts
}

// table is the contract's kind table, in its order.
var table = []Info{
	{Granted, "", Yes, "acquire: the caller holds the lease"},
	{Denied, "", No, "acquire: another holder has the key"},
	{Renewed, "", Yes, "renew: the lease was extended under a new revision"},
	{Released, "", Yes, "release: the key is free"},
	{Held, "", No, "owner: somebody holds the key"},
	{Free, "", No, "owner: nobody holds the key"},
	{Forwarded, "", Yes, "forward: the owner processed the request and answered"},
	{Listed, "", No, "list: one page of the leases this instance sees"},
	{Evicted, "", Yes, "evict: the key is free, whoever held it"},
	{Invalid, "400", No, "the request breaks its schema"},
	{Lost, "409", No, "holder and revision are not the current pair"},
	{Unsupported, "501", No, "the NATS server cannot expire keys or has no JetStream"},
	{Busy, "429", No, "a limit of calls in flight or waiting, or the share of a key or holder in it, is reached"},
	{OverQuota, "429", No, "acquire: the limit of leases, or of those of one holder, is reached"},
	{Unavailable, "503", No, "JetStream does not answer, refuses, or the bucket is not sound"},
	{Unknown, "503", Perhaps, "a write was sent and no verdict came back in time"},
	{Internal, "500", No, "corrupt or foreign record, stopping in mid-call, or a bug; a forward in mid-call may have been processed"},
	{NotHeld, "404", No, "forward: nobody holds the key"},
	{OwnerUnavailable, "502", No, "forward: nobody listens on the owner's inbox"},
	{OwnerRejected, "409", No, "forward: the owner refused the request as stale"},
	{OwnerTimeout, "504", Perhaps, "forward: an attempt got no reply in time; never sent again"},
	{RequestTooLarge, "413", No, "forward: the decoded payload does not fit the service's connection"},
	{ReplyTooLarge, "413", Yes, "forward: the owner's reply does not fit our reply; renew_many: ours might not fit, and nothing was renewed"},
	{NoReply, "", No, "the request named no reply subject, or one that no caller may name: nothing was done"},
}

var byKind = func() map[Kind]Info {
	m := make(map[Kind]Info, len(table))
	for _, i := range table {
		m[i.Kind] = i
	}
	return m
}()

// All lists every kind in the contract's order.
func All() []Info {
	return append([]Info(nil), table...)
}

// Lookup tells what the contract says about k; ok is false for a kind that is
// not in the set.
func Lookup(k Kind) (info Info, ok bool) {
	info, ok = byKind[k]
	return info, ok
}

// IsError says whether a reply of kind k is an error reply.
func (k Kind) IsError() bool {
	return byKind[k].Code != ""
}

// Code is the value of the Nats-Service-Error-Code header, "" for an answer.
func (k Kind) Code() string {
	return byKind[k].Code
}
