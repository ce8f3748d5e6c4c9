// Writes schemas of Go's types, one a line: of structs drawn at random, which hold named ones, by
// alecthomas/jsonschema and by kin-openapi's openapi3gen. See tool_schemas.py.
package main

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"net"
	"net/url"
	"reflect"
	"time"

	"github.com/alecthomas/jsonschema"
	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3gen"
)

type Point struct {
	X int     `json:"x" jsonschema:"minimum=0,maximum=99"`
	Y float64 `json:"y,omitempty"`
}
type Color string
type Base struct {
	ID      int64  `json:"id"`
	Created string `json:"created,omitempty" jsonschema:"format=date-time"`
}
type Item struct {
	Base
	Name  string            `json:"name" jsonschema:"required,minLength=1,maxLength=20,title=the name"`
	Color Color             `json:"color" jsonschema:"enum=red,enum=blue"`
	Tags  []string          `json:"tags,omitempty" jsonschema:"uniqueItems=true,minItems=1"`
	Size  map[string]uint32 `json:"size"`
	At    *Point            `json:"at,omitempty"`
}
type Node struct {
	Value    interface{}      `json:"value"`
	Children []*Node          `json:"children,omitempty"`
	ByName   map[string]*Node `json:"by_name,omitempty"`
}
type Pattern struct {
	Code string `json:"code" jsonschema:"pattern=^[a-z]{2}-[0-9]+$"`
	Odd  int    `json:"odd" jsonschema:"multipleOf=3,exclusiveMinimum=true,minimum=3"`
}

var plain = []interface{}{"", int(0), int8(0), int32(0), int64(0), uint(0), uint8(0), uint64(0), float32(0), float64(0), true,
	[]byte{}, time.Time{}, time.Duration(0), url.URL{}, net.IP{}, json.RawMessage{}, json.Number(""),
	Point{}, &Point{}, Item{}, &Node{}, Pattern{}, Color(""), []string{}, []int{}, map[string]string{}, map[int]string{}, [3]int{}, map[string]interface{}{}, []interface{}{}, new(interface{})}
var names = []string{"ID", "Name", "Kind", "Tags", "Value", "Items", "Owner", "At", "Note"}
var tags = []string{"", ",omitempty", ",string", ",omitempty"}
var rules = []string{"", "", "description=a text", "title=T", "required", "default=1", "example=x"}

func kind(r *rand.Rand, depth int) reflect.Type {
	if depth == 0 || r.Float64() < 0.5 {
		return reflect.TypeOf(plain[r.Intn(len(plain))])
	}
	switch r.Intn(4) {
	case 0:
		return reflect.SliceOf(kind(r, depth-1))
	case 1:
		return reflect.MapOf(reflect.TypeOf(""), kind(r, depth-1))
	case 2:
		return reflect.PtrTo(structure(r, depth-1))
	}
	return structure(r, depth-1)
}
func structure(r *rand.Rand, depth int) reflect.Type {
	fields := []reflect.StructField{}
	for _, i := range r.Perm(len(names))[:1+r.Intn(4)] {
		tag := fmt.Sprintf(`json:"%s%s" jsonschema:"%s"`, names[i], tags[r.Intn(len(tags))], rules[r.Intn(len(rules))])
		fields = append(fields, reflect.StructField{Name: names[i], Type: kind(r, depth), Tag: reflect.StructTag(tag)})
	}
	return reflect.StructOf(fields)
}
func show(schema interface{}) {
	if text, err := json.Marshal(schema); err == nil {
		fmt.Println(string(text))
	}
}
func main() {
	r := rand.New(rand.NewSource(3))
	named := []interface{}{&Point{}, &Item{}, &Node{}, &Pattern{}, &Base{}}
	for i := 0; i < 130; i++ {
		var value interface{}
		if i < len(named) {
			value = named[i]
		} else {
			value = reflect.New(structure(r, 2)).Interface()
		}
		for _, each := range []jsonschema.Reflector{{}, {AllowAdditionalProperties: true, RequiredFromJSONSchemaTags: true}, {ExpandedStruct: true, FullyQualifyTypeNames: true}}[:1+r.Intn(3)] {
			func() { defer func() { recover() }(); show(each.Reflect(value)) }()
		}
		func() {
			defer func() { recover() }()
			parts := openapi3.Schemas{}
			schema, err := openapi3gen.NewSchemaRefForValue(value, parts)
			if err == nil && len(parts) == 0 {
				show(schema.Value)
			} else if err == nil {
				parts["Top"] = schema
				components := map[string]interface{}{"schemas": parts}
				show(map[string]interface{}{"$ref": "#/components/schemas/Top", "components": components})
			}
		}()
	}
}
