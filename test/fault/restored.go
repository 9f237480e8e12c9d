package fault

// Until the service has noticed that a backup was restored, calls that were under
// way write to the old bucket and reads show it; nobody may be granted anything
// then, and that is all that can be asked. Grants are judged like everywhere,
// and the injector tries for some; the rest of that time is left out.

// restored says whether from..to overlaps the time from the restore of a backup
// to its cure.
func (r *Run) restored(from, to int64) bool {
	for _, w := range r.Windows {
		if w.Restored && from <= w.End && to >= w.Start {
			return true
		}
	}
	return false
}

// withoutRestored is the run without what only a restored bucket showed.
func (r *Run) withoutRestored() *Run {
	any := false
	for _, w := range r.Windows {
		any = any || w.Restored
	}
	if !any {
		return r
	}
	c := *r
	c.Counted, c.Ops, c.Inbox = nil, nil, nil
	left := map[string]bool{}
	for _, op := range r.Ops {
		if !r.restored(op.Start, op.End) {
			c.Ops = append(c.Ops, op)
			continue
		}
		switch op.Call {
		case Owner:
			continue
		case Forward:
			left[op.ForwardID] = true
			continue
		case Release, Evict: // of whatever was there
			op.Outcome = Unknown
		case Acquire, Renew:
			if op.Outcome == Refused {
				continue
			}
		}
		c.Ops = append(c.Ops, op)
	}
	for _, d := range r.Inbox {
		if !left[d.ForwardID] && !r.restored(d.At, d.At) {
			c.Inbox = append(c.Inbox, d)
		}
	}
	c.Log = r.Log.without(func(seen int64) bool { return r.restored(seen, seen) })
	return &c
}

// without is the log less what was seen at certain times.
func (s *Snapshot) without(out func(seen int64) bool) *Snapshot {
	var entries []*Entry
	for _, e := range s.Entries {
		if !out(e.Seen) {
			entries = append(entries, e)
		}
	}
	c := newSnapshot(entries)
	for _, ev := range s.Events {
		if !out(ev.Seen) {
			c.Events = append(c.Events, ev)
		}
	}
	for _, clash := range s.Clashes {
		if !out(clash.Seen) {
			c.Clashes = append(c.Clashes, clash)
		}
	}
	return c
}
