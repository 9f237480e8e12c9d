// Package fault proves what the lease service promises by breaking everything
// around it and checking what its clients saw.
//
// A run starts real processes (nats-server, leased), lets many clients work on
// small sets of keys, injects one kind of fault again and again, and keeps
// three records: every operation with its times on one monotonic clock and its
// outcome (history.go), every message that the stream ever stored (log.go,
// tap.go), and every request that reached a holder's inbox (load.go). Then it
// judges them twice: each key's history must be linearizable against a lease
// register whose expiry is a free step (model.go), and the whole run must pass
// the linear-time checks of the invariants I2 to I20 (checks.go).
//
// An outcome is one of four: applied, refused (not applied, and the reply tells
// the state), busy (not applied, and the reply tells nothing), unknown (perhaps
// applied, perhaps later). An unknown operation has no time of return.
//
// Faults are a list (faults.go). Each says whether this machine can do it,
// injects, and proves that it happened; a run that injected less than it
// promised fails, and so does one that the checker could not decide. The suite
// itself is proved by mutants: broken variants of the service, made by changes laid over
// its source at build, each of which a run or a test must catch (mutants.go).
package fault
