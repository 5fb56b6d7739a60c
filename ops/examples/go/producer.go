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
	"io"
	"maps"
	"net"
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
	attempts  = 60   // to connect again, one a second
)

func main() {
	if len(os.Args) < 4 {
		exit(errors.New("give URL QUEUE PROMPT, or URL QUEUE --read JOB"))
	}
	address, base := os.Args[1], "tm:{"+os.Args[2]+"}:"
	job := os.Args[len(os.Args)-1]
	if os.Args[3] != "--read" {
		var err error
		if job, err = submit(address, base, os.Args[3]); err != nil {
			exit(err)
		}
	}
	fmt.Fprintln(os.Stderr, "job", job)
	texts := map[int]string{}
	r := reader{address: address, base: base, job: job, has: map[int]int{}, ended: map[int]bool{}}
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
	end := r.status
	if r.failure != "" {
		end += ": " + r.failure
	}
	fmt.Fprintln(os.Stderr, end)
	if r.status != "succeeded" {
		os.Exit(1)
	}
}

func exit(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// ---- submit ----

var lua = cmp.Or(os.Getenv("TOKENMILL_LUA"), "api_client/tokenmill/lua")

// script runs a script of tokenmill: by its SHA-1, or with its text if the server does not have it yet.
func (c *conn) script(name, base string, arguments ...any) (any, error) {
	var text []string
	for _, file := range []string{"common.lua", name + ".lua"} {
		content, err := os.ReadFile(filepath.Join(lua, file))
		if err != nil {
			return nil, err
		}
		text = append(text, string(content))
	}
	script := strings.Join(text, "\n")
	call := append([]any{1, base + "meta", base, "PUBLISH"}, arguments...)
	sum := sha1.Sum([]byte(script))
	answer, err := c.do("EVALSHA", append([]any{hex.EncodeToString(sum[:])}, call...)...)
	if err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
		return c.do("EVAL", append([]any{script}, call...)...)
	}
	return answer, err
}

// submit returns the job's id.
func submit(address, base, prompt string) (string, error) {
	server, err := dial(address)
	if err != nil {
		return "", err
	}
	defer server.Close()
	request := map[string]any{
		"messages": []any{map[string]any{"role": "user", "content": prompt}},
		"params":   map[string]any{"max_tokens": maxTokens},
	}
	fingerprint := fmt.Sprintf("%x", sha256.Sum256(pack(nil, request)))
	job, now := rand.Text(), time.Now().UnixMilli()
	request["job_id"], request["created_ms"] = job, now
	cost := utf8.RuneCountInString(prompt)/4 + maxTokens
	answer, err := server.script("submit", base, 0, 0, // the queue's own limits
		job, "standard", "", fingerprint, "", string(pack(nil, request)), now, 0, 0, cost)
	if err != nil {
		return "", err
	}
	words := list(answer)
	if words[0] != "ok" {
		return "", fmt.Errorf("refused: %s", strings.Trim(fmt.Sprint(words), "[]"))
	}
	return words[1].(string), nil
}

// ---- read ----

type taken int

const (
	ok   taken = iota
	gap        // earlier tokens are missing
	done       // the job's last chunk
)

// reader emits each token of a job once and in order, whenever it starts and whatever pub/sub loses.
type reader struct {
	address, base, job string
	emit               func(choice int, text string)
	has                map[int]int  // by choice: how many of its tokens were emitted
	ended              map[int]bool // choices that have ended
	status, failure    string       // the job's final state; one sentence, or empty
}

// read returns when the job has ended. A lost connection is made again.
func (r *reader) read() error {
	for failures := 0; ; failures++ {
		err := r.follow()
		var lost net.Error
		if !errors.Is(err, io.EOF) && !errors.As(err, &lost) || failures == attempts {
			return err
		}
		time.Sleep(time.Second)
	}
}

func (r *reader) follow() error {
	server, err := dial(r.address)
	if err != nil {
		return err
	}
	defer server.Close()
	channel, err := dial(r.address)
	if err != nil {
		return err
	}
	defer channel.Close()
	if _, err := channel.do("SUBSCRIBE", r.base+"chunks:"+r.job); err != nil {
		return err // subscribe first, then read the log: nothing falls between
	}
	for {
		if isOver, err := r.catchUp(server); isOver || err != nil {
			return err
		}
		for state := ok; state == ok; {
			message, err := channel.await(silence)
			if err != nil {
				return err
			}
			if message == nil {
				break
			}
			chunk := unpack(list(message)[2]) // "message", channel, chunk
			if state = r.take(chunk); state == done {
				return nil
			}
		}
	}
}

// catchUp reads the log and the job's record; it returns whether the job has ended.
func (r *reader) catchUp(server *conn) (bool, error) {
	for start, more := "-", true; more; {
		answer, err := server.do("XRANGE", r.base+"log:"+r.job, start, "+", "COUNT", page)
		if err != nil {
			return false, err
		}
		entries := list(answer)
		more = len(entries) == page
		for _, entry := range entries {
			id, fields := list(entry)[0].(string), list(list(entry)[1]) // one field, chunk, and its value
			start = "(" + id
			if r.take(unpack(fields[1])) == gap {
				more = false
				break
			}
		}
	}
	answer, err := server.do("HMGET", r.base+"job:"+r.job, "state", "settled", "result", "error")
	if err != nil {
		return false, err
	}
	record := list(answer)
	state, _ := record[0].(string)
	switch {
	case record[0] == nil:
		return false, errors.New("unknown job, or its record has expired")
	case record[1] != nil:
		result := unpack(record[2])
		for _, each := range list(result["choices"]) {
			choice := each.(map[string]any)
			c := number(choice["index"])
			r.emit(c, after(choice, r.has[c]))
		}
		r.failure = message(result)
	case slices.Contains([]string{"failed", "cancelled", "expired", "dead"}, state): // it ended while it waited
		r.failure, _ = record[3].(string)
	default:
		return false, nil
	}
	r.status = state
	return true, nil
}

func (r *reader) take(chunk map[string]any) taken {
	c, index, n := number(chunk["choice"]), number(chunk["index"]), max(1, number(chunk["n"]))
	had, tokens := r.has[c], len(list(chunk["token_ids"]))
	if status, isLast := chunk["status"].(string); isLast {
		if n == 1 && index > had || n > 1 && len(r.ended) < n {
			return gap
		}
		r.emit(c, after(chunk, 0))
		r.status, r.failure = status, message(chunk)
		return done
	}
	if index > had {
		return gap
	}
	if chunk["finish_reason"] != nil {
		r.ended[c] = true
	}
	if index+tokens > had {
		r.emit(c, after(chunk, had-index))
		r.has[c] = index + tokens
	}
	return ok
}

// after returns the text of a chunk or choice without its first tokens. text_ends counts code points.
func after(part map[string]any, tokens int) string {
	text, _ := part["text"].(string)
	if tokens == 0 {
		return text
	}
	return string([]rune(text)[number(list(part["text_ends"])[tokens-1]):])
}

// message returns the error's sentence, or an empty text.
func message(part map[string]any) string {
	failure, _ := part["error"].(map[string]any)
	text, _ := failure["message"].(string)
	return text
}
