// gocbcore for `dcpctl conformance consumer`: it finds HOST, PORT, ADMIN_PORT and STATE_DIR in its
// environment, goes on from the positions that it saved, and tells each event as a line of JSON.
// gocbcore is the wire: what follows a ROLLBACK or an ended stream is the application's, so it is
// here. Arguments: "oso" asks for out-of-order snapshots, "history" for history streams.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"
)

// Place is a position in a partition, with the failover log that goes with it.
type Place struct {
	Vb    uint16
	Seqno uint64
	Start uint64
	End   uint64
	Log   []gocbcore.FailoverEntry
}

// uuid returns the version that had the position's seqno.
func (place *Place) uuid() gocbcore.VbUUID {
	for _, entry := range place.Log {
		if place.Seqno > 0 && uint64(entry.SeqNo) <= place.Seqno {
			return entry.VbUUID
		}
	}
	return 0
}

type Event struct {
	Op    string  `json:"op"`
	Vb    uint16  `json:"vb"`
	Seqno uint64  `json:"seqno"`
	Key   string  `json:"key"`
	Value *string `json:"value,omitempty"`
}

// Consumer observes all partitions. Its state is a file of places, of which the last one counts.
type Consumer struct {
	lock   sync.Mutex
	agent  *gocbcore.DCPAgent
	mode   string
	state  *os.File
	out    *json.Encoder
	places map[uint16]*Place
	inOso  map[uint16]uint64 // partition -> highest seqno of a snapshot that is out of order
}

func (c *Consumer) save(place *Place) {
	line, _ := json.Marshal(place)
	c.state.Write(append(line, '\n'))
}

func (c *Consumer) take(vb uint16, seqno uint64, event *Event) {
	c.lock.Lock()
	defer c.lock.Unlock()
	if event != nil {
		c.out.Encode(event)
	}
	place := c.places[vb]
	if highest, isOut := c.inOso[vb]; isOut { // the position stays before it until it is complete
		c.inOso[vb] = max(highest, seqno)
		return
	}
	place.Seqno = seqno
	c.save(place)
}

func (c *Consumer) goBack(vb uint16, seqno uint64) {
	c.lock.Lock()
	defer c.lock.Unlock()
	c.out.Encode(Event{Op: "rollback", Vb: vb, Seqno: seqno})
	place := c.places[vb]
	place.Seqno, place.Start, place.End = seqno, seqno, seqno
	c.save(place)
}

func (c *Consumer) open(vb uint16) {
	c.lock.Lock()
	delete(c.inOso, vb)
	place := *c.places[vb]
	c.lock.Unlock()
	options := gocbcore.OpenStreamOptions{}
	if c.mode == "oso" {
		options.FilterOptions = &gocbcore.OpenStreamFilterOptions{CollectionIDs: []uint32{0}}
	}
	opened := func(log []gocbcore.FailoverEntry, err error) {
		var rollback gocbcore.DCPRollbackError
		switch {
		case err == nil:
			c.lock.Lock()
			c.places[vb].Log = log
			c.save(c.places[vb])
			c.lock.Unlock()
			return
		case errors.As(err, &rollback):
			c.goBack(vb, uint64(rollback.SeqNo))
			go c.open(vb)
			return
		case errors.Is(err, gocbcore.ErrMemdRangeError):
			c.goBack(vb, 0)
		}
		time.AfterFunc(100*time.Millisecond, func() { c.open(vb) })
	}
	_, err := c.agent.OpenStream(vb, 0, place.uuid(), gocbcore.SeqNo(place.Seqno), math.MaxUint64,
		gocbcore.SeqNo(min(place.Start, place.Seqno)), gocbcore.SeqNo(max(place.End, place.Seqno)),
		c, options, opened)
	if err != nil {
		time.AfterFunc(100*time.Millisecond, func() { c.open(vb) })
	}
}

func (c *Consumer) SnapshotMarker(marker gocbcore.DcpSnapshotMarker) {
	c.lock.Lock()
	defer c.lock.Unlock()
	place := c.places[marker.VbID]
	place.Start, place.End = marker.StartSeqNo, marker.EndSeqNo
}

func (c *Consumer) Mutation(m gocbcore.DcpMutation) {
	value := string(m.Value)
	c.take(m.VbID, m.SeqNo, &Event{Op: "set", Vb: m.VbID, Seqno: m.SeqNo, Key: string(m.Key), Value: &value})
}

func (c *Consumer) Deletion(d gocbcore.DcpDeletion) {
	c.take(d.VbID, d.SeqNo, &Event{Op: "delete", Vb: d.VbID, Seqno: d.SeqNo, Key: string(d.Key)})
}

func (c *Consumer) Expiration(e gocbcore.DcpExpiration) {
	c.take(e.VbID, e.SeqNo, &Event{Op: "delete", Vb: e.VbID, Seqno: e.SeqNo, Key: string(e.Key)})
}

func (c *Consumer) End(end gocbcore.DcpStreamEnd, _ error) {
	time.AfterFunc(20*time.Millisecond, func() { c.open(end.VbID) })
}

func (c *Consumer) OSOSnapshot(oso gocbcore.DcpOSOSnapshot) {
	c.lock.Lock()
	defer c.lock.Unlock()
	if oso.SnapshotType == 1 {
		c.inOso[oso.VbID] = 0
		return
	}
	place := c.places[oso.VbID]
	place.Seqno = c.inOso[oso.VbID]
	place.Start, place.End = place.Seqno, place.Seqno
	delete(c.inOso, oso.VbID)
	c.save(place)
}

func (c *Consumer) SeqNoAdvanced(a gocbcore.DcpSeqNoAdvanced) { c.take(a.VbID, a.SeqNo, nil) }

func (c *Consumer) CreateCollection(e gocbcore.DcpCollectionCreation) { c.take(e.VbID, e.SeqNo, nil) }
func (c *Consumer) DeleteCollection(e gocbcore.DcpCollectionDeletion) { c.take(e.VbID, e.SeqNo, nil) }
func (c *Consumer) FlushCollection(e gocbcore.DcpCollectionFlush)     { c.take(e.VbID, e.SeqNo, nil) }
func (c *Consumer) CreateScope(e gocbcore.DcpScopeCreation)           { c.take(e.VbID, e.SeqNo, nil) }
func (c *Consumer) DeleteScope(e gocbcore.DcpScopeDeletion)           { c.take(e.VbID, e.SeqNo, nil) }
func (c *Consumer) ModifyCollection(e gocbcore.DcpCollectionModification) {
	c.take(e.VbID, e.SeqNo, nil)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	consumer := &Consumer{
		out: json.NewEncoder(os.Stdout), places: map[uint16]*Place{}, inOso: map[uint16]uint64{},
	}
	if len(os.Args) > 1 {
		consumer.mode = os.Args[1]
	}
	path := filepath.Join(os.Getenv("STATE_DIR"), "places")
	if saved, err := os.Open(path); err == nil {
		lines := bufio.NewScanner(saved)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			place := &Place{}
			if json.Unmarshal(lines.Bytes(), place) == nil {
				consumer.places[place.Vb] = place
			}
		}
	}
	var err error
	consumer.state, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	check(err)
	host := os.Getenv("HOST")
	config := &gocbcore.DCPAgentConfig{
		BucketName: os.Getenv("BUCKET"),
		SeedConfig: gocbcore.SeedConfig{
			HTTPAddrs: []string{host + ":" + os.Getenv("ADMIN_PORT")},
			MemdAddrs: []string{host + ":" + os.Getenv("PORT")},
		},
		SecurityConfig: gocbcore.SecurityConfig{Auth: gocbcore.PasswordAuthProvider{
			Username: os.Getenv("USERNAME"), Password: os.Getenv("PASSWORD"),
		}},
		CompressionConfig: gocbcore.CompressionConfig{Enabled: true},
		IoConfig:          gocbcore.IoConfig{UseCollections: consumer.mode == "oso"},
		DCPConfig: gocbcore.DCPConfig{
			UseExpiryOpcode:  true,
			UseOSOBackfill:   consumer.mode == "oso",
			UseChangeStreams: consumer.mode == "history",
		},
	}
	consumer.agent, err = gocbcore.CreateDcpAgent(config, fmt.Sprintf("judged-%d", os.Getpid()), memd.DcpOpenFlagProducer)
	check(err)
	ready := make(chan error)
	_, err = consumer.agent.WaitUntilReady(time.Now().Add(time.Minute), gocbcore.WaitUntilReadyOptions{
		RetryStrategy: gocbcore.NewBestEffortRetryStrategy(nil),
	}, func(_ *gocbcore.WaitUntilReadyResult, err error) { ready <- err })
	check(err)
	check(<-ready)
	snapshot, err := consumer.agent.ConfigSnapshot()
	check(err)
	partitions, err := snapshot.NumVbuckets()
	check(err)
	for vb := range uint16(partitions) {
		if consumer.places[vb] == nil {
			consumer.places[vb] = &Place{Vb: vb}
		}
	}
	for vb := range uint16(partitions) {
		consumer.open(vb)
	}
	select {}
}
