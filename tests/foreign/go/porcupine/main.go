// Judges histories with Porcupine, as the second opinion beside the checkers in Python.
//
// Standard input has one history on each line: {"name": "...", "operations": [...]}, those of one
// key, which holds nothing at first. Standard output has one line for each: its name and "Ok",
// "Illegal" or "Unknown" (the time was over). The only argument is that time, for one history.
//
// The model is written anew from what the operations mean. A document is a value and its CAS. The
// CAS is 0 where nobody knows it: that of an operation without an answer, until an answer shows it.
// An operation without an answer may happen at any time after its call. At the end of a history it
// changes no answer, so "never" needs no rule of its own.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"
)

type document struct {
	exists bool
	value  string
	cas    uint64
}

type operation struct {
	Kind     string
	Called   int64
	Returned *int64  // null: there is no answer
	Outcome  string  // ok, absent, exists, not_stored, not_a_number
	Argument string  // what is written, appended, or added to a counter
	Asked    uint64  // the CAS that it asks for; 0: any
	Expected *string // the value that it asks for, where the CAS was read with one
	Initial  *string // the counter's first number
	Found    *string // the value of the answer
	Cas      uint64  // the CAS of the answer; 0: it has none
}

func (o *operation) matches(d document) bool {
	return (o.Asked == 0 || d.cas == 0 || d.cas == o.Asked) && (o.Expected == nil || *o.Expected == d.value)
}

func (o *operation) differs(d document) bool {
	return (o.Asked != 0 && d.cas != o.Asked) || (o.Expected != nil && *o.Expected != d.value)
}

func (o *operation) isConditional() bool { return o.Asked != 0 || o.Expected != nil }

// counted returns the counter after an addition, and whether there is one.
func (o *operation) counted(d document) (string, bool) {
	if !d.exists {
		if o.Initial == nil {
			return "", false
		}
		return *o.Initial, true
	}
	number, err := strconv.ParseUint(d.value, 10, 64)
	delta, bad := strconv.ParseUint(o.Argument, 10, 64)
	if err != nil || bad != nil || d.value[0] == '+' {
		return "", false
	}
	return strconv.FormatUint(number+delta, 10), true
}

// pushed returns a list with one more element.
func (o *operation) pushed(d document) string {
	if !d.exists {
		return "[" + o.Argument + "]"
	}
	return d.value[:len(d.value)-1] + "," + o.Argument + "]"
}

// done returns the document after the operation happens, and whether it happens to this document.
// Its CAS is that of the answer: 0 without one.
func (o *operation) done(d document) (document, bool) {
	written := document{true, o.Argument, o.Cas}
	switch o.Kind {
	case "set":
		return written, !o.isConditional() || (d.exists && o.matches(d))
	case "add":
		return written, !d.exists
	case "replace":
		return written, d.exists && o.matches(d)
	case "delete":
		return document{}, d.exists && o.matches(d)
	case "append":
		return document{true, d.value + o.Argument, o.Cas}, d.exists && o.matches(d)
	case "increment":
		number, can := o.counted(d)
		return document{true, number, o.Cas}, can
	case "touch", "get_and_touch":
		return document{true, d.value, o.Cas}, d.exists
	case "push":
		return document{true, o.pushed(d), o.Cas}, true
	case "set_with_meta":
		return written, true
	case "expire":
		return document{}, d.exists && o.matches(d) && (o.Argument == "" || o.Argument == d.value)
	}
	panic("no such kind of operation: " + o.Kind)
}

// answered returns the document after an operation with its answer, and whether that is right.
func (o *operation) answered(d document) (document, bool) {
	isConditional := o.Kind == "set" || o.Kind == "replace" || o.Kind == "delete" || o.Kind == "append"
	switch o.Outcome {
	case "ok":
		if o.Kind == "get" {
			isRight := d.exists && o.Found != nil && *o.Found == d.value
			isRight = isRight && (d.cas == 0 || o.Cas == 0 || d.cas == o.Cas)
			if o.Cas != 0 {
				d.cas = o.Cas
			}
			return d, isRight
		}
		after, happens := o.done(d)
		return after, happens && (o.Found == nil || *o.Found == after.value)
	case "absent":
		switch o.Kind {
		case "set":
			return d, !d.exists && o.isConditional()
		case "increment":
			return d, !d.exists && o.Initial == nil
		}
		return d, !d.exists
	case "exists":
		switch {
		case o.Kind == "set_with_meta": // it lost, to a document or to what is left of one
			return d, true
		case o.Kind == "add":
			return d, d.exists
		case o.Expected != nil: // a swap is refused also where the document is gone
			return d, !d.exists || o.differs(d)
		}
		return d, isConditional && d.exists && o.differs(d)
	case "not_stored":
		return d, o.Kind == "append" && !d.exists
	case "not_a_number":
		_, can := o.counted(d)
		return d, o.Kind == "increment" && d.exists && !can
	}
	panic("no such outcome: " + o.Outcome)
}

var model = porcupine.Model{
	Init: func() interface{} { return document{} },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		o, d := input.(*operation), state.(document)
		if !output.(bool) {
			after, happens := o.done(d)
			if !happens {
				after = d
			}
			return true, after
		}
		after, isRight := o.answered(d)
		return isRight, after
	},
}

func judge(operations []*operation, limit time.Duration) porcupine.CheckResult {
	history := make([]porcupine.Operation, len(operations))
	for at, each := range operations {
		history[at] = porcupine.Operation{ClientId: at, Input: each, Output: each.Returned != nil, Call: each.Called, Return: math.MaxInt64}
		if each.Returned != nil {
			history[at].Return = *each.Returned
		}
	}
	return porcupine.CheckOperationsTimeout(model, history, limit)
}

func main() {
	limit, err := time.ParseDuration(os.Args[1])
	if err != nil {
		panic(err)
	}
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	decoder := json.NewDecoder(lines)
	for decoder.More() {
		var history struct {
			Name       string
			Operations []*operation
		}
		if err := decoder.Decode(&history); err != nil {
			panic(err)
		}
		fmt.Printf("%s\t%s\n", judge(history.Operations, limit), history.Name)
	}
}
