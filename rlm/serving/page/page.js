"use strict"; // What the model writes becomes text nodes, never markup.

/* ---- State ---- */
const SILENCE = 60_000; // ms without a byte (the server pings every 15 s) until a run is given up
const RETRIED = ["queue_full", "rate_limited", "loading"]; // these pass, so the page asks again
const $ = (id) => document.getElementById(id);
const form = $("ask");
const fields = form.elements;
let run = null; // the run in progress
const key = () => sessionStorage.getItem("rlm.key") ?? "";

/* ---- API ---- */
/** An error to be shown; `more` has the code, status, … of the server's problem details. */
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
  const body = await response.json().catch(() => ({})); // a proxy's page, say
  const wait = Number(response.headers.get("Retry-After")) || 2;
  throw problem(body.detail || `The server answered ${response.status}`, { ...body, wait });
}

/** The request as the form has it. What was left alone is not sent: the server has defaults. */
function requestBody() {
  const body = {};
  for (const { name, type, value } of fields) {
    const text = value.trim();
    if (name && text) body[name] = type === "number" ? Number(text) : text;
  }
  return body;
}

/** Asks until the server has a seat for the question; gives the response that streams. */
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

/** Yields [event, data] of the server-sent events, wherever the network cuts their text. */
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const piece = await Promise.race([reader.read().catch(() => ({ done: true })), pause(SILENCE)]);
    if (!piece) throw problem(`No word from the server for ${SILENCE / 1000} s`);
    if (piece.done) throw problem("The connection was lost");
    const events = (text + piece.value).split(/\r?\n\r?\n/);
    text = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: ?(\w+)\r?\ndata: ?(.*)$/s.exec(event) ?? []; // none: a ping
      if (name) yield [name, JSON.parse(data)];
    }
  }
}

/** Shows the server's state until it is ready, and then what it offers. */
async function connect() {
  try {
    await call("ready");
    showInfo(await (await call("phase1/info")).json());
  } catch (error) {
    $("status").className = "";
    if (error.code === "unauthorized") return askForKey();
    show("status", error.message);
    return pause(2000).then(connect);
  }
}

/* ---- A run ---- */
async function ask() {
  if (run) return;
  const body = requestBody(), controller = new AbortController(), { signal } = controller;
  run = { controller, n: body.n ?? 1, votes: Object.create(null) };
  showRunning(true);
  for (const id of ["reasoning", "final", "answer", "votes", "facts"]) show(id, "");
  show("thought", "Waiting…");
  $("result").hidden = false;
  $("notice").hidden = true;
  try {
    for await (const [event, data] of serverEvents(await admission(body, signal))) {
      if (event === "done") return showResult(data);
      if (event === "error") throw problem(data.detail, data);
      EVENTS[event]?.(data);
    }
  } catch (error) {
    showError(signal.aborted ? signal.reason : error);
  } finally {
    controller.abort(); // what was not read to its end is let go, so that the seat is free
    showRunning(false);
    run = null;
  }
}

const EVENTS = {
  start({ id }) {
    run.id = id;
    $("notice").hidden = true;
    $("answer-now").hidden = false;
    show("thought", "Thinking…");
    show("live", "Thinking");
  },
  reasoning({ delta, tool }) {
    const box = $("reasoning"), below = box.scrollHeight - box.scrollTop - box.clientHeight;
    const piece = Object.assign(document.createElement("ins"), { textContent: delta });
    box.append(tool ? piece : delta); // <ins>: a tool wrote it, not the model
    if (below < 24) box.scrollTop = box.scrollHeight; // unless the reader scrolled up
  },
  answer({ delta }) {
    if (run.n === 1) $("answer").append(delta); // of several the vote decides
  },
  sample({ final_answer: final, format }) {
    const answer = format === "strict" ? final : "no answer"; // as the server counts
    run.votes[answer] = (run.votes[answer] ?? 0) + 1;
    showVotes(null);
  },
};

function stop() {
  run?.controller.abort(problem("Stopped"));
}

async function answerNow() {
  $("answer-now").hidden = true;
  $("stop").focus();
  await call(`phase1/reasoning/${run.id}/answer`, { method: "POST" }).catch(showNotice);
}

/* ---- What is seen ---- */
const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;
const modelName = ({ base, adapter }) => (adapter === "base" ? base : `${base} + ${adapter}`);

/** Sets an element's text; the style sheet hides what has none. Screen readers speak #live. */
function show(id, text) {
  $(id).textContent = text;
}

/** Fills a list of terms and their texts or elements. */
function showRows(id, rows) {
  $(id).replaceChildren(...rows.flatMap(([term, ...values]) => {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.append(term);
    dd.append(...values);
    return [dt, dd];
  }));
}

function showInfo({ model, adapters, default_adapter: usual, needs_key: keyed }) {
  show("status", modelName(model));
  $("status").className = "ready";
  $("key-form").hidden = true;
  $("openapi").hidden = keyed; // a link sends no key
  $("forget").hidden = !keyed;
  const option = (name) => new Option(name, name === usual ? "" : name, false, name === usual);
  if (!fields.adapter.length) fields.adapter.append(...adapters.map(option));
}

function askForKey() {
  show("key-label", key() ? "That key was not accepted" : "This server asks for a key");
  show("status", "A key is needed");
  $("notice").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

function showNotice({ message, code, request_id: id }, more = "") {
  show("notice-title", message);
  show("notice-text", id ? `${more} (${code}, ${id})` : more);
  $("notice").hidden = false;
  show("live", `${message}. ${more}`);
}

function showError(error) {
  show("thought", "Reasoning so far");
  $("result").hidden = !$("reasoning").textContent;
  const known = error.name === "Error"; // else what came is not what this page understands
  showNotice(known ? error : problem(`The answer cannot be read: ${error.message}`));
  connect(); // the server's state may have changed, or it asks for a key
}

function showRunning(running) {
  if (["stop", "answer-now"].includes(document.activeElement.id)) $("run").focus();
  $("run").ariaDisabled = String(running);
  $("stop").hidden = !running;
  $("answer-now").hidden = true;
}

function showVotes(winner) {
  const votes = Object.entries(run.votes).sort((a, b) => b[1] - a[1]);
  showRows("votes", votes.map(([answer, count]) => {
    const bar = document.createElement("progress");
    bar.value = count / run.n;
    bar.className = answer === winner ? "winner" : "";
    return [answer, bar, `${count} of ${run.n}`];
  }));
}

function showResult(result) {
  const { reasoning, answer, final_answer: final, thinking, vote } = result;
  if (reasoning !== $("reasoning").textContent) show("reasoning", reasoning); // of another sample
  show("thought", `Thought for ${thinking.tokens} tokens, ${thinking.status}`);
  show("final", final);
  show("answer", answer === final ? "" : answer);
  if (vote) showVotes(vote.winner);
  showRows("facts", factsOf(result));
  show("live", final === null ? "Done, without a final answer" : `Answer: ${final}`);
}

/** In the words of the API, which docs/reference/serving.md explains. */
function factsOf({ verifier, details, confidence, usage, timings, ...result }) {
  return [
    ["Verdict", verifier && `${verifier.correct ? "✓" : "✗"} expected: ${verifier.expected}`],
    ["Format", details.format],
    ["Finish reason", result.finish_reason],
    ["Warnings", result.warnings.join(", ")],
    ["Confidence", confidence && `${confidence.value.toFixed(2)}, not calibrated`],
    ["Tokens", `${usage.completion_tokens}, ${timings.tokens_per_second.toFixed(0)} a second`],
    ["Time", `${seconds(timings.total_ms)}, to the first token ${seconds(timings.first_token_ms)}`],
    ["Lessons", result.experiences.join(", ")],
    ["Model", modelName(result.model)],
  ].filter(([, value]) => value);
}

/* ---- Events ---- */
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
form.addEventListener("invalid", ({ target }) => { // the browser points at it where it is seen
  if ($("settings").contains(target)) $("settings").open = true;
}, true);
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
