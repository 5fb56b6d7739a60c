// The AI SDK with three providers: OpenAI's Responses and chats, compatible servers, Open Responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { colour, holds, key, model, question, sky, tried, url } from "./trying.mjs";

const openai = createOpenAI({ baseURL: url, apiKey: key });
const name = "tokenmill";
const compatible = createOpenAICompatible({
  name, baseURL: url, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
});
const open = createOpenResponses({ name, url: `${url}/responses`, apiKey: key });
const providers = {
  "@ai-sdk/openai responses": openai.responses(model),
  "@ai-sdk/openai chat": openai.chat(model),
  "@ai-sdk/openai-compatible chat": compatible(model),
  "@ai-sdk/open-responses responses": open(model),
};

for (const [api, provider] of Object.entries(providers)) {
  const asked = { model: provider, prompt: question, temperature: 0, maxRetries: 0 };
  const short = { ...asked, maxOutputTokens: 12 };
  const long = { ...asked, maxOutputTokens: 60 };
  const output = Output.object({ schema: colour });
  const tools = {
    sky: tool({
      description: "The sky over a city",
      inputSchema: sky,
      execute: async ({ city }) => `blue over ${city}`,
    }),
  };
  await tried(api, "plain", async () => {
    const answer = await generateText(short);
    holds(answer.text && answer.usage.outputTokens, "no text");
  });
  await tried(api, "stream", async () => {
    let failed;
    const answer = streamText({ ...short, onError: ({ error }) => (failed = error) });
    let text = "";
    for await (const part of answer.textStream) text += part;
    if (failed) throw failed;
    holds(text && (await answer.usage).outputTokens, "no text");
  });
  await tried(api, "structured", async () => {
    holds((await generateText({ ...long, output })).output.colour, "no colour");
  });
  await tried(api, "tools", async () => {
    const more = { tools, toolChoice: "required", stopWhen: stepCountIs(2) };
    const answer = await generateText({ ...long, ...more });
    holds(answer.steps.length === 2, `${answer.steps.length} steps`);
    holds(answer.steps[0].toolResults[0].output.startsWith("blue over"), "no result");
    let failed;
    const streamed = streamText({
      ...long, ...more, stopWhen: stepCountIs(1), onError: ({ error }) => (failed = error),
    });
    const calls = await streamed.toolCalls;
    if (failed) throw failed;
    holds(calls[0].input.city, "no city");
  });
}
for (const [api, provider] of Object.entries(providers)) {
  if (!api.startsWith("@ai-sdk/openai responses")) continue;
  await tried(api, "conversation", async () => {
    const asked = { model: provider, prompt: question, maxOutputTokens: 12, temperature: 0 };
    const first = await generateText(asked);
    const previousResponseId = first.providerMetadata.openai.responseId;
    const second = await generateText({ ...asked, providerOptions: { openai: { previousResponseId } } });
    holds(second.usage.inputTokens > first.usage.inputTokens, "no longer prompt");
  });
}
