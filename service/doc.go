// Package service keeps leases on a JetStream bucket: what a lease is, how it is
// written, how it ends, and how a request reaches whoever holds it. It knows
// NATS; it does not know the front door (subjects, schemas, replies), which is
// the root package's.
//
// # States of a key
//
// A key's whole state is its last message in the bucket, whose sequence is the
// lease's revision, the fence:
//
//	nothing       free
//	lease         acquired or renewed: held until message time + ttl
//	past          a lease whose time is over and that is still stored: free
//	tombstone     released, evicted or expired: free
//	foreign       not written by this service: nobody's, until evicted
//
// Every change is ONE conditional write: "store this if the key's last sequence
// is still N". JetStream orders the writes, so of two that name the same N one
// loses and looks again. Decide (lease.go) is the table of what may follow what;
// it is pure, and everything around it only finds out the state and carries out
// the write.
//
// # Why two holders never both hold (safety)
//
//   - A lease is granted only by a stored write. The write of another holder
//     names either a sequence that is not a live lease, or a lease that is
//     proven over: the server's clock was read after the lease was and stood
//     past its end. The clock of this process never ends a lease; it is an
//     estimate that says when asking is worth it.
//   - The server removes a message when its TTL is over, by the clock that
//     stamped it. So a holder that counts from before it asked stops first.
//   - A lease that is gone, or over, before it can be by this process's monotonic clock
//     is not taken: somebody purged it or set a clock. Nothing is granted then until
//     all such leases would have been over.
//   - Clocks of several servers may differ: exclusion in time holds up to that
//     difference. The revision holds regardless, as long as the bucket does not
//     go back in time, and a resource that checks it is safe even then from
//     every holder whose revision it has seen surpassed.
//
// # Ambiguity
//
// A write that got no answer may be stored now, later, or never; a read that
// shows the old state proves nothing. The write is repeated unchanged: its
// condition lets it in at most once. On a conflict the key is read, and the
// random nonce in the record says whose write it was. Only if none of this ends
// within the call's time the answer is unknown.
//
// # Horizon
//
// JetStream removes a message when its TTL is over, and a server that comes back
// from a crash can then show the message before it again, if that one's TTL is
// not over yet: a released lease would rise. So no message leaves before the
// latest end of all earlier messages of its key, the key's horizon. The horizon
// is carried from record to record while it is later than the record's own end;
// a tombstone lives past it, and so does a lease that is shorter than what it
// replaces, whose end the service then writes itself.
//
// # What goes back in time
//
// A backup that is restored issues revisions again. The first revision of a
// bucket is the microsecond of its making, and a restore sets the time of its
// making forward: a last revision that is older than the bucket is proof. Each
// instance also keeps the highest revision it has seen, asks the others for
// theirs, which it believes as far as they can be true, and compares every ack. A bucket that fails either test grants nothing
// until its revisions are lifted above both (fence lift).
//
// # The view
//
// Each instance follows the bucket with a consumer and keeps every key's last
// revision (view.go). A revision never changes, so what the view says about one
// is true for ever; that it is the last one is a guess. The view therefore may
// propose the condition of a write, which proves the guess or fails, and may say
// that something newer exists, but never answers a question: denied, held, free
// and an idempotent granted come from a read through the stream leader. Such a
// read can be stale for seconds while a leader is cut off from its peers. Only a
// write decides.
//
// # Progress, and the time without an owner
//
// A free key is granted by any instance with one write. A dead holder's lease is
// taken over as soon as its end is proven, without waiting for the server's
// sweep, which is up to 0.3 s late. No leader, no grant: a lease call tries for
// 4 s and says unavailable or unknown. After a bucket was deleted and made again
// nothing is granted until every lease of the old one is over.
//
// The expired event is not part of safety: nothing in NATS announces that a TTL
// ran out, so the instances do, first the last writer, then the others; the
// condition of the write lets one of them win.
package service
