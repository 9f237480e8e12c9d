package fault

import (
	"cmp"
	"context"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// TestMutantsApply: the text that each mutant changes stands in the source, once.
func TestMutantsApply(t *testing.T) {
	root, names := moduleRoot(t), map[string]bool{}
	for _, m := range Mutants {
		if _, err := lay(root, m.Changes); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
		if _, ok := FaultNamed(m.Fault); names[m.Name] || len(m.Changes) == 0 || ok == (m.Test != "") {
			t.Errorf("%s: the name stands twice, nothing is changed, or nothing or two things must notice it", m.Name)
		}
		names[m.Name] = true
	}
}

// TestMutantsCompile: the mutants that only `make mutants` builds whole are Go.
func TestMutantsCompile(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles package service for each; not with -short")
	}
	root := moduleRoot(t)
	for _, m := range Mutants {
		o, err := lay(root, m.Changes)
		if err != nil || m.Test != "" {
			continue // another test's
		}
		compile := exec.Command("go", "build", "-overlay", o.write(t), "./service")
		compile.Dir = root
		if out, err := compile.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", m.Name, err, out)
		}
	}
}

// TestMutantsOfTests: the mutants that a test must notice.
func TestMutantsOfTests(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a package again for each; not with -short")
	}
	root := moduleRoot(t)
	for _, m := range Mutants {
		if m.Test == "" {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			o, err := lay(root, m.Changes)
			if err != nil {
				t.Fatal(err)
			}
			binary, in := filepath.Join(t.TempDir(), "mutant.test"), cmp.Or(m.In, "service")
			compile := exec.Command("go", "test", "-c", "-overlay", o.write(t), "-o", binary, "./"+in)
			compile.Dir = root
			if out, err := compile.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			run := exec.Command(binary, "-test.run", "^"+m.Test+"$", "-test.v", "-test.timeout", "2m")
			run.Dir = filepath.Join(root, in)
			out, err := run.CombinedOutput()
			if err == nil || !strings.Contains(string(out), "--- FAIL: "+m.Test) {
				t.Errorf("survived %s: %s\n%v\n%s", m.Test, m.Says, err, out)
			}
		})
	}
}

// TestMutants runs every broken variant under the fault that shows it. One that
// nobody notices is a hole in the suite.
func TestMutants(t *testing.T) {
	if !*flagMutants {
		t.Skip("-fault.mutants is not given: it takes some 20 minutes")
	}
	root, binary := moduleRoot(t), filepath.Join(cacheDir(t), "leased-mutant")
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
		if m.Test != "" || only != nil && !slices.Contains(only, m.Name) {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			f, ok := FaultNamed(m.Fault)
			if !ok {
				t.Fatalf("no fault %s", m.Fault)
			}
			if m.Inject != nil {
				f.Inject = func(ctx context.Context, e *Env) (int, error) {
					return every(ctx, e, 3*time.Second, func() error { return m.Inject(e) })
				}
			}
			o, err := lay(root, m.Changes)
			if err != nil {
				t.Fatal(err)
			}
			if m.Fault == "service-clock" {
				buildShifted(t, binary, "./cmd/leased", filepath.Join(root, "cmd", "leased"), o)
			} else {
				build(t, binary, "-overlay", o.write(t), "./cmd/leased")
			}
			p := Plan{Fault: f, On: m.On, Seed: *flagSeed, Length: m.Length, Clients: *flagClients, Pace: *flagPace, Leased: binary}
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
