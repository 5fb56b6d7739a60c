// RESP over TCP, and MessagePack. A Redis client and a MessagePack module can replace this file.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

const attempts = 60 // to connect again, one a second

// conn is a connection that is made again when it is lost, and with it its subscription. The first error that
// remains is kept in err; later calls return nothing, as with bufio.Scanner.
type conn struct {
	net.Conn
	in      *bufio.Reader
	address string
	channel string // subscribed, or empty
	err     error
}

func dial(address string) *conn {
	c := &conn{address: address}
	c.err = c.open()
	return c
}

func (c *conn) subscribe(channel string) *conn {
	other := &conn{address: c.address, channel: channel}
	other.err = other.open()
	return other
}

func (c *conn) open() error {
	u, err := url.Parse(c.address)
	if err != nil {
		return err
	}
	if c.Conn, err = net.Dial("tcp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "6379"))); err != nil {
		return err
	}
	c.in = bufio.NewReader(c.Conn)
	if password, isSet := u.User.Password(); isSet {
		_, err = c.do("AUTH", cmp.Or(u.User.Username(), "default"), password)
	}
	if database := strings.Trim(u.Path, "/"); database != "" && err == nil {
		_, err = c.do("SELECT", database)
	}
	if c.channel != "" && err == nil {
		_, err = c.do("SUBSCRIBE", c.channel)
	}
	return err
}

func (c *conn) close() {
	if c.Conn != nil {
		c.Conn.Close()
	}
}

// refusal is an error that the server answered.
type refusal string

func (r refusal) Error() string { return string(r) }

// reopen connects again if the connection was lost, and else returns the error.
func (c *conn) reopen(err error) error {
	for range attempts {
		if errors.As(err, new(refusal)) {
			return err
		}
		c.close()
		time.Sleep(time.Second)
		if err = c.open(); err == nil {
			return nil
		}
	}
	return err
}

// call returns the items of the reply. Every call of the protocol may be repeated.
func (c *conn) call(command string, arguments ...any) []any {
	if c.err != nil {
		return nil
	}
	reply, err := c.do(command, arguments...)
	if err != nil {
		if c.err = c.reopen(err); c.err == nil {
			reply, c.err = c.do(command, arguments...)
		}
	}
	return list(reply)
}

// messages yields what is published, until nothing comes for that long or the connection was made again.
func (c *conn) messages(silence time.Duration) iter.Seq[any] {
	return func(yield func(any) bool) {
		for c.err == nil {
			c.SetReadDeadline(time.Now().Add(silence))
			_, err := c.in.Peek(1)
			c.SetReadDeadline(time.Time{})
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			var message any
			if err == nil {
				message, err = c.reply()
			}
			if err != nil {
				c.err = c.reopen(err)
				return
			}
			if !yield(list(message)[2]) { // "message", channel, bytes
				return
			}
		}
	}
}

func (c *conn) do(command string, arguments ...any) (any, error) {
	out := fmt.Appendf(nil, "*%d\r\n$%d\r\n%s\r\n", len(arguments)+1, len(command), command)
	for _, argument := range arguments {
		text := fmt.Sprint(argument)
		out = fmt.Appendf(out, "$%d\r\n%s\r\n", len(text), text)
	}
	if _, err := c.Write(out); err != nil {
		return nil, err
	}
	return c.reply()
}

// reply reads one reply: texts and bytes are strings, numbers int64, arrays []any; nothing is nil.
func (c *conn) reply() (any, error) {
	line, err := c.in.ReadString('\n')
	if err != nil {
		return nil, err
	}
	kind, rest := line[0], strings.TrimRight(line[1:], "\r\n")
	switch kind {
	case '+':
		return rest, nil
	case '-':
		return nil, refusal(rest)
	case ':':
		return strconv.ParseInt(rest, 10, 64)
	}
	size, err := strconv.Atoi(rest)
	if err != nil || size < 0 {
		return nil, err
	}
	if kind == '$' {
		text := make([]byte, size+2)
		_, err := io.ReadFull(c.in, text)
		return string(text[:size]), err
	}
	items := make([]any, size)
	for i := range items {
		if items[i], err = c.reply(); err != nil {
			return nil, err
		}
	}
	return items, nil
}

// ---- MessagePack ----

// pack appends a value of these types: string, int, int64, []any, map[string]any.
func pack(out []byte, value any) []byte {
	switch value := value.(type) {
	case string:
		return append(binary.BigEndian.AppendUint32(append(out, 0xdb), uint32(len(value))), value...)
	case int:
		return pack(out, int64(value))
	case int64:
		return binary.BigEndian.AppendUint64(append(out, 0xd3), uint64(value))
	case []any:
		out = binary.BigEndian.AppendUint32(append(out, 0xdd), uint32(len(value)))
		for _, item := range value {
			out = pack(out, item)
		}
	case map[string]any:
		out = binary.BigEndian.AppendUint32(append(out, 0xdf), uint32(len(value)))
		for _, name := range slices.Sorted(maps.Keys(value)) {
			out = pack(pack(out, name), value[name])
		}
	default:
		panic(fmt.Sprintf("a %T is not packed", value))
	}
	return out
}

// unpack decodes one of the protocol's messages, all of which are maps with text keys.
func unpack(message any) map[string]any {
	return decode(bytes.NewReader([]byte(message.(string)))).(map[string]any)
}

// decode reads nil, bool, int64, float64, string (text and bytes), []any or map[string]any.
func decode(in *bytes.Reader) any {
	b, _ := in.ReadByte()
	switch {
	case b < 0x80 || b >= 0xe0:
		return int64(int8(b))
	case b < 0x90:
		return decodeMap(in, int(b&15))
	case b < 0xa0:
		return decodeList(in, int(b&15))
	case b < 0xc0:
		return decodeText(in, int(b&31))
	}
	switch b {
	case 0xc0:
		return nil
	case 0xc2, 0xc3:
		return b == 0xc3
	case 0xc4, 0xc5, 0xc6:
		return decodeText(in, int(decodeUint(in, 1<<(b-0xc4))))
	case 0xd9, 0xda, 0xdb:
		return decodeText(in, int(decodeUint(in, 1<<(b-0xd9))))
	case 0xca:
		return float64(math.Float32frombits(uint32(decodeUint(in, 4))))
	case 0xcb:
		return math.Float64frombits(decodeUint(in, 8))
	case 0xcc, 0xcd, 0xce, 0xcf:
		return int64(decodeUint(in, 1<<(b-0xcc)))
	case 0xd0:
		return int64(int8(decodeUint(in, 1)))
	case 0xd1:
		return int64(int16(decodeUint(in, 2)))
	case 0xd2:
		return int64(int32(decodeUint(in, 4)))
	case 0xd3:
		return int64(decodeUint(in, 8))
	case 0xdc, 0xdd:
		return decodeList(in, int(decodeUint(in, 2<<(b-0xdc))))
	case 0xde, 0xdf:
		return decodeMap(in, int(decodeUint(in, 2<<(b-0xde))))
	}
	panic(fmt.Sprintf("no MessagePack value begins with byte %#x", b))
}

func decodeUint(in *bytes.Reader, size int) (value uint64) {
	for range size {
		b, _ := in.ReadByte()
		value = value<<8 | uint64(b)
	}
	return value
}

func decodeText(in *bytes.Reader, size int) string {
	text := make([]byte, size)
	io.ReadFull(in, text)
	return string(text)
}

func decodeList(in *bytes.Reader, size int) []any {
	items := make([]any, size)
	for i := range items {
		items[i] = decode(in)
	}
	return items
}

func decodeMap(in *bytes.Reader, size int) map[string]any {
	entries := make(map[string]any, size)
	for range size {
		name := fmt.Sprint(decode(in))
		entries[name] = decode(in)
	}
	return entries
}

// list returns the items of an array; none of nil.
func list(value any) []any {
	items, _ := value.([]any)
	return items
}

// parts returns the items of an array of maps; none of nil.
func parts(value any) []map[string]any {
	var items []map[string]any
	for _, item := range list(value) {
		items = append(items, item.(map[string]any))
	}
	return items
}

// text returns a text; an empty one of nil.
func text(value any) string {
	text, _ := value.(string)
	return text
}

// number returns an integer; 0 of nil.
func number(value any) int {
	n, _ := value.(int64)
	return int(n)
}
