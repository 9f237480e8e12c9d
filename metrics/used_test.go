package metrics

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/service/kinds"
	dto "github.com/prometheus/client_model/go"
	"gopkg.in/yaml.v3"
)

// An expression of the dashboard or the alert rules, and where it stands.
type used struct{ where, expr string }

func alertExprs(t *testing.T) (out []used) {
	t.Helper()
	text, err := os.ReadFile("alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			out = append(out, used{"alert " + r.Alert, r.Expr})
		}
	}
	return out
}

func dashboardExprs(t *testing.T) (out []used) {
	t.Helper()
	text, err := os.ReadFile("dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			GridPos struct{ H, W, X, Y int }
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	ids := map[int]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || p.GridPos.X+p.GridPos.W > 24 || (p.Type != "row") != (len(p.Targets) > 0) {
			t.Errorf("panel %q: id %d twice, too wide, or without a query", p.Title, p.ID)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			out = append(out, used{"panel " + p.Title, target.Expr})
		}
	}
	return out
}

var (
	selector = regexp.MustCompile(`\b((?:leased|go|process)_[a-z0-9_]+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`([a-z_]+)(=~|=)"([^"]*)"`)
)

// TestDashboardAndAlertsUseSeriesThatExist looks every selector up in a scrape:
// the metric must be there, and each value that the selector names must be the
// value of that label on one of its series.
func TestDashboardAndAlertsUseSeriesThatExist(t *testing.T) {
	m := newTest(t)
	m.Endpoint("renew").Reply(kinds.Renewed, time.Millisecond)
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	exposed := map[string]*dto.MetricFamily{}
	for _, f := range families {
		exposed[f.GetName()] = f
		if f.GetType() == dto.MetricType_HISTOGRAM {
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				exposed[f.GetName()+suffix] = f
			}
		}
	}
	alerts, panels := alertExprs(t), dashboardExprs(t)
	if len(alerts) < 10 || len(panels) < 20 {
		t.Fatalf("found %d alerts and %d queries of panels", len(alerts), len(panels))
	}
	seen := map[string]bool{}
	for _, u := range append(alerts, panels...) {
		for _, s := range selector.FindAllStringSubmatch(u.expr, -1) {
			name, labels := s[1], s[2]
			f := exposed[name]
			if f == nil {
				t.Errorf("%s: no series %s", u.where, name)
				continue
			}
			seen[f.GetName()] = true
			for _, want := range matcher.FindAllStringSubmatch(labels, -1) {
				label := want[1]
				if label == "job" || label == "instance" { // of the scraper
					continue
				}
				for value := range strings.SplitSeq(want[3], "|") {
					if !hasLabel(f, label, value) {
						t.Errorf("%s: no series %s{%s=%q}", u.where, name, label, value)
					}
				}
			}
		}
	}
	for name := range exposed {
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count"), "_sum")
		if strings.HasPrefix(name, "leased_") && !seen[base] {
			t.Errorf("neither the dashboard nor an alert uses %s", name)
		}
	}
}

func hasLabel(f *dto.MetricFamily, name, value string) bool {
	for _, s := range f.GetMetric() {
		for _, l := range s.GetLabel() {
			if l.GetName() == name && l.GetValue() == value {
				return true
			}
		}
	}
	return false
}
