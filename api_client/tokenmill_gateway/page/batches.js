// Batches: a file is uploaded, its batch is watched, and its output fetched.
import { $, ask, call, count, make, setStatus, show } from "./api.js";

const OVER = ["completed", "failed", "expired", "cancelled"];
const STOPPABLE = ["validating", "in_progress", "finalizing"];
const WATCHED_MS = 1500;
const FIRST_LINE_BYTES = 65536;
let timer = 0;
let isShown = false;
const views = new Map(); // by the batch's id

export function connect(say) {
  $("batch-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    show("batch-error", "");
    $("batch-start").disabled = true;
    try {
      await start($("batch-file").files[0]);
      $("batch-form").reset();
      await refresh(say);
    } catch (error) {
      show("batch-error", error.message);
    } finally {
      $("batch-start").disabled = false;
    }
  });
}

export function enter(say) {
  isShown = true;
  return refresh(say);
}

export function leave() {
  isShown = false;
  clearTimeout(timer);
}

export function forget() {
  leave();
  views.clear();
  $("batch-list").replaceChildren();
}

async function start(file) {
  const endpoint = await endpointOf(file);
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  const uploaded = await call("/files", { method: "POST", body: form });
  const json = {
    input_file_id: uploaded.id, endpoint, completion_window: $("batch-window").value, metadata: { name: file.name.slice(0, 200) },
  };
  await call("/batches", { json });
}

// All lines of a batch name its endpoint, so the first one does.
async function endpointOf(file) {
  const begun = await file.slice(0, FIRST_LINE_BYTES).text();
  const line = begun.split("\n").find((each) => each.trim()) ?? "";
  const found = /"url"\s*:\s*"([^"\\]+)"/.exec(line);
  if (!found) throw new Error("The first line names no url, for example /v1/chat/completions.");
  return found[1];
}

async function refresh(say) {
  clearTimeout(timer);
  let isLive = false;
  try {
    const { data } = await call("/batches?limit=20");
    const live = data.filter((batch) => !OVER.includes(batch.status));
    // the list has the counts of the last look of the tasks, one batch those of now
    const now = await Promise.all(live.map((batch) => call(`/batches/${encodeURIComponent(batch.id)}`)));
    const fresh = new Map(now.map((batch) => [batch.id, batch]));
    list(data.map((batch) => fresh.get(batch.id) ?? batch));
    isLive = live.length > 0;
    say("");
  } catch (error) {
    if (error.status === 401) return;
    if (error.isPassing) {
      say(`${error.message} The batches are asked for again …`);
      isLive = true;
    } else {
      show("batch-error", error.message);
      if (error.code === "unknown_url") $("batch-form").hidden = $("no-batches").hidden = true; // no --files
    }
  }
  if (isShown && isLive) timer = setTimeout(() => refresh(say), WATCHED_MS);
}

function list(batches) {
  $("no-batches").hidden = batches.length > 0;
  const items = batches.map((batch) => {
    if (!views.has(batch.id)) views.set(batch.id, entry(batch));
    const view = views.get(batch.id);
    draw(batch, view);
    return view.item;
  });
  const known = [...$("batch-list").children];
  if (items.length !== known.length || items.some((item, place) => item !== known[place])) $("batch-list").replaceChildren(...items);
}

function entry(batch) {
  const view = {
    item: make("li"), badge: make("span", "", { className: "status" }), bar: make("progress", "", { max: 1, value: 0 }),
    facts: make("p", "", { className: "hint" }), error: make("p", "", { className: "error", hidden: true }),
    does: make("div", "", { className: "does" }), drawn: "",
  };
  const head = make("div", "", { className: "bar" });
  const name = batch.metadata?.name ?? batch.id;
  head.append(make("span", name, { className: "name" }), view.badge);
  view.bar.setAttribute("aria-label", `Progress of ${name}`);
  view.item.append(head, view.bar, view.facts, view.error, view.does);
  return view;
}

function draw(batch, view) {
  const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
  setStatus(view.badge, batch.status);
  view.bar.max = total || 1;
  view.bar.value = completed + failed;
  view.facts.textContent = [
    `${(completed + failed).toLocaleString("en")} of ${count(total, "line")}`, failed > 0 && `${failed.toLocaleString("en")} failed`,
    batch.model, new Date(batch.created_at * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
  ].filter(Boolean).join(" · ");
  const errors = (batch.errors?.data ?? []).map(({ line, message }) => (line ? `Line ${line}: ${message}` : message));
  view.error.textContent = errors.slice(0, 5).join("\n");
  view.error.hidden = errors.length === 0;
  const drawn = [batch.status, batch.output_file_id, batch.error_file_id].join();
  if (drawn === view.drawn) return; // a button that has the focus keeps it
  view.drawn = drawn;
  const buttons = [];
  if (batch.output_file_id) buttons.push(fetched("Download output", batch.output_file_id, `${batch.id}_output.jsonl`));
  if (batch.error_file_id) buttons.push(fetched("Download errors", batch.error_file_id, `${batch.id}_errors.jsonl`));
  if (STOPPABLE.includes(batch.status)) buttons.push(button("Cancel", () => stop(batch, view)));
  view.does.replaceChildren(...buttons);
}

async function stop(batch, view) {
  draw(await call(`/batches/${encodeURIComponent(batch.id)}/cancel`, { method: "POST" }), view);
}

function fetched(words, fileId, name) {
  return button(words, async () => {
    const answer = await ask(`/files/${encodeURIComponent(fileId)}/content`);
    const url = URL.createObjectURL(await answer.blob());
    make("a", "", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  });
}

function button(words, then) {
  const made = make("button", words, { type: "button", className: "quiet" });
  made.addEventListener("click", async () => {
    made.disabled = true;
    show("batch-error", "");
    try {
      await then();
    } catch (error) {
      show("batch-error", error.message);
    } finally {
      made.disabled = false;
    }
  });
  return made;
}
