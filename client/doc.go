// Package client is the holder's half of the lease contract: typed calls over a
// NATS connection, and the things that are easy to get wrong around them.
//
//	Client    the calls: Acquire, Renew, Release, Owner, Forward, List, Evict, RenewMany
//	Hold      one lease held: a context that ends before the lease can belong to another
//	Run       hold, work, and release when the work has ended; Elect does it for ever
//	Shards    many keys, fairly over the processes that share them
//	Inbox     the owner's side of Forward
//	Fence     the check a store makes so that a late writer changes nothing
//
// Nobody needs this package to use leases: the wire is the contract.
//
// # States of a Hold
//
//	waiting --granted, datable--------------------------------> acting
//	waiting --granted, not datable--> confirming --renewed----> acting
//	confirming --lost--> waiting
//	acting --renewed--> acting
//	acting --lost | owner tells of another | deadline near----> ended (lost)
//	acting --event--> owner asked --not ours--> renewed or lost
//	acting --Resign-------------------------------------------> ended (resigned)
//
// No arrow leaves "ended". A lease that was lost is never taken up again; a new
// Hold is a new tenure with a higher revision.
//
// # How long a holder may act
//
// The service frees a key no earlier than ttl after it wrote the revision, and
// it wrote no earlier than it was asked. So the holder may act until
//
//	deadline = time of SENDING + ttl, of the call that wrote the held revision
//
// on its own monotonic clock; no wall clock is compared, neither its own nor the
// times in replies. The Context of a Hold ends Margin before the deadline, which
// covers clocks that run at different speed and the time until the work notices.
//
// Calls without a verdict (no reply, or kind unknown) may have been applied, or
// may be applied later. What is known then, in claim.go, free of clock and I/O:
//
//   - A renewal without a verdict leaves revision and deadline as they were: both
//     stay true if it was not applied, and if it was, the lease lives longer.
//   - It is cured by asking Owner: the same holder and the same acquired_at with a
//     higher revision is our renewal; its deadline counts from the sending of the
//     EARLIEST renewal that can have written it. Anything else ends the Hold. An
//     answer that names our revision, or an older one (a read can be stale), is no
//     news: the renewal is repeated until the deadline.
//   - "lost" after a renewal without a verdict may only mean that the earlier one
//     was applied. Owner is asked before it is believed. "lost" with no renewal in
//     doubt is final.
//   - A granted acquire dates its revision only if no other call can have written
//     it: the holder id was made for this Hold, and no acquire before it went
//     without a verdict. Otherwise (a restart under the same holder id, a retry)
//     it may be a lease that is nearly over, and the Hold renews before it acts. So
//     it does when the acquire waited for longer than a third of the ttl.
//
// # Why two holders do not act at once
//
// Let A act under revision r until d(r) - Margin, where d(r) <= end of r on the
// server. B is granted the key only when r, or a later revision of A's tenure, has
// ended or was released. A later revision ends later still. Release is sent only
// by Resign, after the Context has ended and renewals have stopped, so no revision
// of A follows it. What remains: clocks of A and of the server that differ in
// speed by more than Margin/ttl, a machine that was suspended (the monotonic clock
// of Linux stands still meanwhile), and a process that is paused between its last
// look at the Context and its write. For these there is the fence: send Tenure with
// every write and let the store refuse lower ones (see Fence). Check is the
// synchronous look: it reads the clock itself and needs no timer to have fired.
//
// An operator can evict a holder: then the key is free at once, and this one acts
// on until it learns of it. A Hold follows the events of its key. One that tells of
// a higher revision than its own is a reason to ask Owner, and an answer that is not
// its own tenure a reason to renew; only the verdict of that ends it, so a forged
// event costs a question and nothing more. Where events do not arrive, the next
// renewal finds it out, up to a third of the ttl later.
//
// # What a caller may conclude
//
// Every error of a call is a *kinds.Error. No reply is kind unknown: it may have
// been applied. No responders is kind unavailable and wraps nats.ErrNoResponders:
// nothing was applied, like everything else that kinds.Lookup says is not applied.
// A call that the NATS server does not permit wraps nats.ErrPermissionViolation,
// one over a connection that is closed for good nats.ErrConnectionClosed; both are
// known at once, and what waits over many calls, as Hold and Elect do, ends with them.
package client
