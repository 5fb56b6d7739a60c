// One job at a time: its id is the page's fragment, so that a reload, a bookmark and the back button find it again.
// The browser's EventSource reconnects by itself and says how far it came (Last-Event-ID); after a reload nothing
// has been shown yet, so it begins at the beginning, which the server still has.
const $ = (id) => document.getElementById(id);
const PAGE = 8;
const OVER = ["succeeded", "failed", "cancelled", "expired", "dead"];
const WORDS = { length: "token limit reached", tool_calls: "tool calls" }; // the state says the others
let source = null; // of the job that is shown
let pending = null; // the submission under way: [what, its idempotency key]
let numListed = 0;

async function call(path, options = {}) {
  const response = await fetch(path, options).catch(() => { throw Object.assign(new Error("The server cannot be reached."), { isAway: true }); });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    const words = typeof body.detail === "string" ? body.detail : `The server answered ${response.status}.`;
    throw Object.assign(new Error(words), { isAway: response.status === 503 });
  }
  return body;
}

// ── submitting ──

$("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = JSON.stringify({
    prompt: $("prompt").value, max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
  });
  // The same again after an error may have arrived the first time: the key makes both one job.
  if (pending?.[0] !== body) pending = [body, newKey()];
  $("send").disabled = true;
  try {
    const headers = { "Content-Type": "application/json", "Idempotency-Key": pending[1] };
    const { job_id } = await call("/api/jobs", { method: "POST", headers, body });
    pending = null;
    // History has a job and its title from its end on. Until then this browser keeps both, for all its tabs.
    keepOpen({ ...openTitles(), [job_id]: $("prompt").value });
    $("prompt").value = "";
    location.hash = job_id;
    refresh();
  } catch (error) {
    say(error.message);
  } finally {
    $("send").disabled = false;
  }
});

const CONTROLS = ["max-tokens", "temperature"];
for (const id of CONTROLS) {
  $(id).value = localStorage.getItem(id) ?? $(id).value;
  $(id).addEventListener("change", () => localStorage.setItem(id, $(id).value));
}

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("composer").requestSubmit();
});

function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// ── one job ──

async function show(job) {
  source?.close();
  source = null;
  $("job").hidden = !job;
  mark(job);
  if (!job) return;
  for (const id of ["answer", "facts", "title"]) $(id).textContent = "";
  fail("");
  setStatus("…");
  try {
    const info = await call(`/api/jobs/${encodeURIComponent(job)}`);
    if (job !== current()) return; // the reader has gone on meanwhile
    $("title").textContent = info.title ?? openTitles()[job] ?? "";
    if (!OVER.includes(info.status)) setStatus(info.cancelling ? "cancelling" : info.status); // else: its end says so
    follow(job);
  } catch (error) {
    if (job !== current()) return;
    if (!error.isAway) return fail(error.message);
    say("The service is away. Your answer goes on as soon as it is back.");
    setTimeout(() => { if (job === current() && source === null) show(job); }, 2000);
  }
}

function follow(job) {
  const began = performance.now();
  let told = 0;
  let first = null; // when the first token came, while we watched
  source = new EventSource(`/api/jobs/${encodeURIComponent(job)}/events`);
  const mine = source;
  source.addEventListener("open", () => say(""));
  source.addEventListener("token", (event) => {
    const { text, tokens } = JSON.parse(event.data);
    $("answer").append(text);
    say("");
    if ($("status").dataset.status !== "cancelling") setStatus("running");
    told += tokens;
    first ??= [performance.now(), told];
    const seconds = (performance.now() - first[0]) / 1000;
    const rate = seconds > 0.5 ? ` · ${((told - first[1]) / seconds).toFixed(1)} a second` : "";
    $("facts").textContent = `${count(told, "token")}${rate}`;
  });
  source.addEventListener("notice", (event) => say(JSON.parse(event.data)));
  source.addEventListener("end", (event) => {
    mine.close();
    const end = JSON.parse(event.data);
    say("");
    $("answer").append(end.text);
    setStatus(end.status);
    fail(end.error?.message ?? "");
    const used = end.usage ?? {};
    $("facts").textContent = [
      count(used.completion_tokens ?? told, "token"), WORDS[end.finish_reason],
      used.ttft_ms && `first after ${(used.ttft_ms / 1000).toFixed(2)} s`,
      used.total_ms && `${(used.total_ms / 1000).toFixed(2)} s in all`,
    ].filter(Boolean).join(" · ");
    refresh();
  });
  source.addEventListener("error", () => {
    if (mine.readyState === EventSource.CLOSED) show(job); // refused: it says why, or tries again
    else if (performance.now() - began > 500) say("Connection lost, reconnecting …");
  });
}

$("cancel").addEventListener("click", async () => {
  const job = current();
  $("cancel").disabled = true;
  try {
    const { outcome } = await call(`/api/jobs/${encodeURIComponent(job)}/cancel`, { method: "POST" });
    const isOver = OVER.includes($("status").dataset.status); // its end may be here before this answer
    if (outcome === "cancelling" && job === current() && !isOver) setStatus("cancelling");
  } catch (error) {
    say(error.message);
    $("cancel").disabled = false;
  }
});

function setStatus(status) {
  const over = OVER.includes(status);
  $("status").textContent = status;
  $("status").dataset.status = status;
  $("job").toggleAttribute("data-live", !over && status !== "…");
  $("cancel").hidden = over || status === "…";
  $("cancel").disabled = status === "cancelling";
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function say(message) { $("notice").textContent = message; }

// ── history and usage: what has ended from SQL, what has not from this browser and the queue ──

function openTitles() { return JSON.parse(localStorage.getItem("open") ?? "{}"); }
function keepOpen(titles) { localStorage.setItem("open", JSON.stringify(titles)); }

async function openJobs() {
  const titles = openTitles();
  const infos = await Promise.all(Object.keys(titles).map((job) => call(`/api/jobs/${encodeURIComponent(job)}`).catch((error) => {
    if (error.isAway) throw error;
    return { job_id: job, status: "failed" }; // the queue does not know it any more
  })));
  const open = infos.filter((info) => !OVER.includes(info.status));
  const kept = openTitles(); // another may have been submitted meanwhile
  for (const info of infos) if (!open.includes(info)) delete kept[info.job_id];
  keepOpen(kept);
  return open.map((info) => ({ ...info, metadata: { title: titles[info.job_id] } })).toReversed();
}

async function refresh() {
  try {
    const [open, jobs, days] = await Promise.all([openJobs(), call(`/api/history?limit=${PAGE + 1}`), call("/api/usage")]);
    numListed = 0;
    $("history").replaceChildren(...open.map(entry));
    list(jobs);
    showUsage(days);
  } catch (error) {
    say(error.message);
  }
}

function list(jobs) {
  $("older").hidden = jobs.length <= PAGE;
  const shown = jobs.slice(0, PAGE);
  numListed += shown.length;
  $("no-history").hidden = $("history").children.length + shown.length > 0;
  $("history").append(...shown.map(entry));
  mark(current());
}

$("older").addEventListener("click", async () => {
  try {
    list(await call(`/api/history?limit=${PAGE + 1}&offset=${numListed}`));
  } catch (error) {
    say(error.message);
  }
});

function entry(job) {
  const link = make("a", "", { href: `#${job.job_id}` });
  const tokens = job.completion_tokens ? ` · ${count(job.completion_tokens, "token")}` : "";
  const status = make("span", job.status, { className: "status" });
  status.dataset.status = job.status;
  link.append(
    make("span", job.metadata?.title || "(no title)", { className: "name" }), status,
    make("small", job.finished_ms ? new Date(job.finished_ms).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) + tokens : "not ended yet"),
  );
  const item = make("li", "");
  item.append(link);
  return item;
}

function showUsage(days) {
  $("usage").hidden = days.length === 0;
  $("no-usage").hidden = days.length > 0;
  const row = (name, of) => {
    const line = make("tr", "");
    line.append(make("th", name, { scope: "row" }), ...["jobs", "prompt_tokens", "completion_tokens"].map((key) => make("td", of(key).toLocaleString())));
    return line;
  };
  $("usage").tBodies[0].replaceChildren(...days.toReversed().map((day) => row(day.group[0], (key) => day[key])));
  const sum = (key) => days.reduce((total, day) => total + day[key], 0);
  $("usage").tFoot.replaceChildren(...(days.length > 1 ? [row("Sum", sum)] : []));
}

function mark(job) {
  for (const link of $("history").querySelectorAll("a")) {
    if (link.hash === `#${job}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function make(tag, text, properties = {}) { return Object.assign(document.createElement(tag), { textContent: text }, properties); }
function count(number, word) { return `${number.toLocaleString()} ${word}${number === 1 ? "" : "s"}`; }
function current() { return decodeURIComponent(location.hash.slice(1)); }

addEventListener("hashchange", () => show(current()));
show(current());
refresh();
