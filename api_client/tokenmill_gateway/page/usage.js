// The tenant's usage of seven days, and what the gateway has said of the key's rate.
import { $, call, limits, make } from "./api.js";

const DAYS = 7;

export async function enter() {
  const today = Math.floor(Date.now() / 86400000) * 86400;
  const { data } = await call(`/organization/usage/completions?start_time=${today - (DAYS - 1) * 86400}&limit=${DAYS}&group_by=model`);
  const rows = data.toReversed().flatMap((day) => day.results.map((result) => [new Date(day.start_time * 1000).toISOString().slice(0, 10), result]));
  showUsage(rows);
  showLimits();
}

function showUsage(rows) {
  $("usage-table").hidden = rows.length === 0;
  $("no-usage").hidden = rows.length > 0;
  $("usage-table").tBodies[0].replaceChildren(...rows.map(([day, used]) => line(day, used.model ?? "", used)));
  const sum = {};
  for (const name of ["num_model_requests", "input_tokens", "output_tokens"]) sum[name] = rows.reduce((total, [, used]) => total + used[name], 0);
  $("usage-table").tFoot.replaceChildren(...(rows.length > 1 ? [line("Sum", "", sum)] : []));
}

function line(name, model, used) {
  const made = make("tr");
  const numbers = [used.num_model_requests, used.input_tokens, used.output_tokens];
  made.append(make("th", name, { scope: "row" }), make("td", model), ...numbers.map((number) => make("td", number.toLocaleString("en"))));
  return made;
}

function showLimits() {
  const found = limits();
  $("no-limits").hidden = found !== null;
  $("limits").replaceChildren();
  if (found === null) return;
  const entries = [
    ["Requests at once", found.most], ["Left after the last one", found.left], ["All of them again after", `${Math.ceil(parseFloat(found.reset))} s`],
  ];
  for (const [name, value] of entries) $("limits").append(make("dt", name), make("dd", value));
}
