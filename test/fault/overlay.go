package fault

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// overlay is source that a build uses in place of files, by their absolute paths. The
// files stay as they are.
type overlay map[string]string

// write makes o a file for the -overlay flag of the go command.
func (o overlay) write(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	list := struct{ Replace map[string]string }{map[string]string{}}
	for path, text := range o {
		laid := filepath.Join(dir, fmt.Sprintf("%d.go", len(list.Replace)))
		if err := os.WriteFile(laid, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		list.Replace[path] = laid
	}
	body, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(path, body, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Change replaces a text of a file of this module. The text must stand there exactly
// once, so that a change cannot rot.
type Change struct{ File, Old, New string }

// lay lays changes over the module at root.
func lay(root string, changes []Change) (overlay, error) {
	o := overlay{}
	for _, c := range changes {
		path := filepath.Join(root, filepath.FromSlash(c.File))
		text, ok := o[path]
		if !ok {
			b, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			text = string(b)
		}
		if n := strings.Count(text, c.Old); n != 1 {
			return nil, fmt.Errorf("%s: this stands there %d times, not once:\n%s", c.File, n, c.Old)
		}
		o[path] = strings.Replace(text, c.Old, c.New, 1)
	}
	return o, nil
}
