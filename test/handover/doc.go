// Package handover measures how a key passes from one holder to the next: by a
// release to one of many who wait, among many workers on few keys, and by the
// end of a dead holder's lease.
//
// LEASED_LONG=1 runs it at full size and holds it to its figures, which are for a
// machine with nothing else to do. Without it a slice runs that checks what does
// not depend on the machine, and logs the figures.
package handover
