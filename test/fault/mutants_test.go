package fault

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// TestMutants runs every broken variant under the fault that shows it. One that
// nobody notices is a hole in the suite.
func TestMutants(t *testing.T) {
	if !*flagMutants {
		t.Skip("-fault.mutants is not given: it takes some 20 minutes")
	}
	binary := filepath.Join(cacheDir(t), "leased-mutant")
	build(t, binary, "-tags", "mutant", "./cmd/leased")
	var only []string
	if *flagOnly != "" {
		only = strings.Split(*flagOnly, ",")
	}
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	defer func() {
		table.Flush()
		t.Logf("\n%s", &b)
	}()
	for _, m := range Mutants {
		if only != nil && !slices.Contains(only, m.Name) {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			f, ok := FaultByID(m.Fault)
			if !ok {
				t.Fatalf("no fault %s", m.Fault)
			}
			if m.Inject != nil {
				f.Inject = func(ctx context.Context, e *Env) (int, error) {
					return every(ctx, e, 3*time.Second, func() error { return m.Inject(e) })
				}
			}
			bin := binary
			if m.Fault == "F13s" {
				bin = filepath.Join(cacheDir(t), "leased-mutant-shifted")
				buildShifted(t, bin, "./cmd/leased", filepath.Join(moduleRoot(t), "cmd", "leased"), "-tags", "mutant")
			}
			p := Plan{Fault: f, On: m.On, Seed: *flagSeed, Length: m.Length, Clients: *flagClients, Pace: *flagPace, Leased: bin, Env: []string{"LEASED_MUTANT=" + m.Name}}
			if ok, why := p.Available(); !ok {
				t.Skip(why)
			}
			rep := p.Execute(t)
			killers := rep.broken()
			hit := false
			for _, k := range killers {
				name, _, _ := strings.Cut(k, "(")
				hit = hit || slices.Contains(m.By, name)
			}
			for i, v := range rep.Violations {
				if i < 3 {
					t.Log(v)
				}
			}
			for _, e := range rep.Errors {
				t.Log(e)
				hit = hit || slices.Contains(m.By, "inject") && strings.HasPrefix(e, "inject:")
			}
			if !hit {
				t.Errorf("survived: %s (broke %v, must break one of %v)", m.Says, killers, m.By)
			}
			table.Write([]byte(m.Name + "\t" + m.Says + "\t" + m.Fault + " " + string(m.On) + "\t" + strings.Join(killers, " ") + "\n"))
		})
	}
}
