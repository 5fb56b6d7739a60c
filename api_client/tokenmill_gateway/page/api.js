// Calls the API with the key of this tab. sessionStorage holds the key: a reload keeps it, another tab has none.
const KEY = "tokenmill.key";
const LIMITS = "tokenmill.limits";

export class ApiError extends Error {
  // status 0: no answer came, so another try may help
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }

  get isPassing() { return [0, 408, 429, 502, 503, 504].includes(this.status); }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const useKey = (text) => sessionStorage.setItem(KEY, text);
export const limits = () => JSON.parse(sessionStorage.getItem(LIMITS) ?? "null");

export function forgetAll() {
  for (const name of Object.keys(sessionStorage)) if (name.startsWith("tokenmill.")) sessionStorage.removeItem(name);
}

// Returns the answer if it is a good one. `wrongKey` is told of every 401.
let wrongKey = () => {};
export const onWrongKey = (then) => { wrongKey = then; };

export async function ask(path, { headers = {}, json, ...options } = {}) {
  const sent = { ...headers };
  if (key()) sent.Authorization = `Bearer ${key()}`;
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    options = { method: "POST", body: JSON.stringify(json), ...options };
  }
  let answer;
  try {
    answer = await fetch(`/v1${path}`, { ...options, headers: sent, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway cannot be reached.");
  }
  keepLimits(answer.headers);
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const found = body?.error ?? {};
  const error = new ApiError(found.message ?? `The gateway answered ${answer.status}.`, answer.status, found.code ?? "");
  error.waitMs = Number(answer.headers.get("retry-after-ms")) || 0;
  if (answer.status === 401) wrongKey(error);
  throw error;
}

export async function call(path, options) {
  const answer = await ask(path, options);
  return answer.json().catch(() => { throw new ApiError("The connection broke."); });
}

function keepLimits(headers) {
  const most = headers.get("x-ratelimit-limit-requests");
  if (most === null) return;
  const found = { most, left: headers.get("x-ratelimit-remaining-requests"), reset: headers.get("x-ratelimit-reset-requests") };
  sessionStorage.setItem(LIMITS, JSON.stringify(found));
}

// ── small parts that all views use ──

export const $ = (id) => document.getElementById(id);

// All that comes from a model, a file or the API becomes text, never markup.
export function make(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

export function setStatus(badge, status, words = status.replaceAll("_", " ")) {
  badge.textContent = words;
  badge.dataset.status = status;
}

export function show(id, message) {
  $(id).textContent = message;
  $(id).hidden = !message;
}

export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
