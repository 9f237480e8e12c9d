package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// publishPath are the functions of nats-server that answer a message to a stream, and
// those that decide what they answer.
var publishPath = map[string]bool{
	"processInboundJetStreamMsg": true, "queueInbound": true, "processJetStreamMsg": true, "processJetStreamMsgWithBatch": true,
	"processJetStreamMsgWithRollup": true, "processJetStreamAtomicBatchMsg": true, "processClusteredInboundMsg": true,
	"checkMsgHeadersPreClusteredProposal": true, "commitSingleMsg": true, "wouldExceedLimits": true,
}

// notAsked are the errors of requests that the service does not make: mirrors, sources, templates,
// backups, changes of clusters, consumers of other sorts, counters, schedules, batches without conditions.
var notAsked = regexp.MustCompile(`^JS(Mirror|Source|StreamMirror|StreamExternal|StreamInvalidExternal|StreamTransform|StreamTemplate|Template|Snapshot|Restore|StreamRestore|StreamSnapshot|TempStorage|MirrorDurable|BatchPublish|StreamMove|StreamReconfigure|PeerRemap|Cluster(NotActive|PeerNotMember|ServerNotMember|ServerMemberChange|Rescue|Tags|UnSupport)|Consumer[A-Z]|StreamReplicasNotUpdatable|StreamDelete|StreamMsgDelete|StreamNameExistRestore|StreamNameContains|NotEmptyRequest|StreamMinLastSeq|AccountResourcesExceededErr$|Stream(StreamIdentity))`)

// TestEveryAnswer: each error code of the server of this module stands in the table, or is
// of a request that the service does not make; and what can be said of a message
// says there whether the message is stored.
func TestEveryAnswer(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/nats-io/nats-server/v2").Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(strings.TrimSpace(string(out)), "server")
	text, err := os.ReadFile(filepath.Join(dir, "errors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all []struct {
		Constant    string
		Code        uint16 `json:"error_code"`
		Description string
	}
	if err := json.Unmarshal(text, &all); err != nil || len(all) < 200 {
		t.Fatal(len(all), err)
	}
	codes := map[string]uint16{}
	for _, e := range all {
		codes[e.Constant] = e.Code
		if _, known := answers[e.Code]; !known && !notAsked.MatchString(e.Constant) {
			t.Errorf("%d %s (%s) is not in the table", e.Code, e.Constant, e.Description)
		}
	}
	found := 0
	for _, name := range []string{"stream.go", "jetstream_cluster.go", "jetstream_batching.go", "jetstream.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || !publishPath[fn.Name.Name] {
				continue
			}
			found++
			ast.Inspect(fn, func(n ast.Node) bool {
				id, ok := n.(*ast.Ident)
				if !ok {
					return true
				}
				constant := id.Name
				if made, ok := strings.CutPrefix(constant, "New"); ok && strings.HasSuffix(made, "Error") {
					constant = strings.TrimSuffix(made, "Error") + "Err"
				}
				code, ok := codes[constant]
				for _, end := range []string{"F", ""} { // JSStreamStoreFailedF, JSStreamWrongLastSequenceErrF
					if !ok {
						code, ok = codes[strings.TrimSuffix(constant, "Err")+end]
					}
					if !ok {
						code, ok = codes[constant+end]
					}
				}
				switch {
				case !ok && strings.HasPrefix(id.Name, "NewJS"):
					t.Errorf("%s: no code of %s", fn.Name.Name, id.Name)
				case ok && (answers[code].text == "" || answers[code].meaning == request):
					t.Errorf("%s answers a message with %d %s, and the table does not say what that means for it", fn.Name.Name, code, id.Name)
				}
				return true
			})
		}
	}
	if found < len(publishPath) {
		t.Errorf("%d functions were found of %d: the server has been rewritten", found, len(publishPath))
	}
}

// TestVerdicts: what an answer means for a write, alone and as the end of a batch.
func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		code        int
		description string
		noRoom      meaning
		alone, many error
		atOnce      bool // the call is answered without another try
	}{
		{10002, "resource limits exceeded for account", lasting, ErrNotStored, errBatchRefused, true},
		{10120, "no JetStream default or applicable tiered limit present", lasting, ErrNotStored, errBatchRefused, true},
		{10047, "insufficient storage resources available", lasting, ErrNotStored, errBatchRefused, true},
		{10023, "insufficient resources", lasting, ErrNotStored, errBatchRefused, true},
		{10023, "insufficient resources", passing, ErrNotStored, ErrNotStored, false},
		{10023, "insufficient resources", doubtful, ErrNoVerdict, ErrNoVerdict, false},
		{10077, "maximum bytes exceeded", lasting, ErrNotStored, errBatchRefused, true},
		{10077, "maximum messages exceeded", lasting, ErrNotStored, errBatchRefused, true},
		{10077, "store is closed", lasting, ErrNoVerdict, ErrNoVerdict, false},
		{10077, "write: no space left on device", lasting, ErrNoVerdict, ErrNoVerdict, false},
		{10008, "JetStream system temporarily unavailable", lasting, ErrNotStored, ErrNotStored, false},
		{10063, "expected stream sequence does not match", lasting, ErrNoVerdict, ErrNoVerdict, false},
		{10071, "wrong last sequence: 7", lasting, ErrConflict, ErrConflict, false},
		{10164, "wrong last sequence", lasting, ErrConflict, ErrConflict, false},
		{10199, "atomic publish batch is too large: 9", lasting, ErrNoVerdict, errBatchRefused, false},
		{10037, "no message found", lasting, ErrNoVerdict, ErrNoVerdict, false},
		{10999, "something new", lasting, ErrNoVerdict, ErrNoVerdict, false},
	} {
		reply := &nats.Msg{Data: fmt.Appendf(nil, `{"stream":"KV_leases","seq":0,"error":{"code":500,"err_code":%d,"description":%q}}`, c.code, c.description)}
		for batch, want := range map[int]error{0: c.alone, 5: c.many} {
			_, err := verdict(reply, nil, batch, c.noRoom)
			if !errors.Is(err, want) {
				t.Errorf("%d %s, %d in a batch: %v, want %v", c.code, c.description, batch, err, want)
			}
			if batch == 0 && lasts(err) != c.atOnce {
				t.Errorf("%d %s: lasts is %v", c.code, c.description, !c.atOnce)
			}
			if !strings.Contains(err.Error(), c.description) {
				t.Errorf("%d: the server's words are missing: %v", c.code, err)
			}
		}
	}
}

// TestSeldom: a crowd of events is told as one, with their number.
func TestSeldom(t *testing.T) {
	var s seldom
	start := time.Now()
	if n := s.now(start); n != 1 {
		t.Errorf("the first is told as %d", n)
	}
	for range 999 {
		if n := s.now(start.Add(seldomEvery - 1)); n != 0 {
			t.Fatal("told again at once")
		}
	}
	if n := s.now(start.Add(seldomEvery)); n != 1000 {
		t.Errorf("1000 are told as %d", n)
	}
}
