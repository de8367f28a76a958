"use strict";
// Model output is inserted into the page only as textContent.
const { follow, runs } = JSON.parse(document.getElementById("data").textContent);
const CHUNK = 40; // number of completions that are rendered at a time
const ASK_EVERY = 3000; // ms between requests to the server that follows a run
const $ = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const number = (x, digits = 2) => (x === null ? "none" : Number(x).toFixed(digits));
const percent = (x) => `${(100 * x).toFixed(0)} %`;

/* ---- Selection of the groups and completions that are shown ---- */
// If the completions of a run are not answers (for example, graphs), only their rewards are used.
for (const run of runs) noteAnswers(run);
function noteAnswers(run) {
  run.answered = run.groups.some((g) => g.completions.some((c) => c.verdict === "correct" || c.verdict === "wrong"));
}

const FILTERS = {
  wrong: (c, run) => (run.answered && c.verdict ? c.verdict !== "correct" : c.reward !== null && c.reward <= 0),
  truncated: (c) => c.truncated === true,
  flawed: (c, run) => run.answered && c.flawed,
};
const rewardsOf = (group) => group.completions.map((c) => c.reward).filter((r) => r !== null);
const spread = (group) => Math.max(0, Math.max(...rewardsOf(group)) - Math.min(...rewardsOf(group))); // 0 if no completion has a reward
const mean = (group) => rewardsOf(group).reduce((a, b) => a + b, 0) / (rewardsOf(group).length || 1);
const ORDERS = {
  signal: (a, b) => spread(b) - spread(a),
  best: (a, b) => mean(b) - mean(a),
  worst: (a, b) => mean(a) - mean(b),
};

let current = null, filter = "step";
const stepsOf = () => [...new Set(runs.flatMap((run) => run.groups.map((group) => group.step)))].sort((a, b) => a - b);

/** Return the first or newest step, preferably a step with a group whose rewards differ. */
function stepWithSignal(newest) {
  const signal = new Set(runs.flatMap((run) => run.groups.filter(spread).map((group) => group.step)));
  const steps = stepsOf(), found = steps.filter((step) => signal.has(step));
  const from = found.length ? found : steps;
  return (newest ? from.at(-1) : from[0]) ?? null;
}

/** Return [group, completions to show] pairs in the selected order. */
function wantedOf(run) {
  const words = $("search").value.trim().toLowerCase(), keeps = FILTERS[filter], found = [];
  const has = (text) => text.toLowerCase().includes(words);
  for (const group of run.groups) {
    if (!keeps && !words && group.step !== current) continue;
    const all = keeps ? group.completions.filter((c) => keeps(c, run)) : group.completions;
    const kept = words && !has(group.question) && !has(group.problem) ? all.filter((c) => has(c.text)) : all;
    if (kept.length) found.push([group, kept]);
  }
  const order = ORDERS[$("order").value];
  return order ? found.sort(([a], [b]) => order(a, b)) : found; // the sort is stable, so ties keep the order of sampling
}

/* ---- HTML elements for completions, groups and runs ---- */
// Insert a completion as text. The spans that a tool wrote become <ins> elements. The offsets of
// spans count code points, as in Python.
function fillText(into, text, toolCalls) {
  const points = toolCalls && toolCalls.length ? Array.from(text) : null;
  const slice = (from, to) => (points ? points.slice(from, to).join("") : text.slice(from, to));
  const length = points ? points.length : text.length;
  const block = /^\s*<([^<>\s/]+)>[\s\S]*<\/\1>/.exec(text);
  const split = block ? (points ? Array.from(block[0]).length : block[0].length) : 0;
  const add = (from, to, tool) => {
    for (const [start, end, name] of [[0, split, "reasoning"], [split, length, "answer"]]) {
      const low = Math.max(from, start), high = Math.min(to, end);
      if (low >= high) continue;
      const part = element(tool ? "ins" : "span", split ? name : "", slice(low, high));
      into.append(part);
    }
  };
  let done = 0;
  for (const [start, end] of toolCalls || []) {
    add(done, start, false);
    add(start, end, true);
    done = end;
  }
  add(done, length, false);
}

function showCompletion(completion, strongest, run) {
  const box = element("div", "completion"), facts = element("div", "facts");
  const verdict = run.answered && completion.verdict;
  facts.append(element("span", "", `reward ${number(completion.reward)}`));
  facts.append(element("span", "", `advantage ${number(completion.advantage)}`));
  if (verdict) facts.append(element("span", verdict === "correct" ? "correct" : "wrong", verdict.replaceAll("_", " ")));
  if (completion.truncated) facts.append(element("span", "wrong", "truncated"));
  if (run.answered && completion.flawed) facts.append(element("span", "wrong", "an equation does not hold"));
  const text = element("pre");
  if (completion.advantage) {
    text.classList.add(completion.advantage > 0 ? "up" : "down");
    text.style.setProperty("--strength", (0.35 * Math.abs(completion.advantage) / strongest).toFixed(3));
  }
  fillText(text, completion.text, completion.tool_calls);
  box.append(facts, text);
  return box;
}

function showGroup(run, group, completions) {
  const article = element("article");
  article.tabIndex = -1;
  const rewards = group.completions.map((c) => number(c.reward)).join(" ");
  const facts = element("p", "facts");
  for (const fact of [`step ${group.step + 1}`, group.problem, `reference answer ${group.answer}`, `rewards ${rewards}`]) facts.append(element("span", "", fact));
  article.append(element("h3", "", group.question), facts);
  const strongest = Math.max(...group.completions.map((c) => Math.abs(c.advantage)), 1e-9);
  for (const completion of completions) article.append(showCompletion(completion, strongest, run));
  return article;
}

// Render a run. More groups are rendered when the end of the list scrolls into view.
function showRun(run) {
  const section = element("section"), end = element("p", "facts"), wanted = wantedOf(run);
  const count = wanted.reduce((sum, [, completions]) => sum + completions.length, 0);
  section.append(element("h2", "", `${run.name}: ${count} completions`), end);
  let next = 0;
  section.more = () => {
    for (let made = 0; made < CHUNK && next < wanted.length; next++) {
      end.before(showGroup(run, ...wanted[next]));
      made += wanted[next][1].length;
    }
    end.textContent = next < wanted.length ? "…" : "";
  };
  section.more();
  const watcher = new IntersectionObserver((seen) => seen.some((s) => s.isIntersecting) && next < wanted.length && (section.more(), watcher.unobserve(end), watcher.observe(end)), { rootMargin: "800px" });
  watcher.observe(end);
  return section;
}

function show() {
  $("runs").replaceChildren(...runs.map(showRun));
  $("stale").hidden = true;
  const one = filter === "step" && !$("search").value.trim();
  for (const button of $("filters").children) button.ariaPressed = String(button.value === filter);
  for (const button of $("steps").children) button.ariaCurrent = String(one && Number(button.value) === current);
  const chosen = $("steps").querySelector("[aria-current=true]");
  if (chosen) { // scroll the list of steps, not the page
    const list = $("steps");
    list.scrollTo({ top: chosen.offsetTop - 48, left: chosen.offsetLeft - list.clientWidth / 2 });
  }
}

function goTo(step) {
  current = step;
  filter = "step";
  $("search").value = "";
  $("newest").firstChild.checked = false;
  show();
}

const FACTS = { "reward/mean": ["reward", number], "completion/truncated_rate": ["truncated", percent], "eval/accuracy": ["validation", percent], "eval/reward": ["validation reward", number] };
function listSteps() {
  $("steps").replaceChildren(...stepsOf().map((step) => {
    const button = element("button", "", `step ${step + 1}`);
    button.value = step;
    for (const run of runs) {
      const metrics = run.steps[step] || {};
      const facts = Object.keys(FACTS).filter((key) => key in metrics && (metrics[key] || key !== "completion/truncated_rate")).map((key) => `${FACTS[key][0]} ${FACTS[key][1](metrics[key])}`);
      button.append(element("small", "", facts.join(" · ")));
    }
    return button;
  }));
}

/** Move the focus to the next or previous group, also across steps. */
function move(by) {
  const articles = () => [...document.querySelectorAll("article")];
  let at = articles().indexOf(document.activeElement.closest("article"));
  $("newest").firstChild.checked = false;
  if (at < 0) at = by > 0 ? -1 : 0;
  if (at + by === articles().length) for (const section of $("runs").children) section.more();
  let to = articles()[at + by];
  if (!to && filter === "step" && !$("search").value.trim()) {
    const steps = stepsOf(), step = steps[steps.indexOf(current) + by];
    if (step === undefined) return;
    goTo(step);
    if (by < 0) for (const section of $("runs").children) section.more();
    to = articles().at(by > 0 ? 0 : -1);
  }
  to?.focus({ preventScroll: true });
  to?.scrollIntoView();
}

/* ---- Curves: SVG paths that are scaled to their box, with HTML labels around the paths ---- */
const SVG = "http://www.w3.org/2000/svg";
function path(className, d) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", className);
  made.setAttribute("d", d);
  return made;
}

function drawCurve(title) {
  const curves = runs.map((run) => run.curves[title] ?? []), all = curves.flat();
  if (!all.length) return [];
  const scale = title.endsWith("%") ? 100 : 1, digits = scale === 100 || all.some((p) => p[1] >= 20) ? 0 : 2;
  const last = Math.max(...runs.flatMap((run) => Object.values(run.curves).flat().map((p) => p[0])));
  const first = Math.min(...all.map((p) => p[0]), 1);
  // The axis begins at 0, so that noise looks small. Bands may exceed the plot; values may not.
  const most = Math.max(...all.map((p) => p[1])), low = Math.min(0, ...all.map((p) => p[1]));
  const high = Math.max(1.1 * most, ...all.map((p) => Math.min(p[4], 1.5 * most)), scale === 100 ? 0.05 : 1e-9);
  const x = (step) => (100 * (step - first)) / (last - first || 1);
  const y = (value) => 100 - (100 * (Math.min(Math.max(value, low), high) - low)) / (high - low);
  const line = (points, i) => points.map((p, n) => `${n ? "L" : "M"}${x(p[0]).toFixed(2)} ${y(p[i]).toFixed(2)}`).join("");
  const figure = element("figure"), caption = element("figcaption"), plot = element("div", "plot");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true"); // the caption contains the values
  curves.forEach((points, i) => {
    if (!points.length) return;
    svg.append(path(`band run${i}`, `${line(points, 4)}${line([...points].reverse(), 3).replace("M", "L")}Z`));
    if (points.length <= 60) svg.append(path(`dots run${i}`, points.map((p) => `M${x(p[0]).toFixed(2)} ${y(p[1]).toFixed(2)}h0`).join("")));
    svg.append(path(`value run${i}`, line(points, 1)), path(`run${i}`, line(points, 2)));
  });
  const steps = element("div", "scale"), cursor = element("div", "cursor"), top = element("div", "scale");
  top.append(...[high, low].map((value) => element("span", "", (scale * value).toFixed(value && digits))));
  steps.append(element("span", "", first ? `step ${first}` : "start"), element("span", "", last > first ? String(last) : ""));
  cursor.hidden = true;
  plot.append(svg, top, cursor);
  figure.append(caption, plot, steps);
  const say = (step) => {
    const parts = curves.filter((points) => points.length).map((points) => {
      const p = points.findLast((point) => point[0] <= step) ?? points[0];
      const [value, from, to] = [p[2], p[3], p[4]].map((v) => (scale * v).toFixed(digits));
      return from === to ? value : `${value} (${from} to ${to})`;
    });
    caption.replaceChildren(element("b", "", title), ` ${parts.join(" / ")}`);
    caption.title = caption.textContent;
  };
  figure.pointAt = (step) => {
    cursor.hidden = step === null;
    if (step !== null) cursor.style.left = `${x(step)}%`;
    say(step ?? last);
  };
  figure.stepAt = (clientX) => {
    const box = plot.getBoundingClientRect();
    return Math.round(first + ((clientX - box.left) / box.width) * (last - first));
  };
  figure.pointAt(null);
  return [figure];
}

function drawCurves() {
  $("curves").replaceChildren(...Object.keys(runs[0].curves).flatMap(drawCurve));
}

const pointAll = (step) => { for (const figure of $("curves").children) figure.pointAt(step); };
$("curves").addEventListener("pointermove", ({ target, clientX }) => pointAll(target.closest(".plot")?.parentElement.stepAt(clientX) ?? null));
$("curves").addEventListener("pointerleave", () => pointAll(null));
$("curves").addEventListener("click", ({ target, clientX }) => {
  const step = target.closest(".plot")?.parentElement.stepAt(clientX) - 1; // the point after n steps is step n - 1
  if (stepsOf().includes(step)) goTo(step);
});

/* ---- Progress of the run ---- */
function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return minutes > 1 ? `${minutes} min` : `${Math.round(seconds)} s`;
}

function stateOf(run) {
  const done = Object.keys(run.steps).length, of = run.total ? ` of ${run.total}` : "";
  if (!done) return run.running === false ? "ended before its first step" : "waits for its first step";
  if (run.left === 0 || run.total === done) return `ended after step ${done}${of}`;
  if (run.running === false) return `stopped after step ${done}${of}; the training command with --resume continues it`;
  const seconds = run.left - run.age, left = follow && seconds > 0 ? ` · about ${duration(seconds)} left` : "";
  return `step ${done}${of}${left}${follow ? ` · the last one ${duration(run.age)} ago` : ""}`;
}

function showState() {
  $("title").textContent = runs.map((run) => run.name).join(" and ");
  document.title = $("title").textContent;
  $("state").textContent = runs.map(stateOf).join(" / ");
}

/* ---- Updates during a run ---- */
function take(news) {
  let more = false;
  news.forEach((part, i) => {
    const run = runs[i], { groups, again, ...rest } = part;
    more ||= groups.length > 0 || again || "curves" in rest;
    Object.assign(run, rest, { groups: again ? groups : [...run.groups, ...groups] });
    noteAnswers(run);
  });
  showState();
  if (!more) return;
  drawCurves();
  listSteps();
  const reading = filter !== "step" || $("search").value.trim() || !$("newest").firstChild.checked;
  if (!reading || !stepsOf().includes(current)) current = stepWithSignal(true);
  else if (filter !== "step" || $("search").value.trim()) $("stale").hidden = false;
  if (!reading || !$("runs").querySelector("article")) show();
  for (const button of $("steps").children) button.ariaCurrent = String(filter === "step" && Number(button.value) === current);
}

async function ask() {
  if (document.hidden) return;
  const marks = runs.map((run) => `mark=${encodeURIComponent(run.mark)}`).join("&");
  try {
    const response = await fetch(`news?${marks}`, { cache: "no-store" });
    if (response.ok) take(await response.json());
    else $("state").textContent = await response.text();
  } catch {
    $("state").textContent = "the page's server has gone: start rlm view --follow again";
  }
}

/* ---- Events ---- */
$("filters").addEventListener("click", ({ target }) => { if (target.value) { filter = target.value; show(); } });
$("steps").addEventListener("click", ({ target }) => { const { value } = target.closest("button") ?? {}; if (value) goTo(Number(value)); });
$("order").addEventListener("change", () => { show(); $("runs").focus({ preventScroll: true }); }); // move the focus away from the select, which would handle the arrow keys
$("search").addEventListener("input", show);
$("stale").addEventListener("click", show);
$("newest").addEventListener("change", () => {
  if ($("newest").firstChild.checked) { goTo(stepWithSignal(true)); $("newest").firstChild.checked = true; }
});
document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select")) return;
  event.preventDefault();
  move(by);
});

showState();
drawCurves();
listSteps();
current = stepWithSignal(follow);
$("newest").hidden = !follow;
show();
if (follow) setInterval(ask, ASK_EVERY);
