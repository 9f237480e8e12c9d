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
	// Inject is what the fault is to do, where it does many things in turn.
	Inject func(*Env) error
}

// Mutants are all of them. The suite is worth what it catches.
var Mutants = []Mutant{
	{"renew-without-ttl", "a renewal is written without a TTL and lives for ever", "F0", R1, 4 * time.Second, []string{"I8"}, nil},
	{"release-any-holder", "a release does not look at the holder", "F0", R1, 15 * time.Second, []string{"I6"}, nil},
	{"renew-any-revision", "a renewal does not look at the revision", "F0", R1, 15 * time.Second, []string{"I6"}, nil},
	{"release-unconditional", "a release is written without a condition", "F0", R1, 4 * time.Second, []string{"I8"}, nil},
	{"forward-resend", "a forward is sent again after a silence", "F0", R1, 10 * time.Second, []string{"I13"}, nil},
	{"direct-get", "reads are answered by any replica", "F9", R3, 20 * time.Second, []string{"I1", "I4", "I5", "I12", "I13"}, (*Env).lag},
	{"message-id", "writes carry a message id for the server to drop repeats", "F0", R1, 4 * time.Second, []string{"I8"}, nil},
	{"in-flight-denied", "a write in flight is taken for a lease that is held", "F0", R3, 15 * time.Second, []string{"I1", "I12"}, nil},
	{"markers", "the server writes a marker when a lease runs out", "F0", R3, 8 * time.Second, []string{"I8"}, nil},
	{"short-tombstone", "a tombstone lives 1 s", "F0", R1, 6 * time.Second, []string{"I8"}, nil},
	{"no-horizon", "a short lease over a long one lets the long one come back", "F0", R1, 10 * time.Second, []string{"I8"}, nil},
	{"owner-from-view", "owner and forward believe what the instance has seen", "F5", R3, 30 * time.Second, []string{"I1", "I4", "I5", "I7", "I13"}, nil},
	{"fence-from-one", "a bucket made again begins with revision 1", "F19", R1, 20 * time.Second, []string{"I3"}, (*Env).deleteBucket},
	{"grant-at-once", "a bucket made again grants before the old leases are over", "F19", R1, 20 * time.Second, []string{"I2"}, (*Env).deleteBucket},
	{"trust-restored", "a restored backup is believed", "F19", R1, 20 * time.Second, []string{"I3", "inject"}, (*Env).restoreBucket},
	{"local-clock", "the end of a lease is read from the service's clock", "F13s", R1, 20 * time.Second, []string{"I1", "I2", "I4", "I7"}, nil},
	{"waiter-sleeps-on", "a waiting acquire is not woken by a release", "F21", R1, 10 * time.Second, []string{"wait", "inject"}, nil},
	{"no-nonce", "a repeated write that conflicts is taken for lost without a look", "F11a", R1, 15 * time.Second, []string{"I1", "I9"}, nil},
	{"unknown-as-unavailable", "a write without a verdict is called not applied", "F11a", R1, 15 * time.Second, []string{"I1", "I9"}, nil},
	{"acquire-extends", "an acquire by the holder extends the lease", "F0", R1, 10 * time.Second, []string{"I1", "I9"}, nil},
	{"renew-past-end", "a lease is renewed after its end", "F12", R3, 25 * time.Second, []string{"I7"}, nil},
	{"expired-twice", "every instance tells the end of every lease", "F0", R1, 15 * time.Second, []string{"I15"}, nil},
}
