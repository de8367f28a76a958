"use strict";
// What a model wrote gets into the page by textContent alone.
const runs = JSON.parse(document.getElementById("data").textContent);
const CHUNK = 40; // completions made at once
const FILTERS = {
  wrong: (c) => (c.verdict ? c.verdict !== "correct" : c.reward !== null && c.reward <= 0),
  truncated: (c) => c.truncated === true,
  flawed: (c) => c.flawed,
};

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const number = (x, digits = 2) => (x === null ? "none" : Number(x).toFixed(digits));

// The completion as text, with the tool's stretches (code points, as Python counts) in <ins>.
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

function showCompletion(completion, strongest) {
  const box = element("div", "completion"), facts = element("div", "facts");
  const verdict = completion.verdict;
  facts.append(element("span", "", `reward ${number(completion.reward)}`));
  facts.append(element("span", "", `advantage ${number(completion.advantage)}`));
  if (verdict) facts.append(element("span", verdict === "correct" ? "correct" : "wrong", verdict.replaceAll("_", " ")));
  if (completion.truncated) facts.append(element("span", "wrong", "truncated"));
  if (completion.flawed) facts.append(element("span", "wrong", "an equation does not hold"));
  const text = element("pre");
  if (completion.advantage) {
    text.classList.add(completion.advantage > 0 ? "up" : "down");
    text.style.setProperty("--strength", (0.35 * Math.abs(completion.advantage) / strongest).toFixed(3));
  }
  fillText(text, completion.text, completion.tool_calls);
  box.append(facts, text);
  return box;
}

function showGroup(group, completions) {
  const article = element("article");
  const rewards = group.completions.map((c) => number(c.reward, 1)).join(" ");
  article.append(element("h3", "", group.question));
  article.append(element("p", "facts", `step ${group.step + 1} · ${group.problem} · gold ${group.answer} · rewards ${rewards}`));
  const strongest = Math.max(...group.completions.map((c) => Math.abs(c.advantage)), 1e-9);
  for (const completion of completions) article.append(showCompletion(completion, strongest));
  return article;
}

// Groups are made when the end of the list comes into sight.
function showRun(run, step, filter) {
  const section = element("section"), end = element("p", "facts");
  const wanted = [];
  for (const group of run.groups) {
    if (!filter && group.step !== step) continue;
    const completions = filter ? group.completions.filter(filter) : group.completions;
    if (completions.length) wanted.push([group, completions]);
  }
  const count = wanted.reduce((sum, [, completions]) => sum + completions.length, 0);
  section.append(element("h2", "", `${run.name}: ${count} completions`), end);
  let next = 0;
  const more = () => {
    for (let made = 0; made < CHUNK && next < wanted.length; next++) {
      end.before(showGroup(...wanted[next]));
      made += wanted[next][1].length;
    }
    end.textContent = next < wanted.length ? "…" : "";
  };
  more();
  const watcher = new IntersectionObserver((seen) => seen.some((s) => s.isIntersecting) && next < wanted.length && (more(), watcher.unobserve(end), watcher.observe(end)), { root: section, rootMargin: "800px" });
  watcher.observe(end);
  return section;
}

let current = null;
function show() {
  const name = document.querySelector("input[name=filter]:checked").value;
  document.getElementById("runs").replaceChildren(...runs.map((run) => showRun(run, current, FILTERS[name])));
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-current", String(name === "step" && Number(button.value) === current));
  }
}

const FACTS = { "reward/mean": "reward", "completion/truncated_rate": "truncated", "sampler/logprob_gap_mean": "logprob gap", "eval/accuracy": "validation" };
function listSteps() {
  const all = new Set(runs.flatMap((run) => run.groups.map((group) => group.step)));
  const steps = [...all].sort((a, b) => a - b);
  for (const step of steps) {
    const button = element("button", "", `step ${step + 1}`);
    button.value = step;
    for (const run of runs) {
      const metrics = run.steps[step] || {};
      const facts = Object.keys(FACTS).filter((key) => key in metrics).map((key) => `${FACTS[key]} ${number(metrics[key], key === "sampler/logprob_gap_mean" ? 4 : 2)}`);
      button.append(element("small", "", facts.join(" · ")));
    }
    button.addEventListener("click", () => {
      current = step;
      document.querySelector("input[value=step]").checked = true;
      show();
    });
    document.getElementById("steps").append(button);
  }
  current = steps[0];
}

listSteps();
document.getElementById("filters").addEventListener("change", show);
show();
