// A producer and a reader in Go: submits a job and prints its tokens as they come. It is
// ops/guides/protocol.md in code, for one server; wire.go has RESP and MessagePack.
//
//	go run ops/examples/go/*.go redis://localhost:6379/0 smollm2-135m-instruct "Why is the sky blue?"
//	go run ops/examples/go/*.go redis://localhost:6379/0 smollm2-135m-instruct --read JOB
package main

import (
	"cmp"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	silence   = 5 * time.Second // after this long without a message, read the log: pub/sub may have lost it
	maxTokens = 64
	page      = 1000 // log entries a call
)

func main() {
	if len(os.Args) < 4 {
		exit(errors.New("give URL QUEUE PROMPT, or URL QUEUE --read JOB"))
	}
	p := producer{server: dial(os.Args[1]), base: "tm:{" + os.Args[2] + "}:"}
	job := os.Args[len(os.Args)-1]
	if os.Args[3] != "--read" {
		var err error
		if job, err = p.submit(os.Args[3]); err != nil {
			exit(err)
		}
	}
	fmt.Fprintln(os.Stderr, "job", job)
	texts := map[int]string{}
	r := reader{producer: p, job: job, has: map[int]int{}, ended: map[int]bool{}}
	r.emit = func(choice int, text string) {
		texts[choice] += text
		if choice == 0 {
			fmt.Print(text)
		}
	}
	if err := r.read(); err != nil {
		exit(err)
	}
	for _, choice := range slices.Sorted(maps.Keys(texts)) {
		if choice > 0 {
			fmt.Printf("\n[%d] %s", choice, texts[choice])
		}
	}
	fmt.Println()
	end := text(r.end["status"])
	if failure, _ := r.end["error"].(map[string]any); text(failure["message"]) != "" {
		end += ": " + text(failure["message"])
	}
	fmt.Fprintln(os.Stderr, end)
	if end != "succeeded" {
		os.Exit(1)
	}
}

func exit(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

var lua = cmp.Or(os.Getenv("TOKENMILL_LUA"), "api_client/tokenmill/lua")

// ---- submit ----

type producer struct {
	server *conn
	base   string
}

// script runs a script of tokenmill: by its SHA-1, or with its text if the server does not have it yet.
func (p producer) script(name string, arguments ...any) []any {
	common, missing := os.ReadFile(filepath.Join(lua, "common.lua"))
	own, missingToo := os.ReadFile(filepath.Join(lua, name+".lua"))
	if err := errors.Join(missing, missingToo); err != nil {
		p.server.err = err
	}
	script := string(common) + "\n" + string(own)
	call := append([]any{1, p.base + "meta", p.base, "PUBLISH"}, arguments...)
	sum := sha1.Sum([]byte(script))
	reply := p.server.call("EVALSHA", append([]any{hex.EncodeToString(sum[:])}, call...)...)
	if err := p.server.err; err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
		p.server.err = nil
		return p.server.call("EVAL", append([]any{script}, call...)...)
	}
	return reply
}

// submit returns the job's id.
func (p producer) submit(prompt string) (string, error) {
	request := map[string]any{
		"messages": []any{map[string]any{"role": "user", "content": prompt}},
		"params":   map[string]any{"max_tokens": maxTokens},
	}
	fingerprint := fmt.Sprintf("%x", sha256.Sum256(pack(nil, request)))
	job, now := rand.Text(), time.Now().UnixMilli()
	request["job_id"], request["created_ms"] = job, now
	cost := utf8.RuneCountInString(prompt)/4 + maxTokens
	words := p.script("submit", 0, 0, // the queue's own limits
		job, "standard", "", fingerprint, "", string(pack(nil, request)), now, 0, 0, cost, "")
	if p.server.err != nil {
		return "", p.server.err
	}
	if words[0] != "ok" {
		return "", fmt.Errorf("refused: %s", strings.Trim(fmt.Sprint(words), "[]"))
	}
	return text(words[1]), nil
}

// outcome returns the job's result, or nil before its end. A job that ended while it waited has a status and an error.
func (p producer) outcome(job string) map[string]any {
	record := p.server.call("HMGET", p.base+"job:"+job, "state", "settled", "result", "error")
	switch {
	case p.server.err != nil:
		return nil
	case record[0] == nil:
		p.server.err = errors.New("unknown job, or its record has expired")
		return nil
	case record[1] != nil:
		return unpack(record[2])
	case slices.Contains([]string{"scheduled", "queued", "running"}, text(record[0])):
		return nil
	}
	return map[string]any{"status": record[0], "error": map[string]any{"message": record[3]}}
}

// ---- read ----

// reader emits each token of a job once and in order, whenever it starts and whatever pub/sub loses.
type reader struct {
	producer
	job   string
	emit  func(choice int, text string)
	has   map[int]int    // choice → how many of its tokens were emitted
	ended map[int]bool   // choices whose end was emitted
	end   map[string]any // the job's last chunk, or its result: both have status, and perhaps error
}

func (r *reader) read() error {
	channel := r.server.subscribe(r.base + "chunks:" + r.job) // first subscribe, then read the log
	defer channel.close()
	for r.end == nil && channel.err == nil && r.catchUp("-") {
		for message := range channel.messages(silence) { // ends after a silence, and after a new connection
			if isWhole := r.take(unpack(message)); !isWhole || r.end != nil {
				break
			}
		}
	}
	return cmp.Or(r.server.err, channel.err)
}

// catchUp reads the log from an entry on, then the job's result; it returns whether the job goes on.
func (r *reader) catchUp(start string) bool {
	entries := r.server.call("XRANGE", r.base+"log:"+r.job, start, "+", "COUNT", page)
	for _, entry := range entries { // id, [chunk, bytes]
		r.take(unpack(list(list(entry)[1])[1]))
	}
	if len(entries) == page {
		return r.catchUp("(" + text(list(entries[page-1])[0]))
	}
	r.end = r.outcome(r.job)
	for _, choice := range parts(r.end["choices"]) {
		if c := number(choice["index"]); !r.ended[c] {
			r.emit(c, textFrom(choice, r.has[c]))
		}
	}
	return r.end == nil && r.server.err == nil
}

// take emits what is new in a chunk; it returns false if earlier tokens are missing.
func (r *reader) take(chunk map[string]any) bool {
	c, index, n := number(chunk["choice"]), number(chunk["index"]), max(1, number(chunk["n"]))
	has, tokens, isLast := r.has[c], len(list(chunk["token_ids"])), chunk["status"] != nil
	switch { // the last chunk of several choices comes when all have ended
	case isLast && n > 1 && len(r.ended) < n, (!isLast || n == 1) && index > has:
		return false
	case isLast:
		r.emit(c, textFrom(chunk, 0))
		r.end = chunk
	case tokens == 0 && !r.ended[c], index+tokens > has:
		r.emit(c, textFrom(chunk, has-index))
		r.has[c] = index + tokens
	}
	if chunk["finish_reason"] != nil {
		r.ended[c] = true
	}
	return true
}

// textFrom returns the text of a chunk or choice without its first tokens. text_ends counts code points.
func textFrom(part map[string]any, skip int) string {
	if skip == 0 {
		return text(part["text"])
	}
	return string([]rune(text(part["text"]))[number(list(part["text_ends"])[skip-1]):])
}
