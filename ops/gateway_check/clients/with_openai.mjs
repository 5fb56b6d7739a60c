// OpenAI's client for Node.
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { zodResponsesFunction } from "openai/helpers/zod";
import { colour, holds, key, model, question, sky, tried, url } from "./trying.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 300_000 });
const chat = { model, messages: [{ role: "user", content: question }], max_tokens: 12, temperature: 0 };
const asked = { model, input: question, max_output_tokens: 12, temperature: 0 };
const isNumbered = (events) => events.every((event, place) => event.sequence_number === place);
const all = async (stream) => {
  const found = [];
  for await (const event of stream) found.push(event);
  return found;
};

await tried("chat", "plain", async () => {
  const answer = await client.chat.completions.create(chat);
  holds(answer.choices[0].message.content && answer.usage.completion_tokens, "no text");
});
await tried("chat", "stream", async () => {
  const runner = client.chat.completions.stream({ ...chat, stream_options: { include_usage: true } });
  const answer = await runner.finalChatCompletion();
  holds(answer.choices[0].message.content && answer.usage.completion_tokens, "no text");
});
await tried("chat", "structured", async () => {
  const response_format = zodResponseFormat(colour, "colour");
  const answer = await client.chat.completions.parse({ ...chat, max_tokens: 60, response_format });
  holds(answer.choices[0].message.parsed.colour, "no colour");
});
await tried("chat", "tools", async () => {
  const tools = [zodFunction({ name: "sky", parameters: sky })];
  const body = { ...chat, max_tokens: 60, tools, tool_choice: "required" };
  const answer = await client.chat.completions.parse(body);
  holds(answer.choices[0].message.tool_calls[0].function.parsed_arguments.city, "no city");
  const streamed = await client.chat.completions.stream(body).finalChatCompletion();
  holds(streamed.choices[0].message.tool_calls[0].function.parsed_arguments.city, "no city");
});
await tried("chat", "resume", async () => {
  const headers = { "Idempotency-Key": `node-${Date.now()}` };
  const first = await all(await client.chat.completions.create({ ...chat, stream: true }, { headers }));
  const again = await all(await client.chat.completions.create({ ...chat, stream: true }, { headers }));
  const text = (chunks) => chunks.map((one) => one.choices[0]?.delta.content ?? "").join("");
  holds(text(first) && text(first) === text(again), "another text");
});
await tried("completions", "plain", async () => {
  const answer = await client.completions.create({ model, prompt: "Red", max_tokens: 6 });
  holds(answer.choices[0].text, "no text");
});
await tried("completions", "stream", async () => {
  const body = { model, prompt: "Red", max_tokens: 6, stream: true };
  const chunks = await all(await client.completions.create(body));
  holds(chunks.at(-1).choices[0].finish_reason, "no reason");
});
await tried("responses", "plain", async () => {
  const answer = await client.responses.create(asked);
  holds(answer.output_text, "no text");
  holds((await client.responses.retrieve(answer.id)).output_text === answer.output_text, "other");
});
await tried("responses", "stream", async () => {
  const answer = await client.responses.stream(asked).finalResponse();
  holds(answer.output_text, "no text");
  holds(isNumbered(await all(await client.responses.create({ ...asked, stream: true }))), "a gap");
});
await tried("responses", "structured", async () => {
  const text = { format: zodTextFormat(colour, "colour") };
  const answer = await client.responses.parse({ ...asked, max_output_tokens: 60, text });
  holds(answer.output_parsed.colour, "no colour");
});
await tried("responses", "tools", async () => {
  const tools = [zodResponsesFunction({ name: "sky", parameters: sky })];
  const body = { ...asked, max_output_tokens: 60, tools, tool_choice: "required" };
  const first = await client.responses.parse(body);
  const call = first.output.at(-1);
  holds(call.parsed_arguments.city, "no city");
  const output = { type: "function_call_output", call_id: call.call_id, output: "blue" };
  const more = { input: [output], previous_response_id: first.id, tools };
  holds((await client.responses.create({ ...asked, ...more })).usage.output_tokens, "no token");
});
await tried("responses", "resume", async () => {
  const seen = [];
  for await (const event of await client.responses.create({ ...asked, background: true, stream: true })) {
    seen.push(event);
    if (seen.length === 6) break;
  }
  const from = { stream: true, starting_after: seen.at(-1).sequence_number };
  const rest = await all(await client.responses.retrieve(seen[0].response.id, from));
  holds(isNumbered([...seen, ...rest]), "a gap");
  const helper = client.responses.stream({ response_id: seen[0].response.id, starting_after: 5 });
  holds((await all(helper)).length === rest.length, "the helper has other events");
  holds((await helper.finalResponse()).usage.output_tokens, "no usage");
});
await tried("responses", "conversation", async () => {
  const first = await client.responses.create(asked);
  const second = await client.responses.create({ ...asked, previous_response_id: first.id });
  holds(second.usage.input_tokens > first.usage.input_tokens, "no longer prompt");
  const items = await all(client.responses.inputItems.list(second.id));
  holds(items.length === 1, `${items.length} items`);
});
await tried("files, batches", "batch", async () => {
  const endpoint = "/v1/responses";
  const line = { custom_id: "a", method: "POST", url: endpoint, body: asked };
  const file = await client.files.create({
    file: await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl"),
    purpose: "batch",
  });
  const wanted = { input_file_id: file.id, endpoint, completion_window: "24h" };
  let batch = await client.batches.create(wanted);
  for (let left = 600; !["completed", "failed", "expired"].includes(batch.status); left--) {
    holds(left, `the batch is ${batch.status}`);
    await new Promise((done) => setTimeout(done, 500));
    batch = await client.batches.retrieve(batch.id);
  }
  const answers = await (await client.files.content(batch.output_file_id)).text();
  holds(JSON.parse(answers).custom_id === "a", answers);
});
await tried("models", "plain", async () => {
  holds((await all(client.models.list())).some((one) => one.id === model), "not listed");
});
