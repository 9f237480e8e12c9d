package schemas

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"strings"
)

// bundle gives the schema of a file with everything it refers to. A reference that says nothing else is
// replaced by what it refers to (that is also what makes validation cheap); the others are kept and point
// into the schema's own $defs.
func bundle(fsys fs.FS, file string) (map[string]any, error) {
	b := bundler{fsys: fsys, defs: map[string]any{}}
	doc, err := b.doc(file)
	if err != nil {
		return nil, err
	}
	delete(doc, "$defs")
	v, err := b.expand(doc, file)
	if err != nil {
		return nil, err
	}
	root := v.(map[string]any)
	if len(b.defs) > 0 {
		root["$defs"] = b.defs
	}
	return root, nil
}

type bundler struct {
	fsys fs.FS
	defs map[string]any
}

func (b *bundler) doc(file string) (map[string]any, error) {
	raw, err := fs.ReadFile(b.fsys, file)
	if err != nil {
		return nil, err
	}
	v, err := parse(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	doc, ok := v.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%s is not an object", file)
	}
	return doc, nil
}

// expand gives v, which stands in file, without references to other files.
func (b *bundler) expand(v any, file string) (any, error) {
	switch v := v.(type) {
	case []any:
		list := make([]any, len(v))
		for i, item := range v {
			var err error
			if list[i], err = b.expand(item, file); err != nil {
				return nil, err
			}
		}
		return list, nil
	case map[string]any:
		object := make(map[string]any, len(v))
		annotated := true // and nothing else
		for name, item := range v {
			var err error
			if object[name], err = b.expand(item, file); err != nil {
				return nil, err
			}
			annotated = annotated && (name == "$ref" || name == "description")
		}
		ref, ok := object["$ref"].(string)
		if !ok {
			return object, nil
		}
		name, def, err := b.resolve(ref, file)
		if err != nil {
			return nil, err
		}
		if !annotated {
			if have, ok := b.defs[name]; ok && !reflect.DeepEqual(have, any(def)) {
				return nil, fmt.Errorf("two definitions are called %s", name)
			}
			b.defs[name] = def
			object["$ref"] = "#/$defs/" + name
			return object, nil
		}
		delete(object, "$ref")
		for name, item := range def {
			if _, ok := object[name]; !ok {
				object[name] = item
			}
		}
		return object, nil
	default:
		return v, nil
	}
}

// resolve gives what ref, written in file, refers to, expanded: FILE as a whole or one of its $defs.
func (b *bundler) resolve(ref, file string) (name string, def map[string]any, err error) {
	target, fragment, _ := strings.Cut(ref, "#")
	if target == "" {
		target = file
	}
	doc, err := b.doc(target)
	if err != nil {
		return "", nil, err
	}
	name, def = strings.TrimSuffix(target, ".json"), doc
	if fragment != "" {
		name = path.Base(fragment)
		defs, _ := doc["$defs"].(map[string]any)
		def, _ = defs[name].(map[string]any)
		if def == nil || fragment != "/$defs/"+name {
			return "", nil, fmt.Errorf("%s: %s refers to nothing", file, ref)
		}
	}
	delete(def, "$id")
	delete(def, "$schema")
	v, err := b.expand(def, target)
	if err != nil {
		return "", nil, err
	}
	return name, v.(map[string]any), nil
}

// closeMembers replaces the propertyNames of a request, the list of the whole family, by the equal but
// cheaper additionalProperties, and gives the list.
func closeMembers(request map[string]any) ([]string, error) {
	family, _ := request["propertyNames"].(map[string]any)
	list, _ := family["enum"].([]any)
	properties, _ := request["properties"].(map[string]any)
	if list == nil || properties == nil {
		return nil, errors.New("a request needs properties, and propertyNames with an enum")
	}
	names := make([]string, len(list))
	for i, item := range list {
		names[i] = item.(string)
		if _, ok := properties[names[i]]; !ok {
			properties[names[i]] = map[string]any{"description": "Known, but this call does not look at its value, which may be anything but an object or a list."}
		}
	}
	if len(properties) != len(names) {
		return nil, errors.New("a member of this request is not in the list of propertyNames")
	}
	delete(request, "propertyNames")
	request["additionalProperties"] = false // P1
	return names, nil
}

func compact(doc any) (string, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(doc); err != nil {
		return "", err
	}
	return strings.TrimSpace(out.String()), nil
}
