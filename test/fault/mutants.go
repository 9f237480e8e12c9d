package fault

import "time"

// Mutant is a broken variant of the service, and the run that must notice.
type Mutant struct {
	Name  string // value of LEASED_MUTANT
	Says  string
	Fault string // ID of the fault under which it shows
	On    Topology
	// Length of the injection. Most show at once.
	Length time.Duration
	// By are the invariants that it must break; one of them is enough. An empty
	// list takes any.
	By []string
}

// Mutants are all of them. The suite is worth what it catches.
var Mutants = []Mutant{
	{"renew-without-ttl", "a renewal is written without a TTL and lives for ever", "F0", R1, 4 * time.Second, []string{"I8"}},
	{"release-any-holder", "a release does not look at the holder", "F0", R1, 15 * time.Second, []string{"I6"}},
	{"renew-any-revision", "a renewal does not look at the revision", "F0", R1, 15 * time.Second, []string{"I6"}},
	{"release-unconditional", "a release is written without a condition", "F0", R1, 4 * time.Second, []string{"I8"}},
	{"forward-resend", "a forward is sent again after a silence", "F0", R1, 10 * time.Second, []string{"I13"}},
	{"direct-get", "reads are answered by any replica", "F11", R3, 20 * time.Second, []string{"I1", "I4", "I5", "I12", "I13"}},
	{"message-id", "writes carry a message id for the server to drop repeats", "F0", R1, 4 * time.Second, []string{"I8"}},
	{"in-flight-denied", "a write in flight is taken for a lease that is held", "F0", R3, 15 * time.Second, []string{"I1", "I12"}},
	{"markers", "the server writes a marker when a lease runs out", "F0", R3, 8 * time.Second, []string{"I8"}},
	{"short-tombstone", "a tombstone lives 1 s", "F0", R1, 6 * time.Second, []string{"I8"}},
	{"no-horizon", "a short lease over a long one lets the long one come back", "F0", R1, 10 * time.Second, []string{"I8"}},
	{"owner-from-view", "owner and forward believe what the instance has seen", "F5", R3, 30 * time.Second, []string{"I1", "I4", "I5", "I7", "I13"}},
	{"fence-from-one", "a bucket made again begins with revision 1", "F19", R1, 20 * time.Second, []string{"I3"}},
	{"grant-at-once", "a bucket made again grants before the old leases are over", "F19", R1, 20 * time.Second, []string{"I2"}},
	{"trust-restored", "a restored backup is believed", "F19", R1, 20 * time.Second, []string{"I3", "inject"}},
	{"local-clock", "the end of a lease is read from the service's clock", "F13s", R1, 20 * time.Second, []string{"I1", "I2", "I4", "I7"}},
	{"waiter-sleeps-on", "a waiting acquire is not woken by a release", "F21", R1, 10 * time.Second, []string{"wait", "inject"}},
	{"no-nonce", "a repeated write that conflicts is taken for lost without a look", "F11a", R1, 15 * time.Second, []string{"I1", "I9"}},
	{"unknown-as-unavailable", "a write without a verdict is called not applied", "F11a", R1, 15 * time.Second, []string{"I1", "I9"}},
	{"acquire-extends", "an acquire by the holder extends the lease", "F0", R1, 10 * time.Second, []string{"I1", "I9"}},
	{"renew-past-end", "a lease is renewed after its end", "F12", R3, 25 * time.Second, []string{"I7"}},
	{"expired-twice", "every instance tells the end of every lease", "F0", R1, 15 * time.Second, []string{"I15"}},
}
