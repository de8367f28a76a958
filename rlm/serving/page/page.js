"use strict"; // The text of the model is inserted as text nodes, never as HTML.

/* ---- State ---- */
const SILENCE = 60_000; // ms without data after which a run fails; the server pings every 15 s
const RETRIED = ["queue_full", "busy", "rate_limited", "loading"]; // temporary errors, after which the page retries
const BASE = "base"; // the name of the base model without an adapter
const KEPT = 50; // maximum number of earlier questions on the page
const NO_ANSWER = "no answer";
const $ = (id) => document.getElementById(id);
const form = $("ask");
const fields = form.elements;
let run = null; // the current run: its AbortController and one panel per adapter
let asked = ""; // the question that the visible panels answer
let info = {}; // the reply of /phase1/info
const key = () => sessionStorage.getItem("rlm.key") ?? "";

/* ---- API ---- */
/** Creates an error to be shown. `more` contains the server's problem details (code, status, …). */
const problem = (message, more = {}) => Object.assign(new Error(message), more);

const pause = (ms, signal) => new Promise((resolve, reject) => {
  setTimeout(resolve, ms);
  signal?.addEventListener("abort", reject);
});

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const response = await fetch(path, { cache: "no-store", headers, ...options })
    .catch(() => { throw problem("The server cannot be reached"); });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({})); // for example a proxy's page
  const wait = Number(response.headers.get("Retry-After")) || 2;
  throw problem(body.detail || `The server answered ${response.status}`, { ...body, wait });
}

/** Returns the request body from the form. Empty fields are not sent, because the server has defaults. */
function requestBody() {
  const body = {};
  for (const { name, type, value } of fields) {
    const text = value.trim();
    if (name && text) body[name] = type === "number" ? Number(text) : text;
  }
  return body;
}

/** Sends the question until the server accepts it; returns the streaming response. */
async function admission(body, signal) {
  const options = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
  for (;;) {
    try {
      return await call("phase1/reasoning", options);
    } catch (error) {
      if (!RETRIED.includes(error.code)) throw error;
      showNotice(error, `Your question is kept and asked again in ${error.wait} s.`);
      await pause(1000 * error.wait, signal);
    }
  }
}

/** Yields [event, data] for each server-sent event. Network chunks may end within an event. */
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const piece = await Promise.race([reader.read().catch(() => ({ done: true })), pause(SILENCE)]);
    if (!piece) throw problem(`No data from the server for ${SILENCE / 1000} s`);
    if (piece.done) throw problem("The connection was lost");
    const events = (text + piece.value).split(/\r?\n\r?\n/);
    text = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: ?(\w+)\r?\ndata: ?(.*)$/s.exec(event) ?? []; // no match: a ping
      if (name) yield [name, JSON.parse(data)];
    }
  }
}

/** Shows the state of the server until it is ready, then its model and adapters. */
async function connect() {
  try {
    await call("ready");
    showInfo(await (await call("phase1/info")).json());
  } catch (error) {
    $("status").className = "";
    if (error.code === "unauthorized") return askForKey();
    show($("status"), error.message);
    return pause(2000).then(connect);
  }
}

/* ---- A run ---- */
async function ask(beside = false) {
  if (run || !form.reportValidity()) return;
  const body = requestBody(), controller = new AbortController(), { signal } = controller;
  const bodies = beside ? [{ ...body, adapter: BASE }, body] : [body];
  keep();
  asked = body.prompt;
  run = { controller, panels: bodies.map(({ adapter }) => newPanel(beside ? adapter ?? info.default_adapter : "", body.n ?? 1)) };
  $("result").replaceChildren(...run.panels.map((panel) => panel.article));
  showRunning(true);
  $("notice").hidden = true;
  const answered = await Promise.allSettled(run.panels.map((panel, i) => answer(panel, bodies[i], signal)));
  controller.abort(); // closes unfinished responses, so that the server aborts their requests
  const failed = answered.filter(({ status }) => status === "rejected");
  if (run.panels.every(({ article }) => isEmpty(article))) $("result").replaceChildren();
  if (failed.length < answered.length) show($("live"), run.panels.map((panel) => panel.said).filter(Boolean).join(". "));
  showRunning(false);
  run = null;
  if (failed.length) showError(failed[0].reason);
}

/** Sends the request of one panel, and fills the panel with the response. */
async function answer(panel, body, signal) {
  try {
    for await (const [event, data] of serverEvents(await admission(body, signal))) {
      if (event === "done") return showResult(panel, data);
      if (event === "error") throw problem(data.detail, data);
      EVENTS[event]?.(panel, data);
    }
  } catch (error) {
    show(panel.thought, panel.text ? "Reasoning so far" : isEmpty(panel.article) ? "No answer" : "Answer so far");
    throw signal.aborted ? signal.reason : error;
  }
}

const EVENTS = {
  start(panel, { id }) {
    panel.id = id;
    $("notice").hidden = true;
    $("answer-now").hidden = false;
    show(panel.thought, "Thinking…");
    show($("live"), "Thinking");
  },
  reasoning(panel, { delta, tool }) {
    const box = panel.reasoning, below = box.scrollHeight - box.scrollTop - box.clientHeight;
    addReasoning(panel, delta, tool);
    if (below < 24) box.scrollTop = box.scrollHeight; // unless the user has scrolled up
  },
  answer(panel, { delta }) {
    if (panel.n === 1) panel.answer.append(delta); // several answers are shown as votes
  },
  sample(panel, { final_answer: final, format }) {
    const given = format === "strict" ? final : NO_ANSWER; // the same rule as in the server's vote
    panel.counts[given] = (panel.counts[given] ?? 0) + 1;
    showVotes(panel, null);
  },
};

function stop() {
  run?.controller.abort(problem("Stopped"));
}

async function answerNow() {
  $("answer-now").hidden = true;
  $("stop").focus();
  const ids = run.panels.filter(({ said }) => !said).map(({ id }) => id).filter(Boolean);
  await Promise.all(ids.map((id) => call(`phase1/reasoning/${id}/answer`, { method: "POST" }))).catch(showNotice);
}

/* ---- Display ---- */
const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;
const modelName = ({ base, adapter }) => (adapter === BASE ? base : `${base} + ${adapter}`);

/** Sets an element's text; the style sheet hides empty elements. Screen readers speak #live. */
function show(element, text) {
  element.textContent = text;
}

function make(tag, className, ...content) {
  const made = Object.assign(document.createElement(tag), { className });
  made.append(...content);
  return made;
}

/** Creates the panel of an answer: its elements by class, and the text received so far. */
function newPanel(adapter, n) {
  const article = $("panel").content.cloneNode(true).firstElementChild;
  const panel = { article, n, counts: Object.create(null), text: "", said: "" };
  for (const element of article.querySelectorAll("[class]")) panel[element.className] ??= element;
  const before = $("result").querySelector("article") ?? $("history").querySelector("article");
  for (const folded of ["thinking", "details"]) { // sections that the user has closed stay closed
    if (before) panel[folded].open = before.querySelector(`.${folded}`).open;
  }
  if (adapter) show(panel.who, adapter === BASE ? "Base" : `Trained: ${adapter}`);
  show(panel.thought, "Waiting…");
  return panel;
}

const isEmpty = (article) => ![...article.querySelectorAll(".reasoning, .answer, .votes, .facts")].some((part) => part.textContent);

/** Moves the visible answers to the list of earlier questions. */
function keep() {
  const articles = [...$("result").children];
  if (articles.every(isEmpty)) return;
  const answers = articles.map((article) => article.querySelector(".final").textContent || NO_ANSWER);
  const entry = make("details", "", make("summary", "", `${asked} → ${answers.join(" / ")}`), make("div", "exchange", ...articles));
  $("history").prepend(entry);
  $("history").children[KEPT]?.remove();
}

const SIGNS = { "*": "×", "/": "÷" };
const readable = (text) => text.replace(/\s*([-+*/=])\s*/g, (_, sign) => ` ${SIGNS[sign] ?? sign} `);

/** Appends reasoning text. Text of a tool is marked, and its calculations are shown in a box: the
 * model's <<72/9= and the tool's 8>> become 72 ÷ 9 = 8. */
function addReasoning(panel, delta, tool) {
  panel.text += delta;
  if (!tool) {
    panel.byTool = null;
    if (!panel.words) panel.reasoning.append(panel.words = new Text());
    panel.words.data += delta;
    return;
  }
  if (!panel.byTool) {
    const written = panel.words?.data ?? "", at = written.lastIndexOf("<<"), [asks] = written.slice(at + 2).split("\n");
    panel.byTool = { element: make("ins", ""), text: "" };
    if (at >= 0 && at + 2 + asks.length === written.length) {
      panel.words.data = written.slice(0, at);
      panel.reasoning.append(make("span", "calculation", readable(asks), panel.byTool.element));
      panel.byTool.end = />*$/; // the end of a calculation
    } else {
      panel.reasoning.append(panel.byTool.element);
    }
    panel.words = null;
  }
  panel.byTool.text += delta;
  show(panel.byTool.element, panel.byTool.text.replace(panel.byTool.end ?? "", ""));
}

const MARK = /(<<[^<>\n]*>>)/;

/** Draws finished reasoning. Only the results of the tool's calls are marked as the tool's: the model
 * also writes calculations that the tool refuses, such as <<10/3=3>>. */
function redraw(panel, text, calls) {
  Object.assign(panel, { text: "", words: null, byTool: null });
  panel.reasoning.replaceChildren();
  const results = calls.map((call) => call.text);
  for (const part of text.split(MARK)) {
    const at = part.lastIndexOf("=") + 1;
    if (MARK.test(part) && part.slice(at) !== results[0]) {
      panel.text += part;
      panel.words = null;
      panel.reasoning.append(make("span", "calculation", readable(part.slice(2, -2))));
    } else if (MARK.test(part)) {
      addReasoning(panel, part.slice(0, at), false);
      addReasoning(panel, results.shift(), true);
    } else if (part) {
      addReasoning(panel, part, false);
    }
  }
}

/** Fills a description list; each row is a term and its texts or elements. */
function showRows(list, rows) {
  list.replaceChildren(...rows.flatMap(([term, ...values]) => [make("dt", "", term), make("dd", "", ...values)]));
}

/* The placeholder depends on the answer type of the adapter. */
const PLACEHOLDERS = {
  number: "A question whose answer is a number",
  choice: "A question with lettered choices",
  text: "A question whose answer is a few words",
  open: "A question, or a task",
};
const STAGES = { sft: "by SFT", grpo: "by GRPO" };
const chosenAdapter = () => fields.adapter.value || info.default_adapter;
const answerType = (adapter) => info.answer_types?.[adapter]?.[0] ?? "number";

function showInfo(described) {
  info = described;
  const { model, adapters, default_adapter: usual, needs_key: keyed } = info;
  show($("status"), modelName(model));
  $("status").className = "ready";
  $("key-form").hidden = true;
  $("openapi").hidden = keyed; // a link cannot send the API key
  $("forget").hidden = !keyed;
  const option = (name) => new Option(name, name === usual ? "" : name, false, name === usual);
  if (!fields.adapter.length) fields.adapter.append(...adapters.map(option));
  showAdapter();
}

function showAdapter() {
  const adapter = chosenAdapter(), { questions = [], dataset, stage } = info.about?.[adapter] ?? {};
  $("compare").hidden = adapter === BASE || !info.adapters.includes(BASE);
  fields.prompt.placeholder = PLACEHOLDERS[answerType(adapter)];
  show($("learned"), dataset && STAGES[stage] ? `${adapter} learned from ${dataset} ${STAGES[stage]}` : "");
  $("examples").replaceChildren(...questions.map((question) => {
    const short = question.length > 60 ? `${question.slice(0, 60).trimEnd()}…` : question;
    return Object.assign(make("button", "link", short), { type: "button", value: question });
  }));
}

function askForKey() {
  show($("key-label"), key() ? "That key was not accepted" : "This server asks for a key");
  show($("status"), "A key is needed");
  $("notice").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

/** Replaces field names in a server message by their labels: "Token limit" for "max_new_tokens". */
function inWords(text) {
  return text.replace(/\b(\w+_\w+)\b|^(\w+)(?=:)|\b(n)(?= = )/g, (name) => labelOf(name) ?? name);
}

function labelOf(name) {
  const label = name && fields[name]?.labels?.[0];
  return label ? label.firstChild.data.trim() : undefined;
}

function showNotice({ message, code, request_id: id }, more = "") {
  show($("notice-title"), inWords(message));
  show($("notice-text"), id ? `${more} (${code}, ${id})` : more);
  $("notice").hidden = false;
  show($("live"), `${$("notice-title").textContent}. ${more}`);
}

function showError(error) {
  const known = error.name === "Error"; // other errors: the page could not parse the response
  showNotice(known ? error : problem(`The answer cannot be read: ${error.message}`));
  $("again").hidden = error.status >= 400 && error.status < 500; // the same request would fail again
  const field = fields[error.error?.param];
  if (labelOf(field?.name)) {
    field.ariaInvalid = "true";
    if ($("settings").contains(field)) $("settings").open = true;
  }
  connect(); // the server may have restarted, or it requires a key
}

function showRunning(running) {
  if (["stop", "answer-now"].includes(document.activeElement.id)) $("run").focus();
  for (const button of [$("run"), $("compare")]) button.ariaDisabled = String(running);
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  $("stop").hidden = !running;
  $("answer-now").hidden = true;
}

function showVotes(panel, winner) { // in a tie, the winner comes first
  const votes = Object.entries(panel.counts).sort((a, b) => b[1] - a[1] || (b[0] === winner) - (a[0] === winner));
  showRows(panel.votes, votes.map(([given, count]) => {
    const bar = make("progress", given === winner ? "winner" : "");
    bar.value = count / panel.n;
    return [given, bar, `${count} of ${panel.n}`];
  }));
}

const THOUGHT = {
  closed: "Reasoning",
  forced: "Reasoning, cut short",
  unclosed: "Unfinished reasoning",
  absent: "Answered without reasoning",
};

function showResult(panel, result) {
  const { reasoning, answer: prose, final_answer: final, thinking, vote, verifier, details } = result;
  const hasMark = [...panel.reasoning.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && MARK.test(node.data));
  const isOther = (reasoning ?? "") !== panel.text; // the winner of a vote is not the streamed sample
  if (isOther || hasMark) redraw(panel, reasoning ?? "", details.tool_calls ?? []);
  show(panel.thought, THOUGHT[thinking.status] ?? thinking.status);
  show(panel.final, final);
  panel.final.classList.toggle("long", (final ?? "").length > 40);
  show(panel.answer, prose === final ? "" : prose);
  if (verifier) {
    show(panel.verdict, `${verifier.correct ? "✓" : "✗"} expected: ${verifier.expected}`);
    panel.verdict.classList.add(verifier.correct ? "right" : "wrong");
  }
  show(panel.remarks, remarksOf(result).join("\n"));
  if (vote) { // the server counts equal answers together, such as 8 and 8.0
    const silent = vote.n - vote.valid;
    panel.counts = { ...vote.counts, ...(silent && { [NO_ANSWER]: silent }) };
    showVotes(panel, vote.winner);
  }
  showRows(panel.facts, factsOf(result));
  const who = panel.who.textContent;
  panel.said = final === null ? `${who && `${who}: `}Done, without a final answer` : `${who || "Answer"}: ${final}`;
}

const NUMBER = new RegExp(
  "\\p{N}|\\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(thir|four|fif|six|seven|eigh|nine)teen|"
  + "(twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|dozen|half|third|quarter|twice|double|triple|pair)s?\\b",
  "iu",
);

/** Returns remarks about the answer, such as warnings. */
function remarksOf({ final_answer: final, warnings, model, answer_type: type = answerType(model.adapter) }) {
  const remarks = warnings.map((text) => (text === "tie" ? "Several answers have equally many votes: the first is shown." : inWords(text)));
  if (final === null) remarks.push("No final answer in the form that was asked for.");
  else if (type === "number" && model.adapter !== BASE && !NUMBER.test(asked)) {
    remarks.push("The question seems to contain no number. This model has learned to answer every question with a number.");
  }
  return remarks;
}

/** Returns details of the result in the terms of the API (docs/reference/serving.md). */
function factsOf({ details, confidence, usage, timings, thinking, ...result }) {
  return [
    ["Format", details.format],
    ["Finish reason", result.finish_reason],
    ["Thinking", `${thinking.tokens} tokens, ${thinking.status}`],
    ["Confidence", confidence && `${confidence.value.toFixed(2)}, not calibrated`],
    ["Tokens", `${usage.completion_tokens}, ${timings.tokens_per_second.toFixed(0)} a second`],
    ["Time", `${seconds(timings.total_ms)}, to the first token ${seconds(timings.first_token_ms)}`],
    ["Lessons", result.experiences.join(", ")],
    ["Model", modelName(result.model)],
  ].filter(([, value]) => value);
}

/* ---- Events ---- */
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
form.addEventListener("invalid", ({ target }) => { // open the settings, so that the browser can show the invalid field
  if ($("settings").contains(target)) $("settings").open = true;
}, true);
form.addEventListener("input", ({ target }) => {
  target.removeAttribute("aria-invalid");
  if (target === fields.adapter) showAdapter();
});
$("compare").addEventListener("click", () => ask(true));
$("stop").addEventListener("click", stop);
$("answer-now").addEventListener("click", answerNow);
$("examples").addEventListener("click", ({ target }) => {
  if (target.value) fields.prompt.value = target.value;
});
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  sessionStorage.setItem("rlm.key", $("key").value.trim());
  await connect();
  if ($("key-form").hidden) $("run").focus();
});
$("forget").addEventListener("click", () => { sessionStorage.clear(); connect(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") stop();
});
connect();
