// Follows one response to its end. The answer belongs to the queue, so a reload or a broken connection loses nothing:
// the response's id and the number of its last event say where to go on, on any gateway.
import { ApiError, ask, pause } from "./api.js";

const WAITS_MS = [300, 700, 1500, 3000, 5000];

// `turn` holds all that is known of an answer, and is changed in place: { request, idempotency, id, number, text,
// thoughts, status, error, usage, reason }. `changed` is called after each change, `says` with what the reader waits for.
export async function follow(turn, changed, says, signal) {
  for (let tries = 0; ; ) {
    const before = turn.number;
    let words = "The connection broke.";
    try {
      const answer = await opened(turn, signal);
      says("");
      for await (const event of eventsOf(answer.body)) {
        if (take(turn, event)) changed();
        if (isOver(turn)) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) return;
      const isRefused = !error.isPassing || (error.status === 429 && turn.id === "");
      if (isRefused) {
        Object.assign(turn, { status: "failed", error: error.message });
        return changed();
      }
      words = error.message;
    }
    tries = turn.number > before ? 0 : tries + 1;
    says(`${words} ${turn.id === "" ? "The prompt is sent again …" : "The answer goes on when it is back …"}`);
    await pause(WAITS_MS[Math.min(tries, WAITS_MS.length - 1)]);
    if (signal.aborted) return;
  }
}

export const isOver = (turn) => ["completed", "incomplete", "failed", "cancelled"].includes(turn.status);

// The first request may have arrived though its answer did not: with the same idempotency key it joins that answer.
function opened(turn, signal) {
  if (turn.id === "") {
    const json = { ...turn.request, background: true, stream: true };
    return ask("/responses", { json, headers: { "Idempotency-Key": turn.idempotency }, signal });
  }
  return ask(`/responses/${encodeURIComponent(turn.id)}?stream=true&starting_after=${turn.number}`, { signal });
}

// Yields the events of a stream. Raises ApiError where it breaks.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(() => { throw new ApiError("The connection broke."); });
      if (done) return;
      const [...whole] = (rest + value).split("\n\n");
      rest = whole.pop();
      for (const block of whole) {
        const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Takes an event into the turn, once: returns whether it was new.
function take(turn, event) {
  const isEnd = /^response\.(completed|incomplete|failed)$/.test(event.type);
  if (!isEnd && event.sequence_number <= turn.number) return false;
  turn.number = Math.max(turn.number, event.sequence_number);
  switch (event.type) {
    case "response.created":
      turn.id = event.response.id;
      turn.status = event.response.status;
      break;
    case "response.in_progress":
      turn.status = "in_progress";
      break;
    case "response.output_text.delta":
      turn.text += event.delta;
      turn.tokens += 1;
      break;
    case "response.reasoning_text.delta":
      turn.thoughts += event.delta;
      turn.tokens += 1;
      break;
    case "error":
      turn.error = event.message;
      break;
    default:
      if (!isEnd) return true;
      turn.status = event.response.status;
      turn.usage = event.response.usage;
      turn.reason = event.response.incomplete_details?.reason ?? "";
      if (turn.status === "failed") turn.error ||= event.response.error?.message ?? "The answer failed.";
  }
  return true;
}
