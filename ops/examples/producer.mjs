// A producer in another language than Python: submits a job, streams its tokens, ends with its result.
// It is ops/guides/protocol.md in code, for one standalone server; copy it, or follow it in your own language.
//
//   npm install ioredis @msgpack/msgpack
//   node ops/examples/producer.mjs --queue smollm2-135m-instruct --max-tokens 64 "Why is the sky blue?"
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import { decode, encode } from "@msgpack/msgpack";
import Redis from "ioredis";

const LUA = process.env.TOKENMILL_LUA ?? fileURLToPath(new URL("../../api_client/tokenmill/lua", import.meta.url));
const SILENCE_MS = 5_000; // after so long without a message, look at the log: pub/sub may have lost it
const PAGE = 1_000;

export class Producer {
  /** `lua`: the folder with the scripts, api_client/tokenmill/lua of tokenmill. */
  constructor(url, queue, lua = LUA) {
    [this.submitScript, this.cancelScript] = [script(lua, "submit"), script(lua, "cancel")];
    this.base = `tm:{${queue}}:`;
    this.redis = new Redis(url, { maxRetriesPerRequest: 3 });
    this.redis.on("error", () => {}); // each command that fails says so itself
  }

  close() { this.redis.disconnect(); }

  /** `request` has the fields of JobRequest but for job_id and created_ms. Returns the job's id. */
  async submit(request, { queueLimit = 0, idempotencyTtlMs = 0 } = {}) { // 0: as the queue has it
    const job = { job_id: newJobId(), ...request, created_ms: Date.now() };
    const reply = await this.#run(this.submitScript, queueLimit, idempotencyTtlMs,
      job.job_id, job.priority ?? "standard", job.tenant ?? "", fingerprint(job), job.idempotency_key ?? "",
      Buffer.from(encode(job)), job.created_ms, job.deadline_ms ?? 0, job.not_before_ms ?? 0, estimatedTokens(job));
    const [word, ...rest] = reply.map(String);
    if (word === "ok") return rest[0];
    if (word === "large") throw new Error(`the request has ${rest[0]} bytes; this queue takes at most ${rest[1]}`);
    if (word === "full") throw new Error(`the queue holds ${rest[0]} waiting jobs and its limit is ${rest[1]}`);
    if (word === "rate") throw new Error(`tenant "${rest[0]}" submits too fast: try again in ${rest[1]} ms`);
    if (word === "name") throw new Error("job_id must be a text of 1 to 255 bytes, without a zero");
    throw new Error(`the idempotency key or job id stands for job ${rest[0]}, whose content is different`);
  }

  async cancel(job) {
    const [outcome] = await this.#run(this.cancelScript, job);
    return String(outcome); // cancelled, cancelling, the state it ended in, or unknown
  }

  /** Every chunk once and in order, to the last one, which has a status. `has`: tokens of each choice that you have. */
  async *stream(job, has = []) {
    const messages = new Mailbox();
    const subscriber = this.redis.duplicate();
    subscriber.on("error", () => {});
    subscriber.on("messageBuffer", (_channel, message) => messages.put(decode(message)));
    subscriber.on("ready", () => messages.put(null)); // a new connection: something may have been missed
    try {
      await subscriber.subscribe(`${this.base}chunks:${job}`); // first listen, then read: nothing falls between
      const reader = new Reader(has);
      yield* this.#catchUp(job, reader);
      while (!reader.isOver) {
        const chunk = await messages.take(SILENCE_MS);
        if (chunk !== null && !reader.lacks(chunk)) yield* reader.accept(chunk);
        else yield* this.#catchUp(job, reader); // a gap, a silence, or a new connection
      }
    } finally {
      subscriber.disconnect();
    }
  }

  /** What the log has beyond the reader; when the job is over, the rest from its result. */
  async *#catchUp(job, reader) {
    let start = "-";
    while (!reader.isOver) {
      const entries = await this.redis.xrangeBuffer(`${this.base}log:${job}`, start, "+", "COUNT", PAGE);
      for (const [, fields] of entries) {
        const chunk = decode(fields[1]);
        if (!reader.lacks(chunk)) yield* reader.accept(chunk);
      }
      if (entries.length === PAGE) {
        start = `(${entries[PAGE - 1][0]}`;
        continue;
      }
      const ended = await this.#outcome(job);
      if (ended !== null) yield* reader.finish(ended);
      return;
    }
  }

  async result(job) {
    for await (const chunk of this.stream(job)) void chunk;
    return await this.#outcome(job);
  }

  /** The result; null while the job is not over. One that ended while it waited has no more than a state at first. */
  async #outcome(job) {
    const names = ["state", "settled", "result", "error_code", "error"];
    const [state, settled, packed, code, message] = await this.redis.hmgetBuffer(`${this.base}job:${job}`, ...names);
    if (state === null) throw new Error(`no job ${job}: it was never submitted here, or its record has expired`);
    if (settled !== null) return decode(packed);
    if (["queued", "scheduled", "running"].includes(String(state))) return null;
    const error = code?.length ? { code: String(code), message: String(message) } : undefined;
    return { job_id: job, status: String(state), error };
  }

  /** Every script has one key, the queue's meta hash, and the same two first arguments. */
  async #run(text, ...given) {
    const call = [1, `${this.base}meta`, this.base, "PUBLISH", ...given];
    try {
      return await this.redis.evalshaBuffer(createHash("sha1").update(text).digest("hex"), ...call);
    } catch (error) {
      if (!String(error.message).startsWith("NOSCRIPT")) throw error;
      return await this.redis.evalBuffer(text, ...call);
    }
  }
}

/** A script's text: the shared helpers and its own file, joined by one line feed. Take both from the tokenmill release
 * that your workers run, or the SHA-1 is another one and the server keeps two scripts. */
function script(folder, name) {
  try {
    return ["common", name].map((part) => readFileSync(join(folder, `${part}.lua`), "utf8")).join("\n");
  } catch (error) {
    throw new Error(`needs tokenmill's scripts common.lua, submit.lua and cancel.lua: name their folder (api_client/tokenmill/lua) `
      + `with --lua or TOKENMILL_LUA; ${folder}: ${error.code}`);
  }
}

/** Where one reader stands: how many tokens of each choice it has, and of which choices it has the end. */
class Reader {
  isOver = false;
  #ended = new Set();
  #choices = 1;

  constructor(has) { this.has = [...has]; }

  #has(choice) { return this.has[choice] ?? 0; }

  /** Is something before this chunk missing? Of several choices each tells its end before the job's last chunk. */
  lacks({ index, choice = 0, status, n = 1 }) {
    this.#choices = Math.max(this.#choices, n);
    if (status !== undefined && this.#choices > 1) return this.#ended.size < this.#choices;
    return index > this.#has(choice);
  }

  *accept(chunk) {
    const { index, choice = 0, token_ids: ids = [] } = chunk;
    if (this.isOver) return;
    const seen = this.#has(choice) - index;
    if (seen > 0 && seen < ids.length) { // the reader begins inside a checkpoint, or a gathered chunk
      yield* this.accept(without(seen, chunk));
      return;
    }
    if (chunk.status !== undefined) this.isOver = true;
    else if (ids.length === 0 ? this.#ended.has(choice) : seen > 0) return; // told before
    if (chunk.finish_reason !== undefined) this.#ended.add(choice);
    if (ids.length > 0) this.has[choice] = index + ids.length;
    yield chunk;
  }

  /** The rest from the result, choice by choice: text_ends[i] is how many characters there are after token i. */
  *finish({ choices = [], status, usage, error }) {
    const n = choices.length;
    for (const { index: choice = 0, token_ids = [], text_ends = [], text = "", finish_reason } of choices) {
      const letters = [...text]; // a character is a code point, as in Python
      const piece = (start, end) => letters.slice(start, end).join("");
      for (let i = this.#has(choice); i < token_ids.length; i++) {
        yield* this.accept({ index: i, choice, n, token_ids: [token_ids[i]], text: piece(text_ends[i - 1] ?? 0, text_ends[i]) });
      }
      const rest = { index: token_ids.length, text: piece(text_ends.at(-1) ?? 0), finish_reason };
      if (n === 1) yield* this.accept({ ...rest, status, usage, error });
      else yield* this.accept({ ...rest, choice, n });
    }
    yield* this.accept({ index: this.#has(0), status, usage, error });
  }
}

/** A chunk without its first tokens. Its text ends, as Python counts them, are code points. */
function without(told, chunk) {
  const { token_ids, text = "", text_ends = [], logprobs } = chunk;
  const start = text_ends[told - 1] ?? 0;
  return {
    ...chunk,
    index: chunk.index + told,
    token_ids: token_ids.slice(told),
    text: [...text].slice(start).join(""),
    text_ends: text_ends.slice(told).map((end) => end - start),
    logprobs: logprobs?.slice(told),
  };
}

/** Messages in order, taken one at a time; null when none comes in time. */
class Mailbox {
  #waiting = [];
  #wake = () => {};

  put(message) { this.#waiting.push(message); this.#wake(); }

  async take(milliseconds) {
    if (this.#waiting.length === 0) {
      let timer;
      await new Promise((resolve) => { this.#wake = resolve; timer = setTimeout(resolve, milliseconds); });
      clearTimeout(timer);
    }
    return this.#waiting.shift() ?? null;
  }
}

/** A version 7 UUID: sorts by its time of creation. Any other text without control characters would do. */
function newJobId() {
  const bytes = randomBytes(16);
  bytes.writeUIntBE(Date.now(), 0, 6);
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return bytes.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

/** Equal for requests that ask for the same. Ours need not equal Python's, unless both retry with one key. */
function fingerprint(job) {
  const { job_id, idempotency_key, created_ms, deadline_ms, not_before_ms, traceparent, ...same } = job;
  return createHash("blake2b512").update(encode(same, { sortKeys: true })).digest("hex").slice(0, 32);
}

/** For fair sharing between tenants: what the job will probably cost. */
function estimatedTokens(job) {
  const letters = job.prompt ?? (job.messages ?? []).map((message) => message.content).join("");
  const prompt = job.prompt_ids?.length ?? Math.floor(letters.length / 4);
  return prompt + (job.params?.n ?? 1) * (job.params?.max_tokens ?? 256);
}

function count(name, text) {
  if (!/^\d+$/.test(text)) throw new Error(`--${name} must be a whole number, not ${text}`);
  return Number(text);
}

const USAGE = `usage: producer.mjs --queue QUEUE [options] PROMPT
  --url URL              of Redis (redis://localhost:6379/0)
  --queue QUEUE          the queue, by default of a worker its model's name
  --max-tokens N         longest answer (64)
  --idempotency-key KEY  sent twice with one key, it is one job
  --stream JOB           follow this job instead of submitting one
  --starting-after N     tokens of it that you have already (0)
  --lua FOLDER           with tokenmill's scripts, api_client/tokenmill/lua (TOKENMILL_LUA)
  --json                 print one JSON object a line
  --help                 print this`;

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      url: { type: "string", default: "redis://localhost:6379/0" }, queue: { type: "string" },
      "max-tokens": { type: "string", default: "64" }, "idempotency-key": { type: "string" },
      stream: { type: "string" }, "starting-after": { type: "string", default: "0" }, json: { type: "boolean" },
      lua: { type: "string" }, help: { type: "boolean", short: "h" },
    },
  });
  if (values.help) return console.log(USAGE);
  if (!values.queue) throw new Error("name the queue: --queue smollm2-135m-instruct");
  const [maxTokens, startingAfter] = ["max-tokens", "starting-after"].map((name) => count(name, values[name]));
  const producer = new Producer(values.url, values.queue, values.lua);
  const request = { messages: [{ role: "user", content: positionals.join(" ") }], params: { max_tokens: maxTokens } };
  if (values["idempotency-key"]) request.idempotency_key = values["idempotency-key"];
  const job = values.stream ?? (await producer.submit(request));
  const say = (kind, value) => values.json && console.log(JSON.stringify({ [kind]: value }));
  say("job", job);
  for await (const chunk of producer.stream(job, [startingAfter])) {
    say("chunk", chunk);
    if (!values.json) process.stdout.write(chunk.text ?? "");
  }
  const result = await producer.result(job);
  say("result", result);
  if (!values.json) console.log(`\n${result.status}, ${result.usage?.completion_tokens ?? 0} tokens`);
  if (result.error) console.error(`producer: ${result.error.message}`);
  if (result.status !== "succeeded") process.exitCode = 1;
  producer.close();
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  main().catch((error) => { console.error(`producer: ${error.message}`); process.exit(1); });
}
