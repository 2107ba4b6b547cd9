"use strict";
// The page of one run: parts by key, each redrawn when the stream brings it.

const MAX_LOG_LINES = 800;
const state = { sections: [], logs: [] };

// ------------------------------------------------------------ frame

const parts = {};
function section(key, title, ...children) {
  const box = make("section", { id: key, "aria-labelledby": `${key}-title` }, make("h2", { id: `${key}-title` }, title), ...children);
  content.append(box);
  parts[key] = box;
  return box;
}

const subtitle = make("p", { class: "subtitle" });
const problems = make("ul", { class: "problems", hidden: true });
const cardBox = make("div", { class: "cards" });
content.append(make("section", { id: "now", "aria-label": "now" }, subtitle, problems, cardBox));

const waitsNow = make("ul", { class: "waits" });
const processBody = make("tbody");
const waitBody = make("tbody");
const waitTable = make("div", { class: "scroll", tabindex: "0" }, make("table", {},
  make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "lately"), make("th", { scope: "col", class: "num" }, "share of pulses"))), waitBody));
section("waits", "Who waits for whom", waitsNow, waitTable);

const chartBox = make("div", { id: "chart-sections" });
content.append(chartBox);

const timelinePlot = make("div", { class: "plot strips", "data-timeline": true, role: "img", "aria-label": "activity of each process over time" });
const timelineWords = make("figcaption");
section("timeline", "Timeline: who did what when", make("figure", { id: "chart-timeline", class: "wide" },
  make("div", { class: "legend", "data-legend": "timeline" }), timelinePlot, timelineWords));

section("processes", "Processes", make("div", { class: "scroll", tabindex: "0" }, make("table", {},
  make("thead", {}, make("tr", {}, ...["process", "role", "state"].map((name) => make("th", { scope: "col" }, name)),
    make("th", { scope: "col", class: "num" }, "memory"))), processBody)));

const heldOutTitle = make("h3", { hidden: true }, "First held-out prompts");
const heldOut = make("div");
section("samples", "Sample answers", heldOutTitle, heldOut, make("h3", {}, "Training prompts"));

const eventBody = make("tbody");
const eventTable = make("div", { class: "scroll tall", tabindex: "0" }, make("table", { class: "events" },
  make("thead", {}, make("tr", {}, ...["at", "what", "words"].map((name) => make("th", { scope: "col" }, name)))), eventBody));
const noEvents = make("p", { class: "missing" }, "no lost process, no dropped group, no note");
section("events", "Events, newest first", eventTable, noEvents);

const logChoice = make("select", { id: "log-process" }, make("option", { value: "" }, "all processes"));
const logText = make("pre", { class: "log", tabindex: "0", "aria-label": "newest log lines" });
section("logs", "Logs", make("p", {}, make("label", { for: "log-process" }, "process "), logChoice), logText);
section("actions", "Actions");
logChoice.addEventListener("change", () => showLogs(true));

// ------------------------------------------------------------ parts

function showRun(run) {
  const box = place("kind");
  box.textContent = run.kind;
  box.className = `pill ${run.kind}`;
  box.hidden = false;
  place("brand").textContent = `← ${run.label}`;
  place("brand").setAttribute("aria-label", `${run.label}: back to all runs`);
  state.updated_s = run.updated_s;
  state.kind = run.kind;
  state.refused = run.refused;
  document.dispatchEvent(new Event("run-changed"));
  state.reason = run.reason;
  state.note = run.note;
  showUpdated();
}

function showUpdated() {
  const words = [state.reason, state.updated_s ? `last update ${ago(state.updated_s)}` : "", state.note];
  subtitle.textContent = words.filter(Boolean).join("; ");
}
setInterval(showUpdated, 5000);

function showProblems(found) {
  problems.replaceChildren(...found.map((words) => make("li", {}, words)));
  problems.hidden = !found.length;
}

function showCards(found) {
  cardBox.replaceChildren(...found.map((card) => make("div", { class: "card" },
    make("span", { class: "label" }, card.label), make("span", { class: "value" }, card.value), make("span", { class: "note" }, card.note))));
}

function showWaitsNow(found) {
  state.waitsNow = found;
  const words = found.length ? found : ["nobody waits right now, or the run has ended"];
  waitsNow.replaceChildren(...words.map((one) => make("li", { class: found.length ? null : "missing" }, one)));
}

function showWaits(found) {
  waitBody.replaceChildren(...found.map((wait) => make("tr", {}, make("td", {}, wait.words), make("td", { class: "num" }, `${Math.round(wait.share * 100)} %`))));
  waitTable.hidden = !found.length;
}

function showProcesses(found) {
  state.processes = found;
  document.dispatchEvent(new Event("run-changed"));
  processBody.replaceChildren(...found.map((one) => make("tr", {}, make("th", { scope: "row" }, one.name), make("td", {}, one.role),
    make("td", {}, one.state), make("td", { class: "num" }, one.memory))));
  parts.processes.hidden = !found.length;
}

function showHeldOut(found) {
  heldOutTitle.hidden = !found.length;
  heldOut.replaceChildren(...found.map((pair) => make("div", { class: "pair" }, make("pre", { class: "prompt" }, pair.prompt),
    make("div", { class: "sides" }, ...pair.answers.map((answer) => make("div", { class: "answer" },
      make("p", { class: "note" }, `${answer.label}: `, make("strong", {}, answer.score)), make("pre", {}, answer.text)))))));
}

function showEvents(found) {
  eventBody.replaceChildren(...found.map((one) => make("tr", { class: one.level }, make("td", { class: "num" }, one.at), make("td", {}, one.kind), make("td", {}, one.text))));
  eventTable.hidden = !found.length;
  noEvents.hidden = found.length > 0;
}

// ------------------------------------------------------------ charts

const wide = new Set(["chart-learning"]);

function figure(chart, isWide) {
  return make("figure", { id: chart.key, class: `${isWide ? "wide" : ""} ${wide.has(chart.key) ? "tall" : ""}` },
    make("h3", {}, chart.title), make("div", { class: "legend", "data-legend": chart.key }),
    make("div", { class: "plot", "data-chart": chart.key, role: "img", "aria-label": chart.title }), make("figcaption", {}, chart.caption));
}

// Figures stay where they are as long as there are the same ones: a redraw must not move what is being read.
function showSections(found) {
  const keys = (sections) => JSON.stringify(sections.map((one) => one.charts.map((chart) => chart.key)));
  const isSame = keys(found) === keys(state.sections);
  state.sections = found;
  if (isSame) {
    for (const one of found) for (const chart of one.charts) place(chart.key).querySelector("figcaption").textContent = chart.caption;
    return;
  }
  chartBox.replaceChildren(...found.map((one) => {
    const narrow = one.charts.filter((chart) => !wide.has(chart.key));
    const last = narrow.length % 2 ? narrow[narrow.length - 1] : null;
    return make("section", { id: one.key }, make("h2", {}, one.title),
      make("div", { class: "charts" }, ...one.charts.map((chart) => figure(chart, wide.has(chart.key) || chart === last))));
  }));
  showContents();
  redraw(Object.keys(page.charts));
}

function showContents() {
  const before = [["waits", "Waits"]];
  const after = [["timeline", "Timeline"], ["processes", "Processes"], ["samples", "Samples"], ["events", "Events"], ["logs", "Logs"], ["actions", "Actions"]];
  const own = state.sections.map((one) => [one.key, one.title]);
  place("sections").replaceChildren(...[...before, ...own, ...after].map(([key, title]) => make("a", { href: `#${key}` }, title)));
}

function takeCharts(found) {
  for (const [key, change] of Object.entries(found)) {
    if (change === null) delete page.charts[key];
    else if (change.whole) page.charts[key] = change.whole;
    else change.ends.forEach(([from, xs, ys], at) => {
      const series = page.charts[key].series[at];
      series.xs.splice(from, Infinity, ...xs);
      series.ys.splice(from, Infinity, ...ys);
    });
  }
}

function redraw(keys) {
  document.body.dataset.drawn = "no";
  if (!canDraw()) return;
  const targets = keys.map((key) => document.querySelector(`[data-chart="${key}"]`)).filter(Boolean);
  const next = () => {
    const target = targets.shift();
    if (!target) { document.body.dataset.drawn = theme(); return; }
    drawChart(target);
    setTimeout(next, 0);
  };
  next();
}

function showTimeline(found) {
  page.timeline = found;
  timelineWords.textContent = found.words;
  timelinePlot.hidden = !found.strips.length;
  timelinePlot.style.height = `${66 + 52 * found.strips.length}px`;
  if (found.strips.length && canDraw()) drawTimeline(timelinePlot);
}

place("plotly").addEventListener("load", () => {
  if (page.timeline.strips.length) drawTimeline(timelinePlot);
  redraw(Object.keys(page.charts));
});

// ------------------------------------------------------------ logs

function takeLog(lines, isWhole) {
  if (isWhole) state.logs = [];
  state.logs.push(...lines);
  state.logs.splice(0, Math.max(0, state.logs.length - MAX_LOG_LINES));
  const known = new Set([...logChoice.options].map((option) => option.value));
  for (const name of new Set(lines.map(([process]) => process))) {
    if (!known.has(name)) logChoice.append(make("option", { value: name }, name));
  }
  showLogs(isWhole);
}

function showLogs(isAtEnd) {
  const wasAtEnd = isAtEnd || logText.scrollHeight - logText.scrollTop - logText.clientHeight < 40;
  const chosen = logChoice.value;
  const lines = state.logs.filter(([process]) => !chosen || process === chosen);
  logText.textContent = lines.length ? lines.map(([process, line]) => (chosen ? line : `${process} | ${line}`)).join("\n") : "no line yet";
  if (wasAtEnd) logText.scrollTop = logText.scrollHeight;
}

// ------------------------------------------------------------ stream

const shows = {
  run: showRun, problems: showProblems, cards: showCards, waits_now: showWaitsNow, waits: showWaits,
  processes: showProcesses, events: showEvents, held_out: showHeldOut,
};

function take(found, isWhole) {
  for (const [key, show] of Object.entries(shows)) if (found[key] !== undefined) show(found[key]);
  if (found.charts) isWhole ? (page.charts = found.charts) : takeCharts(found.charts);
  if (found.sections) showSections(found.sections);
  if (found.charts) redraw(Object.keys(found.charts));
  if (found.timeline) showTimeline(found.timeline);
  if (found.log) takeLog(found.log, isWhole);
}

showContents();
// The scripts of samples and actions come after this one: the stream begins when all are there.
addEventListener("DOMContentLoaded", () => listen(`/run/${encodeURIComponent(page.name)}/events`, {
  snapshot: (found) => take(found, true),
  change: (found) => take(found, false),
}));
