// go-dcp for `dcpctl conformance consumer`, with its defaults but for these: checkpoints are in a
// file below STATE_DIR (and so the membership is static), written once in 0.2 s instead of 20 s, so
// that a consumer that is killed has some; its own HTTP server is off, so that two can run. It tells
// each event as a line of JSON. go-dcp tells its listener nothing of a rollback: no line for one.
package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"github.com/Trendyol/go-dcp"
	"github.com/Trendyol/go-dcp/config"
	"github.com/Trendyol/go-dcp/models"
)

type Event struct {
	Op    string  `json:"op"`
	Vb    uint16  `json:"vb"`
	Seqno uint64  `json:"seqno"`
	Key   string  `json:"key"`
	Value *string `json:"value,omitempty"`
}

var out = json.NewEncoder(os.Stdout)

func listener(ctx *models.ListenerContext) {
	switch event := ctx.Event.(type) {
	case models.DcpMutation:
		value := string(event.Value)
		out.Encode(Event{"set", event.VbID, event.SeqNo, string(event.Key), &value})
	case models.DcpDeletion:
		out.Encode(Event{"delete", event.VbID, event.SeqNo, string(event.Key), nil})
	case models.DcpExpiration:
		out.Encode(Event{"delete", event.VbID, event.SeqNo, string(event.Key), nil})
	}
	ctx.Ack()
}

func main() {
	connector, err := dcp.NewDcp(&config.Dcp{
		Hosts:      []string{"http://" + os.Getenv("HOST") + ":" + os.Getenv("ADMIN_PORT")},
		Username:   os.Getenv("USERNAME"),
		Password:   os.Getenv("PASSWORD"),
		BucketName: os.Getenv("BUCKET"),
		Dcp: config.ExternalDcp{Group: config.DCPGroup{
			Name: "judged", Membership: config.DCPGroupMembership{Type: "static"},
		}},
		API:        config.API{Disabled: true},
		Checkpoint: config.Checkpoint{Interval: 200 * time.Millisecond},
		Metadata: config.Metadata{
			Type:   "file",
			Config: map[string]string{"fileName": filepath.Join(os.Getenv("STATE_DIR"), "checkpoints")},
		},
	}, listener)
	if err != nil {
		panic(err)
	}
	os.Stdout.WriteString("\n") // it has shown its configuration there, without an end of the line
	defer connector.Close()
	connector.Start()
}
