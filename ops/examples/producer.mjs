// A producer and a reader in JavaScript: submits a job, streams its tokens, prints its result.
// It is ops/guides/protocol.md in code, for one server. Copy it, or follow it in your own language.
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
const SILENCE_MS = 5_000; // after this long without a message, read the log: pub/sub may have lost it
const PAGE = 1_000;

export class Producer {
  /** `lua`: the folder with the scripts, api_client/tokenmill/lua of tokenmill. */
  constructor(url, queue, lua = LUA) {
    [this.submitScript, this.cancelScript] = [script(lua, "submit"), script(lua, "cancel")];
    this.base = `tm:{${queue}}:`;
    this.redis = new Redis(url, { maxRetriesPerRequest: 3 });
    this.redis.on("error", () => {}); // each command that fails raises its own error
  }

  close() { this.redis.disconnect(); }

  /** `request` has the fields of JobRequest but for job_id and created_ms. Returns the job's id. */
  async submit(request, { queueLimit = 0, idempotencyTtlMs = 0 } = {}) { // 0: as the queue has it
    const job = { job_id: newJobId(), ...request, created_ms: Date.now() };
    const reply = await this.#run(this.submitScript, queueLimit, idempotencyTtlMs,
      job.job_id, job.priority ?? "standard", job.tenant ?? "", fingerprint(job), job.idempotency_key ?? "",
      Buffer.from(encode(job)), job.created_ms, job.deadline_ms ?? 0, job.not_before_ms ?? 0, estimatedTokens(job), job.session ?? "");
    const [word, ...rest] = reply.map(String);
    if (word === "ok") return rest[0];
    if (word === "large") throw new Error(`the request has ${rest[0]} bytes; this queue takes at most ${rest[1]}`);
    if (word === "full") throw new Error(`the queue holds ${rest[0]} waiting ${rest[2]} jobs and its limit is ${rest[1]}`);
    if (word === "rate") throw new Error(`tenant "${rest[0]}" submits too fast: try again in ${rest[1]} ms`);
    if (word === "name") throw new Error("job_id must be a text of 1 to 255 bytes without control characters");
    throw new Error(`the idempotency key or job id stands for job ${rest[0]}, whose content is different`);
  }

  async cancel(job) {
    return String((await this.#run(this.cancelScript, job))[0]); // cancelled, cancelling, the state it ended in, or unknown
  }

  /** Yields every chunk once and in order, to the last one, which has a status. `has`: tokens of each choice that you have. */
  stream(job, has = []) { return new Reader(this, job, has).read(); }

  async result(job) {
    for await (const chunk of this.stream(job)) void chunk;
    return await this.outcome(job);
  }

  /** Returns the result, or null before the job's end. A job that ended while it waited has only a state and an error at first. */
  async outcome(job) {
    const names = ["state", "settled", "result", "error_code", "error"];
    const [state, settled, packed, code, message] = await this.redis.hmgetBuffer(`${this.base}job:${job}`, ...names);
    if (state === null) throw new Error(`no job ${job}: it was never submitted here, or its record has expired`);
    if (settled !== null) return decode(packed);
    if (["queued", "scheduled", "running"].includes(String(state))) return null;
    const error = code?.length ? { code: String(code), message: String(message) } : undefined;
    return { job_id: job, status: String(state), error };
  }

  /** Runs a script. Each has one key, the queue's meta hash, and the same two first arguments. */
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

/** Returns a script's text: common.lua, one line feed, and its own file. Take both from the release that your workers run:
 * another text has another SHA-1. */
function script(folder, name) {
  try {
    return ["common", name].map((part) => readFileSync(join(folder, `${part}.lua`), "utf8")).join("\n");
  } catch (error) {
    throw new Error(`needs tokenmill's scripts common.lua, submit.lua and cancel.lua: name their folder (api_client/tokenmill/lua) `
      + `with --lua or TOKENMILL_LUA; ${folder}: ${error.code}`);
  }
}

const GAP = "gap"; // earlier tokens are missing

/** Reads one job by the algorithm of protocol.md. */
class Reader {
  #ended = new Set(); // choices whose end was read

  constructor(producer, job, has) { Object.assign(this, { producer, job, has: [...has], log: `${producer.base}log:${job}` }); }

  async *read() {
    const messages = new Mailbox();
    const channel = this.producer.redis.duplicate();
    channel.on("error", () => {});
    channel.on("messageBuffer", (_channel, message) => messages.put(decode(message)));
    channel.on("ready", () => messages.put(null)); // after a new connection the log must be read
    try {
      await channel.subscribe(`${this.producer.base}chunks:${this.job}`); // first subscribe, then read: nothing falls between
      while (!(yield* this.#catchUp())) {
        for (let chunk; (chunk = await messages.take(SILENCE_MS)) !== null; ) {
          const taken = this.#take(chunk);
          if (taken === GAP) break;
          if (taken !== null) yield taken;
          if (chunk.status !== undefined) return;
        }
      }
    } finally {
      channel.disconnect();
    }
  }

  /** Yields what the log has beyond this reader, and after the job's end what the result has; returns whether the job has ended. */
  async *#catchUp() {
    for (let start = "-", entries; entries === undefined || entries.length === PAGE; ) {
      entries = await this.producer.redis.xrangeBuffer(this.log, start, "+", "COUNT", PAGE);
      for (const [id, [, packed]] of entries) {
        start = `(${id}`;
        const taken = this.#take(decode(packed));
        if (taken !== GAP && taken !== null) yield taken;
      }
    }
    const result = await this.producer.outcome(this.job);
    if (result === null) return false;
    for (const { index: choice = 0, token_ids = [], ...rest } of result.choices ?? []) {
      if (this.#ended.has(choice)) continue;
      yield without(this.has[choice] ?? 0, { ...rest, index: 0, choice, token_ids });
      this.has[choice] = token_ids.length;
    }
    yield { index: this.has[0] ?? 0, status: result.status, usage: result.usage, error: result.error };
    return true;
  }

  /** Returns what of a chunk is new, null if nothing is, or GAP. */
  #take(chunk) {
    const { choice = 0, index, token_ids: ids = [], n = 1 } = chunk;
    const had = this.has[choice] ?? 0;
    if (chunk.status !== undefined) return (n === 1 ? index > had : this.#ended.size < n) ? GAP : chunk;
    if (index > had) return GAP;
    const isNew = ids.length > 0 ? index + ids.length > had : !this.#ended.has(choice);
    if (chunk.finish_reason !== undefined) this.#ended.add(choice);
    if (!isNew) return null;
    if (ids.length > 0) this.has[choice] = index + ids.length;
    return ids.length > 0 ? without(had - index, chunk) : chunk;
  }
}

/** Returns a chunk without its first tokens. `text_ends` counts code points, as Python does. */
function without(num, chunk) {
  const { index, token_ids, text = "", text_ends = [], logprobs } = chunk;
  const start = text_ends[num - 1] ?? 0;
  return {
    ...chunk,
    index: index + num,
    token_ids: token_ids.slice(num),
    text: [...text].slice(start).join(""),
    text_ends: text_ends.slice(num).map((end) => end - start),
    logprobs: logprobs?.slice(num),
  };
}

/** Holds messages in order. `take` waits for the next one, and returns null if none arrives in time. */
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

/** Returns a version 7 UUID, which sorts by time. Any other text without control characters works too. */
function newJobId() {
  const bytes = randomBytes(16);
  bytes.writeUIntBE(Date.now(), 0, 6);
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return bytes.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

/** Returns a text that is equal for equal requests. It must equal Python's only if both share idempotency keys. */
function fingerprint(job) {
  const { job_id, idempotency_key, created_ms, deadline_ms, not_before_ms, traceparent, session, ...same } = job;
  return createHash("blake2b512").update(encode(same, { sortKeys: true })).digest("hex").slice(0, 32);
}

/** Returns the tokens that the job will probably cost, for fair sharing between tenants. */
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
