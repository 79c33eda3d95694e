// Package dcpdtest has a dcpd server for each test, in Go. Copy this file; it needs nothing but the
// command dcpd.
//
//	server := dcpdtest.Start(t)                 // it is closed when the test ends
//	myConsumer.Connect(server.Address())        // HOST:PORT of the key-value port
//	server.Failover(92, 2)                      // the newest two changes of partition 92 are lost
package dcpdtest

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

var port = regexp.MustCompile(`^ +(key-value|admin) +.*:(\d+)$`)

// Server is a process of dcpd with a folder of its own.
type Server struct {
	t               testing.TB
	folder          string
	options         []string
	port, adminPort string
	process         *exec.Cmd
}

// Start starts a server on free ports and a new folder. The options are those of dcpd.
func Start(t testing.TB, options ...string) *Server {
	t.Helper()
	s := &Server{t: t, folder: t.TempDir(), options: options, port: "0", adminPort: "0"}
	t.Cleanup(func() { s.end(syscall.SIGTERM) })
	s.Run()
	return s
}

// Address returns HOST:PORT for clients.
func (s *Server) Address() string { return "127.0.0.1:" + s.port }

// AdminURL returns the URL of the HTTP API.
func (s *Server) AdminURL() string { return "http://127.0.0.1:" + s.adminPort }

// Run starts the process again after Kill, with the same folder and ports.
func (s *Server) Run() {
	s.t.Helper()
	command := os.Getenv("DCPD")
	if command == "" {
		command = "dcpd"
	}
	arguments := append([]string{"--port", s.port, "--admin-port", s.adminPort,
		"--data", filepath.Join(s.folder, "data")}, s.options...)
	s.process = exec.Command(command, arguments...)
	s.process.Stderr = os.Stderr
	output, err := s.process.StdoutPipe()
	if err == nil {
		err = s.process.Start()
	}
	if err != nil {
		s.t.Fatalf("dcpd: %v", err)
	}
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if found := port.FindStringSubmatch(lines.Text()); found != nil {
			if found[1] == "admin" {
				s.adminPort = found[2]
			} else {
				s.port = found[2]
			}
		}
		if strings.HasPrefix(lines.Text(), "  try ") { // the last line: it is ready
			return
		}
	}
	s.t.Fatal("dcpd did not start: see its output")
}

// Kill kills it (SIGKILL). What was answered is on disk.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

func (s *Server) end(signal syscall.Signal) {
	if s.process != nil && s.process.Process != nil {
		s.process.Process.Signal(signal)
		s.process.Wait()
		s.process = nil
	}
}

// Branch undoes the changes of a partition above a seqno. Its streams end with reason 6.
func (s *Server) Branch(vb int, at uint64) string {
	s.t.Helper()
	return s.Post(fmt.Sprintf("vbuckets/%d/branch", vb), fmt.Sprintf(`{"at": %d}`, at))
}

// Failover fails over to a copy that was `lose` changes behind. Streams end with reason 2.
func (s *Server) Failover(vb int, lose uint64) string {
	s.t.Helper()
	return s.Post(fmt.Sprintf("vbuckets/%d/failover", vb), fmt.Sprintf(`{"lose": %d}`, lose))
}

// Post sends JSON to the HTTP API and returns the answer, which is JSON.
func (s *Server) Post(path, json string) string {
	s.t.Helper()
	request, err := http.NewRequest("POST", s.AdminURL()+"/api/v1/"+path, strings.NewReader(json))
	if err != nil {
		s.t.Fatal(err)
	}
	request.SetBasicAuth("guest", "guest")
	request.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	if answer.StatusCode >= 300 {
		s.t.Fatalf("%s: %s %s", path, answer.Status, body)
	}
	return string(body)
}
