// Package storage proves on real servers what the service makes of JetStream:
// that grants outlive leader changes, renewals stick at the edge, ended leases
// stay ended through crashes, servers and buckets that cannot keep leases are
// refused by name, and no clock but the server's ends a lease.
//
// Slow runs are long with LEASED_LONG=1 in the environment.
package storage
