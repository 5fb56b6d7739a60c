// The conversation of this tab. Each turn is a background response that continues the one before it.
import { $, ask, call, count, make, newKey, pause, setStatus, show } from "./api.js";
import { follow, isOver } from "./answer.js";

const TURNS = "tokenmill.turns";
const SAVED_MS = 300; // at most so many ms of tokens are read twice after a reload
const REASONS = { max_output_tokens: "token limit reached" };
let turns = [];
let views = []; // the elements of each turn
let leaving = new AbortController();
let isOpen = false; // without a key nothing is shown, and nothing kept is changed
let savedAt = 0;

export async function begin(say) {
  leaving.abort();
  turns = JSON.parse(sessionStorage.getItem(TURNS) ?? "[]");
  isOpen = true;
  leaving = new AbortController();
  views = [];
  $("turns").replaceChildren();
  for (const turn of turns) add(turn);
  controls();
  const last = turns.at(-1);
  if (last && !isOver(last)) run(last, say);
  await listModels(leaving.signal);
}

export function end() {
  leaving.abort();
  isOpen = false;
  turns = [];
  views = [];
  $("turns").replaceChildren();
}

// ── models ──

async function listModels(signal) {
  while (!signal.aborted) {
    let data = [];
    try {
      ({ data } = await call("/models"));
    } catch (error) {
      if (!error.isPassing) throw error;
    }
    if (signal.aborted) return;
    const chosen = $("model").value || sessionStorage.getItem("tokenmill.model");
    $("model").replaceChildren(...data.map(({ id }) => make("option", id, { value: id, selected: id === chosen })));
    $("no-models").hidden = data.length > 0;
    controls();
    if (data.length > 0) return;
    await pause(3000);
  }
}

$("model").addEventListener("change", () => sessionStorage.setItem("tokenmill.model", $("model").value));

// ── sending ──

export function connect(say) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("send").disabled) return;
    send(say);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("cancel").addEventListener("click", cancel);
  $("new").addEventListener("click", () => {
    turns = [];
    views = [];
    $("turns").replaceChildren();
    save();
    controls();
    $("prompt").focus();
  });
  addEventListener("pagehide", save);
}

function send(say) {
  const prompt = $("prompt").value;
  if (!prompt.trim()) return;
  show("send-error", "");
  const previous = turns.findLast((turn) => turn.id !== "" && turn.status !== "failed");
  const request = {
    model: $("model").value, input: prompt,
    max_output_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
    ...(previous && { previous_response_id: previous.id }),
  };
  const turn = {
    request, idempotency: newKey(), id: "", number: -1, text: "", thoughts: "", tokens: 0,
    status: "sending", error: "", usage: null, reason: "",
  };
  turns.push(turn);
  add(turn);
  $("prompt").value = "";
  save();
  run(turn, say);
}

async function run(turn, say) {
  controls();
  const view = views.at(-1);
  const { signal } = leaving;
  const changed = () => { draw(turn, view); controls(); saveSoon(); };
  try {
    await follow(turn, changed, say, signal);
  } catch (error) {
    Object.assign(turn, { status: "failed", error: `The page failed: ${error.message}` });
    changed();
  }
  if (signal.aborted) return;
  say("");
  if (turn.id === "" && $("prompt").value === "") $("prompt").value = turn.request.input; // it was refused
  save();
  controls();
}

async function cancel() {
  const turn = turns.at(-1);
  $("cancel").disabled = true;
  try {
    await ask(`/responses/${encodeURIComponent(turn.id)}/cancel`, { method: "POST" });
  } catch (error) {
    show("send-error", error.message);
    $("cancel").disabled = false;
  }
}

function controls() {
  const last = turns.at(-1);
  const isBusy = Boolean(last && !isOver(last));
  if ($("cancel").hidden === isBusy) $("cancel").disabled = false;
  $("cancel").hidden = !isBusy || last.id === "";
  $("send").disabled = isBusy || $("model").options.length === 0;
  $("new").disabled = isBusy || turns.length === 0;
  $("no-turns").hidden = turns.length > 0;
}

// ── keeping ──

function saveSoon() {
  const last = turns.at(-1);
  if (performance.now() - savedAt > SAVED_MS || (last && (isOver(last) || last.number < 2))) save();
}

// Text and number are stored together, so what is read again begins where the text ends.
function save() {
  if (!isOpen) return;
  savedAt = performance.now();
  for (let first = 0; first <= turns.length; first += 1) {
    try {
      return sessionStorage.setItem(TURNS, JSON.stringify(turns.slice(first)));
    } catch { // the tab's storage is full: the oldest turns are not kept
    }
  }
}

// ── showing ──

function add(turn) {
  const view = {
    item: make("li"), thoughts: make("p"), folded: make("details", "", { className: "thoughts" }),
    answer: make("p", "", { className: "answer" }), error: make("p", "", { className: "error", hidden: true }),
    facts: make("div", "", { className: "facts" }), badge: make("span", "", { className: "status" }), words: make("span"),
    shown: 0, thought: 0, since: 0, from: 0,
  };
  view.folded.append(make("summary", "Thoughts"), view.thoughts);
  view.facts.append(view.badge, view.words);
  view.item.append(make("p", turn.request.input, { className: "asked" }), view.folded, view.answer, view.error, view.facts);
  views.push(view);
  $("turns").append(view.item);
  draw(turn, view);
  scrollTo(0, document.documentElement.scrollHeight);
}

function draw(turn, view) {
  const isNear = innerHeight + scrollY > document.documentElement.scrollHeight - 160;
  view.answer.append(turn.text.slice(view.shown));
  view.thoughts.append(turn.thoughts.slice(view.thought));
  view.shown = turn.text.length;
  view.thought = turn.thoughts.length;
  view.folded.hidden = turn.thoughts === "";
  view.error.textContent = turn.error;
  view.error.hidden = turn.error === "";
  view.item.toggleAttribute("data-live", !isOver(turn));
  setStatus(view.badge, turn.status);
  view.words.textContent = facts(turn, view);
  if (isNear && !$("chat").hidden) scrollTo(0, document.documentElement.scrollHeight);
}

function facts(turn, view) {
  if (isOver(turn)) {
    const used = turn.usage;
    return [
      turn.request.model, used && count(used.input_tokens, "input token"), used && count(used.output_tokens, "output token"),
      REASONS[turn.reason],
    ].filter(Boolean).join(" · ");
  }
  if (turn.tokens === 0) return turn.request.model;
  if (view.since === 0) Object.assign(view, { since: performance.now(), from: turn.tokens });
  const seconds = (performance.now() - view.since) / 1000;
  const rate = seconds > 0.5 ? ` · ${((turn.tokens - view.from) / seconds).toFixed(1)} per second` : "";
  return `${turn.request.model} · ${count(turn.tokens, "token")}${rate}`;
}
