// Begins the page: the key, and the views, whose names are the page's fragment.
import { $, ApiError, call, forgetAll, key, onWrongKey, pause, show, useKey } from "./api.js";
import * as batches from "./batches.js";
import * as chat from "./chat.js";
import * as usage from "./usage.js";

const VIEWS = ["chat", "batches", "usage"];
let isIn = false;

const say = (message) => show("notice", message);

// An open gateway takes any call, so the key is asked for only where one is needed.
async function begin() {
  for (;;) {
    try {
      await call("/models");
      break;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) return;
      say(`${error.message} It is asked again …`);
      await pause(2000);
    }
  }
  say("");
  isIn = true;
  $("login").hidden = true;
  $("key").value = "";
  $("account").hidden = key() === "";
  $("key-name").textContent = key().split("-").slice(0, 2).join("-");
  view();
  chat.begin(say).catch(failed);
}

function askForKey(error) {
  const hadKey = key() !== "";
  leave();
  useKey("");
  show("key-error", hadKey ? `This key is not accepted: ${error.message}` : "");
  $("login").hidden = false;
  $("key").focus();
}

function leave() {
  isIn = false;
  chat.end();
  batches.forget();
  say("");
  $("account").hidden = true;
  for (const name of VIEWS) $(name).hidden = true;
}

function view() {
  const wanted = location.hash.slice(1);
  const name = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  batches.leave();
  if (!isIn) return;
  for (const each of VIEWS) $(each).hidden = each !== name;
  if (name === "batches") batches.enter(say).catch(failed);
  if (name === "usage") usage.enter().catch(failed);
  if (name === "chat") $("prompt").focus({ preventScroll: true });
}

function failed(error) {
  if (error instanceof ApiError && error.status === 401) return; // the key is asked for already
  say(error.message);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  show("key-error", "");
  begin().catch(failed);
});

$("forget").addEventListener("click", () => {
  leave();
  forgetAll();
  show("key-error", "");
  $("login").hidden = false;
  $("key").focus();
});

addEventListener("hashchange", view);
onWrongKey(askForKey);
chat.connect(say);
batches.connect(say);
view();
begin().catch(failed);
