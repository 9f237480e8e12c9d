package fault

import "time"

// Mutant is a broken variant of the service and what must notice it: a run under a
// fault, or a test of package service.
type Mutant struct {
	Name    string
	Says    string
	Changes []Change
	Test    string // the test that must fail; "": a run must
	In      string // the directory of that test; "": service
	Fault   string // the fault under which it shows
	On      Topology
	// Length of the injection. Most show at once.
	Length time.Duration
	// By are the invariants that it must break; one of them is enough. An empty
	// list takes any.
	By []string
	// Inject is what the fault is to do, where it does many things in turn.
	Inject func(*Env) error
}

// Pieces that more than one mutant needs.
var (
	// believes takes every acknowledged revision for one of the bucket that was allowed.
	believes = Change{"service/bucket.go", "revision uint64) error {\n\tswitch {\n", "revision uint64) error {\n\treturn nil\n\tswitch {\n"}
	// guessed lets what the view shows be an answer.
	guessed = []Change{
		{"service/leases.go", "\t\t\tcase d.Write == nil && guessed:\n", "\t\t\tcase false && guessed:\n"},
		{"service/call.go", "\tcase d.Write == nil && guessed:\n", "\tcase false && guessed:\n"},
	}
	ownerGuessed = append([]Change{{"service/leases.go", "\tcase OpAcquire:\n\t\tif !l.view.fresh(now) {", "\tcase OpOwner:\n\t\tif l.view.fresh(now) {\n\t\t\treturn State{Entry: s.Entry, Past: s.MayBePast}, true\n\t\t}\n\tcase OpAcquire:\n\t\tif !l.view.fresh(now) {"}}, guessed...)
)

// onMessage changes the message of a write before it goes out.
func onMessage(statement string) []Change {
	const line = "\tmsg.Header[headerEvent] = []string{string(w.Event)}\n"
	return []Change{{"service/jetstream.go", line, line + "\t" + statement + "\n"}}
}

// Mutants are all of them. The suite is worth what it catches.
var Mutants = []Mutant{
	{Name: "renew-without-ttl", Says: "a renewal is written without a TTL and lives for ever",
		Changes: onMessage("if w.Event == Renewed { delete(msg.Header, headerTTL) }"),
		Fault:   "none", On: R1, Length: 4 * time.Second, By: []string{"I8"}},
	{Name: "release-any-holder", Says: "a release does not look at the holder",
		Changes: []Change{{"service/lease.go", "\tcase OpRelease:\n\t\tif !current {", "\tcase OpRelease:\n\t\tif !live || s.Revision != c.Revision {"}},
		Fault:   "none", On: R1, Length: 15 * time.Second, By: []string{"I6"}},
	{Name: "renew-any-revision", Says: "a renewal does not look at the revision",
		Changes: []Change{{"service/lease.go", "\tcase OpRenew:\n\t\tif !current {", "\tcase OpRenew:\n\t\tif !live || s.Record.Holder != c.Holder {"}},
		Fault:   "none", On: R1, Length: 15 * time.Second, By: []string{"I6"}},
	{Name: "release-unconditional", Says: "a release is written without a condition",
		Changes: onMessage("if w.Event == Released { delete(msg.Header, headerExpectedLast) }"),
		Fault:   "none", On: R1, Length: 4 * time.Second, By: []string{"I8"}},
	{Name: "forward-resend", Says: "a forward is sent again after a silence",
		Changes: []Change{
			{"service/forward.go", " && owner.Lease.Holder == tried.Holder && owner.Lease.Revision == tried.Revision:", " && last == nil:"},
			{"service/forward.go", "reply, failed := f.attempt(ctx, q,", "ctx, cancel := context.WithTimeout(ctx, time.Until(q.Until)/3)\n\t\tdefer cancel()\n\t\treply, failed := f.attempt(ctx, q,"},
			{"service/forward.go", "notProcessed := failed.Kind == kinds.OwnerUnavailable || failed.Kind == kinds.OwnerRejected", "notProcessed := true"},
		},
		Fault: "none", On: R1, Length: 10 * time.Second, By: []string{"I13"}},
	{Name: "direct-get", Says: "reads are answered by any replica",
		Changes: []Change{
			{"service/bucket.go", "AllowDirect:        false,", "AllowDirect:        true,"},
			{"service/jetstream.go", "done func(Entry, error)) {\n\tmsg := &nats.Msg{Subject: j.api + \"STREAM.MSG.GET.\" + StreamName, Data: getRequest(key)}\n", `done func(Entry, error)) {
	go func() {
		m, err := j.nc.Request(j.api+"DIRECT.GET."+StreamName+"."+SubjectPrefix+key, nil, wait)
		if err != nil {
			done(Entry{}, ErrNoAnswer)
			return
		}
		seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
		if err != nil {
			done(Entry{Key: key}, nil)
			return
		}
		at, err := time.Parse(time.RFC3339Nano, m.Header.Get("Nats-Time-Stamp"))
		if err != nil {
			done(Entry{}, ErrNoAnswer)
			return
		}
		e, _ := decodeEntry(key, seq, at, m.Header, m.Data)
		done(e, nil)
	}()
	if j != nil {
		return
	}
	msg := &nats.Msg{Subject: j.api + "STREAM.MSG.GET." + StreamName, Data: getRequest(key)}
`},
		},
		Fault: "partition", On: R3, Length: 20 * time.Second, By: []string{"I1", "I4", "I5", "I12", "I13"}, Inject: (*Env).lag},
	{Name: "message-id", Says: "writes carry a message id for the server to drop repeats",
		Changes: onMessage("msg.Header[\"Nats-Msg-Id\"] = []string{w.Nonce}"),
		Fault:   "none", On: R1, Length: 4 * time.Second, By: []string{"I8"}},
	{Name: "in-flight-denied", Says: "a write in flight is taken for a lease that is held",
		Changes: []Change{{"service/leases.go", "\t\tcase errors.Is(err, ErrConflict) && !open:\n", "\t\tcase codeOf(err) == codeInFlight:\n\t\t\treturn committed{}, kinds.Errorf(kinds.Lost, \"another write is in flight\")\n\t\tcase errors.Is(err, ErrConflict) && !open:\n"}},
		Fault:   "none", On: R3, Length: 15 * time.Second, By: []string{"I1", "I12"}},
	{Name: "markers", Says: "the server writes a marker when a lease runs out",
		Changes: []Change{{"service/bucket.go", "AllowMsgTTL:        true,", "AllowMsgTTL:        true,\n\t\tSubjectDeleteMarkerTTL: time.Second,"}},
		Fault:   "none", On: R3, Length: 8 * time.Second, By: []string{"I8"}},
	{Name: "short-tombstone", Says: "a tombstone lives 1 s",
		Changes: []Change{{"service/leases.go", "w.TTL = ceilSecond(max(left, 0) + horizonSlack + tombstoneLife)", "w.TTL = time.Second"}},
		Fault:   "none", On: R1, Length: 6 * time.Second, By: []string{"I8"}},
	{Name: "no-horizon", Says: "a short lease over a long one lets the long one come back",
		Changes: []Change{{"service/lease.go", "n.Outlives = s.Record.TTL() > n.TTL || !s.Record.Horizon.IsZero()", "n.Outlives = false"}},
		Fault:   "none", On: R1, Length: 10 * time.Second, By: []string{"I8"}},
	{Name: "owner-from-view", Says: "owner and forward believe what the instance has seen",
		Changes: ownerGuessed,
		Fault:   "kill-nodes", On: R3, Length: 30 * time.Second, By: []string{"I1", "I4", "I5", "I7", "I13"}},
	{Name: "fence-from-one", Says: "a bucket made again begins with revision 1",
		Changes: []Change{
			believes,
			{"service/bucket.go", "\tborn := uint64(si.Created.Add(-createdSlack).UnixMicro())\n", "\tborn := uint64(0)\n\thighest = 0\n"},
			{"service/bucket.go", "FirstSeq:           firstSeq,", "FirstSeq:           min(firstSeq, 1),"},
		},
		Fault: "bucket-edits", On: R1, Length: 20 * time.Second, By: []string{"I3"}, Inject: (*Env).deleteBucket},
	{Name: "grant-at-once", Says: "a bucket made again grants before the old leases are over",
		Changes: []Change{
			believes,
			{"service/bucket.go", "\tcase time.Now().Before(k.holdUntil), si.Now.Before(until):\n", "\tcase false:\n"},
		},
		Fault: "bucket-edits", On: R1, Length: 20 * time.Second, By: []string{"I2"}, Inject: (*Env).deleteBucket},
	{Name: "trust-restored", Says: "a restored backup is believed",
		Changes: []Change{
			believes,
			{"service/bucket.go", "\tif was := k.created.Load(); was != 0 && was != si.Created.UnixNano() {\n", "\tif k != nil {\n\t\tk.created.Store(si.Created.UnixNano())\n\t\th.Verdict = Sound\n\t\treturn h\n\t}\n\tif was := k.created.Load(); was != 0 && was != si.Created.UnixNano() {\n"},
		},
		Fault: "bucket-edits", On: R1, Length: 20 * time.Second, By: []string{"I3", "inject"}, Inject: (*Env).restoreBucket},
	{Name: "local-clock", Says: "the end of a lease is read from the service's clock",
		Changes: []Change{{"service/leases.go", "\tcase !e.isLease():\n", "\tcase !e.isLease():\n\tcase e.isLease():\n\t\tst.Past = !time.Now().Before(e.End())\n"}},
		Fault:   "service-clock", On: R1, Length: 20 * time.Second, By: []string{"I1", "I2", "I4", "I7"}},
	{Name: "waiter-sleeps-on", Says: "a waiting acquire is not woken by a release",
		Changes: []Change{{"service/waiters.go", "\tif !free {\n", "\tif free || !free {\n"}},
		Fault:   "storms", On: R1, Length: 10 * time.Second, By: []string{"wait", "inject"}},
	{Name: "no-nonce", Says: "a repeated write that conflicts is taken for lost without a look",
		Changes: []Change{
			{"service/leases.go", "st.Record != nil && st.Record.Nonce == mine.w.Nonce", "false"},
			{"service/leases.go", "\t\tcase errors.Is(err, ErrConflict) && !open:\n", "\t\tcase errors.Is(err, ErrConflict) && (!open || open):\n"},
		},
		Fault: "no-verdict", On: R1, Length: 15 * time.Second, By: []string{"I1", "I9"}},
	{Name: "unknown-as-unavailable", Says: "a write without a verdict is called not applied",
		Changes: []Change{{"service/leases.go", "\t\t\tif open {\n", "\t\t\tif open && !open {\n"}},
		Fault:   "no-verdict", On: R1, Length: 15 * time.Second, By: []string{"I1", "I9"}},
	{Name: "acquire-extends", Says: "an acquire by the holder extends the lease",
		Changes: []Change{{"service/lease.go", "\t\tcase s.Record.Holder == c.Holder:\n", "\t\tcase s.Record.Holder == c.Holder:\n\t\t\tn := &Next{Expect: s.Revision, Event: Renewed, Holder: c.Holder, TTL: c.TTL, Tenure: s.Record.AcquiredAt}\n\t\t\tn.inherit(s)\n\t\t\treturn Decision{Kind: kinds.Granted, Write: n}\n\t\tcase false:\n"}},
		Fault:   "none", On: R1, Length: 10 * time.Second, By: []string{"I1", "I9"}},
	{Name: "renew-past-end", Says: "a lease is renewed after its end",
		Changes: []Change{{"service/lease.go", "live := s.isLease() && !s.Past && !s.Superseded", "live := s.isLease() && (!s.Past || c.Op == OpRenew) && !s.Superseded"}},
		Fault:   "edge-renewals", On: R3, Length: 25 * time.Second, By: []string{"I7"}},
	{Name: "expired-twice", Says: "every instance tells the end of every lease",
		Changes: []Change{
			{"service/lease.go", "\t\treturn Decision{Kind: kinds.Lost}\n", "\t\tif s.Tombstone && s.Record != nil && s.Record.Event == Expired && s.Record.Revision == c.Revision {\n\t\t\tn := tombstone(&s.Entry, s.Revision, Expired)\n\t\t\tn.Ended = c.Revision\n\t\t\treturn Decision{Kind: kinds.Free, Write: n}\n\t\t}\n\t\treturn Decision{Kind: kinds.Lost}\n"},
			{"service/expiry.go", "\t\t_, err := x.write(ctx, e, c, d, bucket)\n", "\t\t_, err := x.write(ctx, e, c, d, bucket)\n\t\tif err == nil {\n\t\t\tif st, err := l.look(ctx, c, false); err == nil {\n\t\t\t\tif d := Decide(st, c); d.Write != nil {\n\t\t\t\t\t_, _ = l.write(ctx, c, d, bucket)\n\t\t\t\t}\n\t\t\t}\n\t\t}\n"},
		},
		Fault: "none", On: R1, Length: 15 * time.Second, By: []string{"I15"}},

	// These die in a test, of package service where none is named.
	{Name: "batch-last-revision", Says: "every write of a batch gets the revision of the last",
		Changes: []Change{{"service/batch.go", "p.finish(last-uint64(len(batch)-1-i), nil)", "p.finish(last+0*uint64(i), nil)"}},
		Test:    "TestBatchVerdicts"},
	{Name: "batch-wrong-split", Says: "the writes at fault of a refused batch are called stored",
		Changes: []Change{{"service/batch.go", "\t\t\tp.finish(0, ErrConflict)\n", "\t\t\tp.finish(p.w.Expect+1, nil)\n"}},
		Test:    "TestBatchVerdicts"},
	{Name: "batch-key-twice", Says: "a batch has a key twice",
		Changes: []Change{{"service/batch.go", "len(batch) == maxBatch || keys[p.w.Key]", "len(batch) == maxBatch"}},
		Test:    "TestBatchKeyOnce"},
	{Name: "ends-dropped-silently", Says: "an end that nobody told in time is forgotten, without a count and without its key's past",
		Changes: []Change{{"service/view.go", "\tv.late.Add(1)\n\tv.settle(i)\n", "\treturn false\n"}},
		Test:    "TestEndsToldByNobody"},
	{Name: "owner-from-view-at-once", Says: "owner believes what the instance has seen",
		Changes: ownerGuessed,
		Test:    "TestViewIsNoTruth"},
	{Name: "denied-from-view", Says: "an acquire is denied by what the instance has seen",
		Changes: append([]Change{{"service/leases.go", "\t\tif !ok {\n\t\t\treturn State{Entry: Entry{Key: c.Key}}, l.Allow", "\t\tif ok && s.Live {\n\t\t\treturn State{Entry: s.Entry}, true\n\t\t}\n\t\tif !ok {\n\t\t\treturn State{Entry: Entry{Key: c.Key}}, l.Allow"}}, guessed...),
		Test:    "TestViewIsNoTruth"},
	{Name: "conflict-is-proof", Says: "a refusal by a leader that is behind is a verdict",
		Changes: []Change{
			{"service/leases.go", "st.Record != nil && st.Record.Nonce == mine.w.Nonce", "false"},
			{"service/leases.go", "if !errors.As(err, &c) || c.last == nil {", "if !errors.As(err, &c) || c.last == nil || c.last != nil {"},
		},
		Test: "TestSchedules"},
	{Name: "verdict-of-now", Says: "a refusal is judged by what is known when it is read",
		Changes: []Change{{"service/leases.go", "\tbehind := *c.last <= max(a.w.Expect, a.seen)\n", "\tnow, _ := l.view.last(a.w.Key, time.Now())\n\tbehind := *c.last < max(a.w.Expect, now)\n"}},
		Test:    "TestVerdictOfThatTime"},
	{Name: "line-answered-late", Says: "acquires are answered by a write that was sent before they came",
		Changes: []Change{{"service/rounds.go", "return cmp.Or(s.came().Compare(sent), -1)", "return cmp.Or(-1, s.came().Compare(sent))"}},
		Test:    "TestAnswersAreNotOlder"},
	{Name: "granted-after-the-wait", Says: "an acquire that waited is granted a key when its time is over",
		Changes: []Change{{"service/lease.go", "return !c.Until.IsZero() && !now.Before(c.Until)", "return c.Until.Equal(now)"}},
		Test:    "TestNothingAfterTheWait"},
	{Name: "ghost-grants-kept", Says: "a grant that nobody heard stays",
		Changes: []Change{{"service/unheard.go", "\t\t\tunheard()\n", ""}},
		Test:    "TestGrantThatNobodyHears", In: "test/contract"},
	{Name: "reply-anywhere", Says: "a reply goes wherever the caller says",
		Changes: []Change{{"replysubject.go", "subject == \"\" || subject[0] == '$' ||", "subject == \"\" ||"}},
		Test:    "TestReplySubjects", In: "."},
	{Name: "counted-requests", Says: "the reply subjects of requests are counted",
		Changes: []Change{{"service/requests.go", "\tfor id = r.ids.Uint64(); r", "\tfor id = uint64(len(r.open)) + 1; r"}},
		Test:    "TestReplySubjectsCannotBeGuessed"},
	{Name: "peers-believed", Says: "what another instance claims is believed whatever it is",
		Changes: []Change{{"service/peers.go", "\t\tcase c.fence > most:\n", "\t\tcase false:\n"}},
		Test:    "TestPeerNews"},
}
