// A producer and a reader in Java 17, without libraries: submits a job and prints its tokens as they come.
// It is ops/guides/protocol.md in code, for one server; Connection and Pack, at the end, have RESP and MessagePack.
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
    static final int MAX_TOKENS = 64, PAGE = 1_000, ATTEMPTS = 60;
    final URI url;
    final String base;
    Connection server;

    Producer(String url, String queue) throws IOException {
        this.url = URI.create(url);
        base = "tm:{" + queue + "}:";
        server = new Connection(this.url);
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length < 3) throw new IllegalArgumentException("give URL QUEUE PROMPT, or URL QUEUE --read JOB");
        Producer producer = new Producer(arguments[0], arguments[1]);
        boolean isRead = arguments[2].equals("--read");
        String job = isRead ? arguments[3] : producer.submit(arguments[2], MAX_TOKENS);
        System.err.println("job " + job);
        Map<Integer, StringBuilder> texts = new TreeMap<>();
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        Reader reader = producer.new Reader(job, (choice, text) -> {
            texts.computeIfAbsent(choice, __ -> new StringBuilder()).append(text);
            if (choice == 0) { out.print(text); out.flush(); }
        });
        String status = reader.read();
        texts.forEach((choice, text) -> { if (choice > 0) out.print("\n[" + choice + "] " + text); });
        out.println();
        System.err.println(status + (reader.error.isEmpty() ? "" : ": " + reader.error));
        System.exit(status.equals("succeeded") ? 0 : 1);
    }

    // ---- submit ----

    /** Runs a script of tokenmill: by its SHA-1, or with its text if the server does not have it yet. */
    List<Object> script(String name, Object... arguments) throws Exception {
        String text = Files.readString(LUA.resolve("common.lua")) + "\n" + Files.readString(LUA.resolve(name + ".lua"));
        List<Object> call = new ArrayList<>(List.of("1", base + "meta", base, "PUBLISH"));
        call.addAll(Arrays.asList(arguments));
        try {
            return list(server.call("EVALSHA", hex("SHA-1", text.getBytes(StandardCharsets.UTF_8)), call));
        } catch (IllegalStateException error) {
            if (!error.getMessage().startsWith("NOSCRIPT")) throw error;
            return list(server.call("EVAL", text, call));
        }
    }

    String submit(String prompt, int maxTokens) throws Exception {
        Map<String, Object> request = new LinkedHashMap<>();
        request.put("messages", List.of(Map.of("role", "user", "content", prompt)));
        request.put("params", Map.of("max_tokens", maxTokens));
        String fingerprint = hex("SHA-256", Pack.encode(request)), job = UUID.randomUUID().toString();
        long now = System.currentTimeMillis();
        request.put("job_id", job);
        request.put("created_ms", now);
        List<Object> reply = script("submit", "0", "0", // the queue's own limits
            job, "standard", "", fingerprint, "", Pack.encode(request), now, "0", "0", prompt.length() / 4 + maxTokens);
        List<String> words = reply.stream().map(Producer::string).toList();
        if (!words.get(0).equals("ok")) throw new IllegalStateException("refused: " + String.join(" ", words));
        return words.get(1);
    }

    // ---- read ----

    enum Taken { OK, GAP, DONE }

    /** Emits each token of a job once and in order, whenever it starts and whatever pub/sub loses. */
    class Reader {
        final String job;
        final BiConsumer<Integer, String> emit;
        final Map<Integer, Integer> has = new HashMap<>(); // choice → how many of its tokens were emitted
        final Set<Integer> ended = new HashSet<>();
        String status; // the job's final state
        String error; // one sentence, or empty

        Reader(String job, BiConsumer<Integer, String> emit) {
            this.job = job;
            this.emit = emit;
        }

        /** Returns the job's final state. A lost connection is made again. */
        String read() throws Exception {
            for (int failures = 0; status == null; failures++) {
                try {
                    follow();
                } catch (IOException error) {
                    if (failures == ATTEMPTS) throw error;
                    Thread.sleep(1_000);
                    try { server = new Connection(url); } catch (IOException again) { } // the next attempt finds it
                }
            }
            return status;
        }

        void follow() throws Exception {
            try (Connection channel = new Connection(url)) {
                channel.call("SUBSCRIBE", base + "chunks:" + job); // subscribe first, then read: nothing falls between
                while (!catchUp()) {
                    while (channel.hasMessage(SILENCE_MS)) {
                        List<Object> message = list(channel.reply()); // "message", channel, chunk
                        Taken taken = take(map(Pack.decode((byte[]) message.get(2))));
                        if (taken == Taken.DONE) return;
                        if (taken == Taken.GAP) break;
                    }
                }
            }
        }

        boolean catchUp() throws Exception {
            String start = "-";
            for (List<Object> page = null; page == null || page.size() == PAGE; ) {
                page = list(server.call("XRANGE", base + "log:" + job, start, "+", "COUNT", PAGE));
                for (Object entry : page) {
                    start = "(" + string(list(entry).get(0));
                    byte[] chunk = (byte[]) list(list(entry).get(1)).get(1); // one field, `chunk`, and its value
                    if (take(map(Pack.decode(chunk))) == Taken.GAP) page = List.of();
                }
            }
            List<Object> record =
                list(server.call("HMGET", base + "job:" + job, "state", "settled", "result", "error"));
            if (record.get(0) == null) throw new NoSuchElementException("unknown job, or its record has expired");
            String state = string(record.get(0));
            if (record.get(1) != null) {
                Map<?, ?> result = map(Pack.decode((byte[]) record.get(2)));
                error = errorOf(result);
                for (Object each : list(result.get("choices"))) {
                    Map<?, ?> choice = map(each);
                    int c = number(choice.get("index")), had = has.getOrDefault(c, 0);
                    emit.accept(c, from(choice, had));
                }
            } else if (!List.of("failed", "cancelled", "expired", "dead").contains(state)) {
                return false;
            } else {
                error = record.get(3) == null ? "" : string(record.get(3)); // it ended while it waited
            }
            status = state;
            return true;
        }

        Taken take(Map<?, ?> chunk) {
            int c = number(chunk.get("choice")), index = number(chunk.get("index")), had = has.getOrDefault(c, 0);
            int n = Math.max(1, number(chunk.get("n"))), tokens = list(chunk.get("token_ids")).size();
            if (chunk.get("status") != null) { // the job's last chunk
                if (n == 1 ? index > had : ended.size() < n) return Taken.GAP;
                emit.accept(c, from(chunk, 0));
                error = errorOf(chunk);
                status = (String) chunk.get("status");
                return Taken.DONE;
            }
            if (index > had) return Taken.GAP;
            if (chunk.get("finish_reason") != null) ended.add(c);
            if (index + tokens > had) {
                emit.accept(c, from(chunk, had - index));
                has.put(c, index + tokens);
            }
            return Taken.OK;
        }
    }

    /** Returns the text of a chunk or choice without its first `skip` tokens. `text_ends` counts code points. */
    static String from(Map<?, ?> part, int skip) {
        String text = Objects.requireNonNullElse((String) part.get("text"), "");
        if (skip == 0) return text;
        int end = number(list(part.get("text_ends")).get(skip - 1));
        return text.substring(text.offsetByCodePoints(0, end)); // Java counts UTF-16 units
    }

    static String errorOf(Map<?, ?> part) {
        return part.get("error") == null ? "" : (String) map(part.get("error")).get("message");
    }

    // ---- RESP and MessagePack: a Redis client and a library can replace the two classes ----

    static class Connection implements Closeable {
        final Socket socket;
        final BufferedInputStream in;

        Connection(URI url) throws IOException {
            socket = new Socket(url.getHost(), url.getPort() < 0 ? 6379 : url.getPort());
            in = new BufferedInputStream(socket.getInputStream());
            if (url.getUserInfo() != null) {
                List<Object> login = new ArrayList<>(List.of(url.getUserInfo().split(":", 2)));
                if (login.get(0).equals("")) login.remove(0); // redis://:password@host
                call("AUTH", login);
            }
            if (url.getPath().length() > 1) call("SELECT", url.getPath().substring(1));
        }

        Object call(Object... command) throws IOException {
            List<byte[]> parts = new ArrayList<>();
            for (Object part : command) for (Object each : part instanceof List<?> many ? many : List.of(part)) {
                parts.add(each instanceof byte[] bytes ? bytes : each.toString().getBytes(StandardCharsets.UTF_8));
            }
            ByteArrayOutputStream out = new ByteArrayOutputStream();
            out.writeBytes(("*" + parts.size() + "\r\n").getBytes());
            for (byte[] part : parts) {
                out.writeBytes(("$" + part.length + "\r\n").getBytes());
                out.writeBytes(part);
                out.writeBytes("\r\n".getBytes());
            }
            socket.getOutputStream().write(out.toByteArray());
            return reply();
        }

        /** Returns whether a byte arrives within `timeout_ms`; `reply` then reads the message. */
        boolean hasMessage(int timeoutMs) throws IOException {
            socket.setSoTimeout(timeoutMs);
            in.mark(1);
            try {
                if (in.read() < 0) throw new EOFException("the server closed the connection");
                in.reset();
                return true;
            } catch (SocketTimeoutException silence) {
                return false;
            } finally {
                socket.setSoTimeout(0);
            }
        }

        Object reply() throws IOException {
            StringBuilder line = new StringBuilder();
            for (int c; (c = in.read()) != '\r'; line.append((char) c)) {
                if (c < 0) throw new EOFException("the server closed the connection");
            }
            in.read(); // the line feed
            String rest = line.substring(1);
            switch (line.charAt(0)) {
                case '+': return rest.getBytes();
                case '-': throw new IllegalStateException(rest);
                case ':': return Long.parseLong(rest);
                case '$': {
                    int size = Integer.parseInt(rest);
                    return size < 0 ? null : Arrays.copyOf(in.readNBytes(size + 2), size);
                }
                default: { // "*", an array
                    List<Object> items = new ArrayList<>();
                    for (int i = Integer.parseInt(rest); i > 0; i--) items.add(reply());
                    return items;
                }
            }
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
                for (Map.Entry<?, ?> entry : map.entrySet()) {
                    write(out, entry.getKey());
                    write(out, entry.getValue());
                }
            } else if (value instanceof List<?> items) {
                out.write(0xdd); out.writeInt(items.size());
                for (Object item : items) write(out, item);
            } else if (value instanceof Double number) {
                out.write(0xcb); out.writeDouble(number);
            } else {
                out.write(0xd3); out.writeLong(((Number) value).longValue());
            }
        }

        static Object decode(byte[] bytes) throws IOException {
            return read(new DataInputStream(new ByteArrayInputStream(bytes)));
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
    static String string(Object value) {
        return value instanceof byte[] bytes ? new String(bytes, StandardCharsets.UTF_8) : (String) value;
    }
}
