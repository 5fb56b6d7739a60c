// A producer and a reader in Java 17, without libraries: submits a job and prints its tokens as they come.
// It is ops/guides/protocol.md in code, for one server. Connection and Pack, at the end, have RESP and MessagePack.
//
//   java ops/examples/Producer.java redis://localhost:6379/0 smollm2-135m-instruct "Why is the sky blue?"
//   java ops/examples/Producer.java redis://localhost:6379/0 smollm2-135m-instruct --read JOB
import java.io.*;
import java.net.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.function.BiConsumer;

public class Producer {
    static final Path LUA = Path.of(System.getenv().getOrDefault("TOKENMILL_LUA", "api_client/tokenmill/lua"));
    static final int SILENCE_MS = 5_000; // after this long without a message, read the log: pub/sub may have lost it
    static final int MAX_TOKENS = 64, PAGE = 1_000;
    final Connection server;
    final String base;

    Producer(String url, String queue) throws IOException {
        server = new Connection(URI.create(url), null);
        base = "tm:{" + queue + "}:";
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length < 3) throw new IllegalArgumentException("give URL QUEUE PROMPT, or URL QUEUE --read JOB");
        Producer producer = new Producer(arguments[0], arguments[1]);
        boolean isRead = arguments[2].equals("--read");
        String job = isRead ? arguments[3] : producer.submit(arguments[2], MAX_TOKENS);
        System.err.println("job " + job);
        Map<Integer, StringBuilder> texts = new TreeMap<>();
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        Map<?, ?> end = producer.new Reader(job, (choice, text) -> {
            texts.computeIfAbsent(choice, __ -> new StringBuilder()).append(text);
            if (choice == 0) { out.print(text); out.flush(); }
        }).read();
        texts.forEach((choice, text) -> { if (choice > 0) out.print("\n[" + choice + "] " + text); });
        out.println();
        Map<?, ?> error = map(end.get("error"));
        System.err.println(end.get("status") + (error == null ? "" : ": " + error.get("message")));
        System.exit(end.get("status").equals("succeeded") ? 0 : 1);
    }

    // ---- submit ----

    /** Runs a script of tokenmill: by its SHA-1, or with its text if the server does not have it yet. */
    List<Object> script(String name, Object... arguments) throws Exception {
        String text = Files.readString(LUA.resolve("common.lua")) + "\n" + Files.readString(LUA.resolve(name + ".lua"));
        List<Object> call = new ArrayList<>(List.of("1", base + "meta", base, "PUBLISH"));
        call.addAll(Arrays.asList(arguments));
        try {
            return server.call("EVALSHA", hex("SHA-1", text.getBytes(StandardCharsets.UTF_8)), call);
        } catch (IllegalStateException error) {
            if (!error.getMessage().startsWith("NOSCRIPT")) throw error;
            return server.call("EVAL", text, call);
        }
    }

    /** Returns the job's id. */
    String submit(String prompt, int maxTokens) throws Exception {
        Map<String, Object> request = new LinkedHashMap<>();
        request.put("messages", List.of(Map.of("role", "user", "content", prompt)));
        request.put("params", Map.of("max_tokens", maxTokens));
        String fingerprint = hex("SHA-256", Pack.encode(request)), job = UUID.randomUUID().toString();
        long now = System.currentTimeMillis();
        request.put("job_id", job);
        request.put("created_ms", now);
        List<Object> reply = script("submit", "0", "0", // the queue's own limits
            job, "standard", "", fingerprint, "", Pack.encode(request), now, "0", "0", prompt.length() / 4 + maxTokens, "");
        List<String> words = reply.stream().map(Producer::string).toList();
        if (!words.get(0).equals("ok")) throw new IllegalStateException("refused: " + String.join(" ", words));
        return words.get(1);
    }

    /** Returns the job's result, or null before its end. A job that ended while it waited has a status and an error. */
    Map<?, ?> outcome(String job) throws Exception {
        List<Object> record = server.call("HMGET", base + "job:" + job, "state", "settled", "result", "error");
        if (record.get(0) == null) throw new NoSuchElementException("unknown job, or its record has expired");
        if (record.get(1) != null) return Pack.decode(record.get(2));
        String state = string(record.get(0)), error = string(record.get(3));
        if (List.of("scheduled", "queued", "running").contains(state)) return null;
        return error.isEmpty() ? Map.of("status", state) : Map.of("status", state, "error", Map.of("message", error));
    }

    // ---- read ----

    /** Emits each token of a job once and in order, whenever it starts and whatever pub/sub loses. */
    class Reader {
        final String job;
        final BiConsumer<Integer, String> emit; // takes a choice and text
        final Map<Integer, Integer> has = new HashMap<>(); // choice → how many of its tokens were emitted
        final Set<Integer> ended = new HashSet<>(); // choices whose end was emitted
        Map<?, ?> end; // the job's last chunk, or its result: both have `status`, and perhaps `error`

        Reader(String job, BiConsumer<Integer, String> emit) { this.job = job; this.emit = emit; }

        Map<?, ?> read() throws Exception {
            // First subscribe, then read the log: no chunk is lost in between.
            try (Connection channel = new Connection(server.url, base + "chunks:" + job)) {
                while (end == null && !catchUp("-")) {
                    Object message = channel.next(SILENCE_MS);
                    while (message != null && take(Pack.decode(message)) && end == null) {
                        message = channel.next(SILENCE_MS);
                    }
                }
            }
            return end;
        }

        /** Reads the log from an entry on, then the job's result. Returns whether the job has ended. */
        boolean catchUp(String start) throws Exception {
            List<Object> page = server.call("XRANGE", base + "log:" + job, start, "+", "COUNT", PAGE);
            for (Object entry : page) take(Pack.decode(list(list(entry).get(1)).get(1))); // [id, ["chunk", bytes]]
            if (page.size() == PAGE) return catchUp("(" + string(list(page.get(PAGE - 1)).get(0)));
            end = outcome(job);
            if (end == null) return false;
            for (Object choice : list(end.get("choices"))) {
                int c = number(map(choice).get("index"));
                if (!ended.contains(c)) emit.accept(c, textFrom(map(choice), has.getOrDefault(c, 0)));
            }
            return true;
        }

        /** Emits what is new in a chunk. Returns false if earlier tokens are missing. */
        boolean take(Map<?, ?> chunk) {
            int c = number(chunk.get("choice")), index = number(chunk.get("index")), had = has.getOrDefault(c, 0);
            int n = Math.max(1, number(chunk.get("n"))), tokens = list(chunk.get("token_ids")).size();
            if (chunk.get("status") != null) { // the job's last chunk
                if (n == 1 ? index > had : ended.size() < n) return false;
                emit.accept(c, textFrom(chunk, 0));
                end = chunk;
                return true;
            }
            if (index > had) return false;
            boolean isNew = tokens == 0 ? !ended.contains(c) : index + tokens > had;
            if (chunk.get("finish_reason") != null) ended.add(c);
            if (isNew) {
                emit.accept(c, textFrom(chunk, had - index));
                has.put(c, index + tokens);
            }
            return true;
        }
    }

    /** Returns the text of a chunk or choice without its first `skip` tokens. `text_ends` counts code points. */
    static String textFrom(Map<?, ?> part, int skip) {
        String text = Objects.requireNonNullElse((String) part.get("text"), "");
        if (skip == 0) return text;
        int end = number(list(part.get("text_ends")).get(skip - 1));
        return text.substring(text.offsetByCodePoints(0, end)); // Java counts UTF-16 units
    }

    // ---- RESP and MessagePack: a Redis client and a library can replace the two classes ----

    /** A connection that is made again when it is lost, and with it its subscription. */
    static class Connection implements Closeable {
        static final int ATTEMPTS = 60; // to connect again, one a second
        final URI url;
        final String channel; // subscribed, or null
        Socket socket;
        DataInputStream in;

        Connection(URI url, String channel) throws IOException {
            this.url = url;
            this.channel = channel;
            open();
        }

        void open() throws IOException {
            socket = new Socket(url.getHost(), url.getPort() < 0 ? 6379 : url.getPort());
            in = new DataInputStream(new BufferedInputStream(socket.getInputStream()));
            if (url.getUserInfo() != null) {
                List<Object> login = new ArrayList<>(List.of(url.getUserInfo().split(":", 2)));
                if (login.get(0).equals("")) login.remove(0); // redis://:password@host
                send("AUTH", login);
            }
            if (url.getPath().length() > 1) send("SELECT", url.getPath().substring(1));
            if (channel != null) send("SUBSCRIBE", channel);
        }

        void reopen() throws IOException, InterruptedException {
            for (int attempt = 1; ; attempt++) {
                try {
                    close();
                    Thread.sleep(1_000);
                    open();
                    return;
                } catch (IOException error) {
                    if (attempt == ATTEMPTS) throw error;
                }
            }
        }

        /** Returns the items of the reply. Every call of the protocol may be repeated. */
        List<Object> call(Object... command) throws IOException, InterruptedException {
            try {
                return list(send(command));
            } catch (IOException lost) {
                reopen();
                return list(send(command));
            }
        }

        /** Returns the next message, or null after a silence and after a new connection. */
        Object next(int timeoutMs) throws IOException, InterruptedException {
            try {
                socket.setSoTimeout(timeoutMs);
                in.mark(1);
                in.readByte();
                in.reset();
                socket.setSoTimeout(0);
                return list(reply()).get(2); // "message", channel, bytes
            } catch (SocketTimeoutException silence) {
                return null;
            } catch (IOException lost) {
                reopen();
                return null;
            }
        }

        Object send(Object... command) throws IOException {
            List<byte[]> parts = new ArrayList<>();
            for (Object part : command) for (Object each : part instanceof List<?> many ? many : List.of(part)) {
                parts.add(each instanceof byte[] bytes ? bytes : each.toString().getBytes(StandardCharsets.UTF_8));
            }
            ByteArrayOutputStream out = new ByteArrayOutputStream();
            out.writeBytes(("*" + parts.size()).getBytes());
            for (byte[] part : parts) {
                out.writeBytes(("\r\n$" + part.length + "\r\n").getBytes());
                out.writeBytes(part);
            }
            out.writeBytes("\r\n".getBytes());
            socket.getOutputStream().write(out.toByteArray());
            return reply();
        }

        Object reply() throws IOException {
            StringBuilder line = new StringBuilder();
            for (int c; (c = in.readUnsignedByte()) != '\r'; line.append((char) c)) { }
            in.readByte(); // the line feed
            char kind = line.charAt(0);
            String rest = line.substring(1);
            if (kind == '-') throw new IllegalStateException(rest);
            if (kind == '+') return rest.getBytes();
            int number = Integer.parseInt(rest); // ":", an integer, or the size of "$" or "*"
            if (kind == ':' || number < 0) return kind == ':' ? number : null;
            if (kind == '$') {
                byte[] text = new byte[number];
                in.readFully(text);
                in.readShort(); // the line's end
                return text;
            }
            List<Object> items = new ArrayList<>();
            for (; number > 0; number--) items.add(reply());
            return items;
        }

        public void close() throws IOException { socket.close(); }
    }

    static class Pack {
        static byte[] encode(Object value) throws IOException {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            write(new DataOutputStream(bytes), value);
            return bytes.toByteArray();
        }

        static void write(DataOutputStream out, Object value) throws IOException {
            if (value instanceof String text) {
                byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
                out.write(0xdb); out.writeInt(bytes.length); out.write(bytes);
            } else if (value instanceof Map<?, ?> map) {
                out.write(0xdf); out.writeInt(map.size());
                for (var entry : map.entrySet()) { write(out, entry.getKey()); write(out, entry.getValue()); }
            } else if (value instanceof List<?> items) {
                out.write(0xdd); out.writeInt(items.size());
                for (Object item : items) write(out, item);
            } else if (value instanceof Double number) {
                out.write(0xcb); out.writeDouble(number);
            } else {
                out.write(0xd3); out.writeLong(((Number) value).longValue());
            }
        }

        /** Decodes a message of the protocol; each is a map with text keys. */
        static Map<?, ?> decode(Object bytes) throws IOException {
            return Producer.map(read(new DataInputStream(new ByteArrayInputStream((byte[]) bytes))));
        }

        static Object read(DataInputStream in) throws IOException {
            int b = in.readUnsignedByte();
            if (b < 0x80 || b >= 0xe0) return (long) (byte) b;
            if (b < 0x90) return map(in, b & 15);
            if (b < 0xa0) return array(in, b & 15);
            if (b < 0xc0) return text(in, b & 31);
            switch (b) {
                case 0xc0: return null;
                case 0xc2: case 0xc3: return b == 0xc3;
                case 0xc4: case 0xd9: return text(in, in.readUnsignedByte());
                case 0xc5: case 0xda: return text(in, in.readUnsignedShort());
                case 0xc6: case 0xdb: return text(in, in.readInt());
                case 0xca: return (double) in.readFloat();
                case 0xcb: return in.readDouble();
                case 0xcc: return (long) in.readUnsignedByte();
                case 0xcd: return (long) in.readUnsignedShort();
                case 0xce: return in.readInt() & 0xffffffffL;
                case 0xd0: return (long) in.readByte();
                case 0xd1: return (long) in.readShort();
                case 0xd2: return (long) in.readInt();
                case 0xcf: case 0xd3: return in.readLong();
                case 0xdc: return array(in, in.readUnsignedShort());
                case 0xdd: return array(in, in.readInt());
                case 0xde: return map(in, in.readUnsignedShort());
                case 0xdf: return map(in, in.readInt());
                default: throw new IOException("no MessagePack value begins with byte " + b);
            }
        }

        static String text(DataInputStream in, int size) throws IOException {
            return new String(in.readNBytes(size), StandardCharsets.UTF_8);
        }

        static List<Object> array(DataInputStream in, int size) throws IOException {
            List<Object> items = new ArrayList<>();
            for (; size > 0; size--) items.add(read(in));
            return items;
        }

        static Map<Object, Object> map(DataInputStream in, int size) throws IOException {
            Map<Object, Object> entries = new HashMap<>();
            for (; size > 0; size--) entries.put(read(in), read(in));
            return entries;
        }
    }

    static String hex(String algorithm, byte[] bytes) throws Exception {
        return HexFormat.of().formatHex(MessageDigest.getInstance(algorithm).digest(bytes));
    }

    @SuppressWarnings("unchecked")
    static List<Object> list(Object value) { return value == null ? List.of() : (List<Object>) value; }

    static Map<?, ?> map(Object value) { return (Map<?, ?>) value; }
    static int number(Object value) { return value == null ? 0 : ((Number) value).intValue(); }
    static String string(Object bytes) {
        return bytes == null ? "" : new String((byte[]) bytes, StandardCharsets.UTF_8);
    }
}
