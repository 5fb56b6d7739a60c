// LangChain for JavaScript: chats and Responses.
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { colour, holds, key, model, question, sky, tried, url } from "./trying.mjs";

for (const api of ["chat", "responses"]) {
  const asked = (maxTokens) =>
    new ChatOpenAI({
      model, apiKey: key, maxTokens, temperature: 0, maxRetries: 0, timeout: 300_000,
      streamUsage: true, useResponsesApi: api === "responses", configuration: { baseURL: url },
    });
  const look = tool(async ({ city }) => `blue over ${city}`, {
    name: "sky", description: "The sky over a city", schema: sky,
  });
  const joined = async (stream) => {
    let whole;
    for await (const chunk of stream) whole = whole ? whole.concat(chunk) : chunk;
    return whole;
  };
  await tried(api, "plain", async () => {
    const answer = await asked(12).invoke(question);
    holds(answer.text && answer.usage_metadata.output_tokens, "no text");
  });
  await tried(api, "stream", async () => {
    const answer = await joined(await asked(12).stream(question));
    holds(answer.text && answer.usage_metadata.output_tokens, "no text");
  });
  await tried(api, "structured", async () => {
    const structured = asked(60).withStructuredOutput(colour, { method: "jsonSchema", name: "colour" });
    holds((await structured.invoke(question)).colour, "no colour");
  });
  await tried(api, "tools", async () => {
    // with Responses it leaves "required" out of its request
    const bound = asked(60).bindTools([look], { tool_choice: "sky", strict: true });
    const answer = await bound.invoke(question);
    holds(answer.tool_calls[0].args.city, "no city");
    holds((await joined(await bound.stream(question))).tool_calls[0].args.city, "no city");
    const said = await look.invoke(answer.tool_calls[0]);
    const turns = [{ role: "user", content: question }, answer, said];
    const again = await asked(12).bindTools([look]).invoke(turns);
    holds(again.usage_metadata.output_tokens, "no token");
  });
}
