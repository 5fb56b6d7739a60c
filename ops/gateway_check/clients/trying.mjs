// What the scripts of all clients in JavaScript share. A script prints a line of JSON for each thing
// that it tried.
import { z } from "zod";

export const url = process.env.OPENAI_BASE_URL;
export const key = process.env.OPENAI_API_KEY;
export const model = process.env.MODEL;
export const question = "Name a colour.";
export const colour = z.object({ colour: z.enum(["red", "green", "blue"]) });
export const sky = z.object({ city: z.enum(["Rome", "Oslo"]) });

export async function tried(api, thing, attempt) {
  let error = null;
  try {
    await attempt();
  } catch (reason) {
    error = `${reason?.name}: ${reason?.message}`.slice(0, 600);
  }
  console.log(JSON.stringify({ api, thing, error }));
}

export function holds(value, words) {
  if (!value) throw new Error(words);
}
