"""The page for a browser: one conversation, and the list of saved sessions beside it.

Owns the whole page, style and script included; refuses everything from outside: no other file, no other host, nothing
that is built. It is a Python module so that it is found wherever the other modules are. Invariant: what users, models
and files say is put in as text, never as HTML, and the policy in HEADERS forbids any script and style but these two.

Read next: ``httpfront.py``, which serves this at ``/``.
"""

import base64
import hashlib
import re

PAGE = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>strata</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #2a8f4f; --bad: #c0392b; }
* { box-sizing: border-box; }
body { margin: 0; height: 100vh; display: grid; grid-template: auto 1fr / 1fr 24rem;
  font: 15px/1.5 system-ui, sans-serif; }
header { grid-column: 1 / -1; display: flex; gap: 1rem; align-items: baseline; padding: .6rem 1rem;
  border-bottom: 1px solid var(--line); }
header h1 { font-size: 1.1rem; margin: 0; }
header .state { margin-left: auto; opacity: .75; }
main { display: flex; flex-direction: column; min-height: 0; }
#messages { flex: 1; overflow-y: auto; padding: 1rem; }
.message { max-width: 46rem; margin: 0 auto .9rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.message.user { background: var(--soft); border-radius: .6rem; padding: .5rem .8rem; }
.message details { opacity: .7; font-size: .9em; }
.message.system, .message.tool, .message.raw { border-left: 3px solid var(--line); padding-left: .8rem; opacity: .8; }
#activity, .offer { text-align: center; padding: 0 1rem .5rem; opacity: .8; font-size: .9em; }
.note { text-align: center; opacity: .7; font-size: .9em; margin-bottom: .9rem; }
form { display: flex; gap: .5rem; padding: .7rem 1rem; }
#ask { border-top: 1px solid var(--line); }
textarea { flex: 1; resize: none; font: inherit; padding: .4rem .6rem; }
aside { border-left: 1px solid var(--line); overflow-y: auto; min-width: 0; }
aside h2 { font-size: 1rem; margin: .8rem 1rem 0; }
#save input { flex: 1; min-width: 0; font: inherit; }
#progress { padding: 0 1rem .6rem; }
#progress progress { width: 100%; }
ul { list-style: none; margin: 0; padding: 0 1rem 1rem; }
li { border-top: 1px solid var(--line); padding: .5rem 0; }
li .name { font-weight: 600; overflow-wrap: anywhere; }
li .facts { font-size: .85em; opacity: .8; }
li .match { color: var(--good); }
li .mismatch { color: var(--bad); }
button { font: inherit; padding: .2rem .7rem; }
li button { margin: .2rem .4rem 0 0; }
#error { color: var(--bad); padding: 0 1rem; min-height: 1.5em; overflow-wrap: anywhere; }
@media (max-width: 50rem) { body { grid-template: auto 2fr 1fr / 1fr; } aside { border-left: 0; } }
</style>
</head>
<body>
<header><h1>strata</h1><span id="model"></span><span class="state" id="state" role="status"></span></header>
<main>
<div id="messages" role="log" aria-label="Conversation"></div>
<div id="activity" role="status"></div>
<div class="offer" id="foreign" hidden>Another client's conversation is held now.
 <button id="show" type="button">Show it</button></div>
<div class="offer" id="before" hidden>Another conversation is shown now.
 <button id="back" type="button">Back to my chat</button></div>
<div id="error" role="alert"></div>
<form id="ask">
<textarea id="text" rows="3" aria-label="Message"
 placeholder="Message: Enter sends, Shift+Enter is a new line"></textarea>
<button id="send">Send</button>
<button id="stop" type="button" hidden>Stop</button>
<button id="fresh" type="button">New chat</button>
</form>
</main>
<aside>
<section id="kept" hidden>
<h2>Conversations</h2>
<ul id="conversations" aria-label="Conversations"></ul>
</section>
<section id="files" hidden>
<h2>Saved sessions</h2>
<form id="save"><input id="name" value="chat1.bin" aria-label="File name" maxlength="200"><button>Save</button></form>
<div id="progress" hidden><span id="doing"></span><progress max="1"></progress></div>
<ul id="sessions" aria-label="Saved sessions"></ul>
</section>
</aside>
<dialog id="locked"><form method="dialog" id="unlock">
<label>API key <input id="key" type="password" autocomplete="off" required></label><button>Use</button>
</form></dialog>
<script>
"use strict";
const el = id => document.getElementById(id);
// What is on the screen. The server's tokens are the truth: whatever was not typed here is asked of them.
let messages = [];
let displaced = null;
let seen = null;
let running = null;
let begun = false;
let operating = false;
let polling = false;
const WRITTEN_MS = 2000; // after an answer: by then the store has most of them

function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- The server ---

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let asking = null;
function askForKey() {
  asking ??= new Promise(resolve => {
    el("locked").addEventListener("close", () => {
      sessionStorage.setItem("key", el("key").value);
      asking = null;
      resolve();
    }, { once: true });
    el("locked").showModal();
  });
  return asking;
}

async function call(path, options = {}) {
  for (;;) {
    const headers = { "Content-Type": "application/json" };
    const key = sessionStorage.getItem("key");
    if (key) headers.Authorization = "Bearer " + key;
    const answer = await fetch(path, { ...options, headers });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      await askForKey();
      continue;
    }
    const body = await answer.json().catch(() => null);
    throw new ServerError(body?.error?.message ?? `the server answered ${answer.status}`, answer.status);
  }
}

function post(path, body, signal) {
  return call(path, { method: "POST", body: JSON.stringify(body), signal });
}

function show(error) {
  el("error").textContent = error ? error.message : "";
}

// --- Numbers for people ---

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

function age(seconds) {
  for (const [length, name] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= length) return `${Math.floor(seconds / length)} ${name} ago`;
  return "just now";
}

function match(session) {
  if (session.problem) return ["mismatch", session.problem];
  if (session.match) return ["match", "matches"];
  if (session.model_match === false) return ["mismatch", "of another model"];
  if (session.match === false) return ["mismatch", "of other settings"];
  return ["", "match unknown"];
}

// --- The conversation ---

function addMessage(role, text) {
  const shown = node("div", `message ${role}`);
  const words = node("span", "words", text);
  shown.append(words);
  el("messages").append(shown);
  el("messages").scrollTop = el("messages").scrollHeight;
  return words;
}

function addNote(text) {
  el("messages").append(node("div", "note", text));
}

function redraw() {
  el("messages").replaceChildren();
  for (const message of messages) {
    const words = addMessage(message.role, message.content);
    if (message.reasoning_content) thinkingOf(words).textContent = message.reasoning_content;
  }
}

function words(message) {
  return message.content.trim();
}

// The last token of an answer is not held yet, and a template may begin with a system text of its own.
function same(one, other) {
  const [ones, others] = [one, other].map(all => all.filter(message => message.role !== "system"));
  return ones.length === others.length && ones.every((message, i) => message.role === others[i].role
    && (words(message).startsWith(words(others[i])) || words(others[i]).startsWith(words(message))));
}

async function showHeld() {
  const held = await (await call("slots/0/conversation")).json();
  if (running) return;
  seen = held.n_changes;
  const found = held.messages ?? [];
  if (held.messages && same(messages, found)) return offer();
  replace(held);
}

// Put a conversation, as the server tells it from its tokens, in place of what is shown.
function replace({ messages: found, text }) {
  if (messages.length && !same(messages, found ?? [])) displaced = messages;
  messages = found ?? [];
  redraw();
  if (!found) addMessage("raw", text);
  offer();
}

function offer(foreign = false) {
  el("foreign").hidden = !foreign;
  el("before").hidden = !displaced;
}

async function begin() {
  if (messages.length || running) return;
  try {
    await showHeld();
  } catch (error) {
    if (error.status === 503) setTimeout(begin, 1000);
    else show(error);
  }
}

function thinkingOf(words) {
  let text = words.parentElement.querySelector("details > div");
  if (!text) {
    const details = node("details");
    text = node("div");
    details.append(node("summary", "", "Thinking"), text);
    words.before(details);
  }
  return text;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  const message = { role: "assistant", content: "" };
  const words = addMessage("assistant", "");
  running = new AbortController();
  begun = false;
  displaced = null;
  offer();
  busy();
  poll();
  try {
    const answer = await post("v1/chat/completions", { messages, stream: true }, running.signal);
    for await (const event of events(answer)) {
      if (event.error) throw new ServerError(event.error.message);
      take(event, message, words);
    }
  } catch (error) {
    if (error.name !== "AbortError") show(error);
  } finally {
    running = null;
    seen = null;
    // A question without any answer is taken back, so that it can be asked again.
    if (message.content || message.reasoning_content) messages.push(message);
    else { messages.pop(); el("text").value ||= text; redraw(); }
    busy();
    refresh();
    setTimeout(refresh, WRITTEN_MS);
  }
}

function take(event, message, words) {
  begun = true;
  const choice = event.choices[0];
  const atEnd = el("messages").scrollTop + el("messages").clientHeight >= el("messages").scrollHeight - 40;
  if (choice?.delta.content) words.textContent = message.content += choice.delta.content;
  if (choice?.delta.reasoning_content) {
    message.reasoning_content = (message.reasoning_content ?? "") + choice.delta.reasoning_content;
    thinkingOf(words).textContent = message.reasoning_content;
  }
  if (event.timings) {
    const { cache_n, prompt_n, predicted_per_second } = event.timings;
    addNote(`${cache_n} tokens reused, ${prompt_n} read, ${predicted_per_second.toFixed(1)} tokens a second`);
  }
  if (atEnd) el("messages").scrollTop = el("messages").scrollHeight;
}

// --- Saved sessions ---

async function operate(work) {
  show(null);
  operating = true;
  busy();
  poll();
  try {
    await work();
  } catch (error) {
    show(error);
  } finally {
    operating = false;
    busy();
    refresh();
  }
}

async function saveAs(filename) {
  const ask = overwrite => post("slots/0?action=save", { filename, overwrite });
  try {
    return await (await ask(false)).json();
  } catch (error) {
    if (error.status !== 409) throw error;
    if (!confirm(`There is a ${filename} already. Replace it?`)) return null;
    return await (await ask(true)).json();
  }
}

function save(name) {
  return operate(async () => {
    const saved = await saveAs(name);
    if (!saved) return;
    await showHeld();
    addNote(`saved ${saved.n_saved} tokens to ${name}`);
  });
}

function restore(name) {
  return operate(async () => {
    const restored = await (await post("slots/0?action=restore", { filename: name })).json();
    await showHeld();
    addNote(`restored ${restored.n_restored} tokens from ${name}`);
  });
}

// A conversation of the store: its next message is all that it takes to go on with it.
function open(id) {
  return operate(async () => {
    const kept = await (await call(`sessions/${encodeURIComponent(id)}/conversation`)).json();
    replace(kept);
    addNote(`${kept.n_tokens} tokens are kept`);
  });
}

function remove(id, name) {
  if (!confirm(`Delete ${name}? It cannot be brought back.`)) return Promise.resolve();
  return operate(async () => {
    await call("sessions/" + encodeURIComponent(id), { method: "DELETE" });
  });
}

function listed(session) {
  const item = node("li");
  item.dataset.name = session.id;
  const [className, words] = match(session);
  const facts = node("div", "facts");
  const tokens = session.n_tokens === null ? "" : `${session.n_tokens} tokens, `;
  facts.append(`${tokens}${size(session.n_bytes)}, ${age(Date.now() / 1000 - session.modified)}, `);
  facts.append(node("span", className, words));
  const name = session.filename ?? (session.label || session.id);
  item.append(node("div", "name", name), facts);
  for (const [label, action] of [session.filename ? ["Restore", restore] : ["Open", open], ["Delete", remove]]) {
    const button = node("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => action(session.id, name));
    item.append(button);
  }
  return item;
}

async function refresh() {
  try {
    const { data, kinds } = await (await call("sessions")).json();
    for (const [kind, section, list] of [["conversation", "kept", "conversations"], ["file", "files", "sessions"]]) {
      el(section).hidden = !kinds.includes(kind);
      el(list).replaceChildren(...data.filter(session => session.kind === kind).map(listed));
    }
    busy();
  } catch (error) {
    el("files").hidden = false;
    el("sessions").replaceChildren(node("li", "", error.message));
  }
  await look();
}

// --- State and progress ---

function busy() {
  el("send").hidden = running !== null;
  el("stop").hidden = running === null;
  for (const button of document.querySelectorAll("aside button, .offer button, #fresh"))
    button.disabled = operating || running !== null;
}

function activity(slot) {
  const { phase, n_read, n_prompt, n_generated, n_waiting } = slot;
  const reading = `${n_read} of ${n_prompt} tokens`;
  if (!running) return "";
  if (begun) return phase === "reading" ? `reading the prompt: ${reading}` : "";
  const other = { reading: `another prompt is being read, ${reading}`, saving: "a session is being saved",
    answering: `another answer is being written, ${n_generated} tokens`, restoring: "a session is being restored" };
  const own = phase === "reading" && !n_waiting;
  return own ? `reading the prompt: ${reading}` : `waiting for its turn: ${other[phase] ?? slot.model}`;
}

async function look() {
  try {
    const [slot] = await (await call("slots")).json();
    const { session } = slot;
    const doing = slot.phase === "idle" ? slot.model : slot.phase;
    el("state").textContent = `${doing}, ${slot.n_prompt_tokens} of ${slot.n_ctx} tokens held`;
    el("activity").textContent = activity(slot);
    if (slot.phase === "idle" && !running && !operating) {
      seen ??= slot.n_changes;
      offer(slot.n_changes !== seen && slot.n_prompt_tokens > 0);
    }
    el("progress").hidden = !session;
    if (session) {
      const bar = el("progress").querySelector("progress");
      el("doing").textContent = `${session.action} ${session.filename}: ${session.phase} `
        + `${size(session.n_done)} of ${size(session.n_total)}`;
      if (session.n_total) bar.value = session.n_done / session.n_total;
      else bar.removeAttribute("value");
    }
  } catch (error) {
    el("state").textContent = error.message;
  }
}

async function poll() {
  if (polling) return;
  polling = true;
  while (operating || running) {
    await look();
    await new Promise(resolve => setTimeout(resolve, 250));
  }
  polling = false;
  await look();
}

// --- Begin ---

el("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = el("text").value.trim();
  if (!text || running) return;
  show(null);
  el("text").value = "";
  send(text);
});
el("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    el("ask").requestSubmit();
  }
});
el("stop").addEventListener("click", () => running?.abort());
el("fresh").addEventListener("click", () => { messages = []; show(null); redraw(); });
el("show").addEventListener("click", () => operate(showHeld));
el("back").addEventListener("click", () => { messages = displaced; displaced = null; redraw(); offer(); });
el("save").addEventListener("submit", event => { event.preventDefault(); save(el("name").value); });

call("v1/models")
  .then(answer => answer.json())
  .then(models => { el("model").textContent = models.data[0].id; })
  .catch(show);
refresh();
begin();
setInterval(() => { if (!operating && !el("locked").open) look(); }, 5000);
</script>
</body>
</html>
"""


def _hash_of(tag: str) -> str:
    """What a policy calls the one inline element of this name."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
