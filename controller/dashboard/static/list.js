"use strict";
// The list of runs: one row a run, those that run first.

const rows = new Map();
const ORDER = ["running", "foreign", "crashed", "failed", "stopped", "finished", "damaged"];
const body = make("tbody");
const title = make("p", { class: "subtitle" });
const none = make("p", { class: "missing", hidden: true }, "There is no run in this folder yet.");
const head = ["run", "state", "step", "accuracy", "reward", "left", "last update"].map(
  (name, at) => make("th", { scope: "col", class: at > 1 ? "num" : null }, name));
const table = make("table", { class: "runs" }, make("thead", {}, make("tr", {}, ...head)), body);
const chosen = new Set();
const compare = make("button", { type: "button", class: "plain", disabled: true }, "compare settings");
compare.addEventListener("click", () => {
  location.href = `/differences?${[...chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
});
content.append(make("section", {}, make("div", { class: "bar" }, title, compare), make("div", { class: "scroll" }, table), none));

function progress(run) {
  if (run.step === null) return "–";
  return run.num_steps ? `${whole(run.step)} of ${whole(run.num_steps)}` : whole(run.step);
}

function rowOf(run) {
  const link = make("a", { href: `/run/${encodeURIComponent(run.name)}` }, run.label);
  const numbers = [["step", progress(run)], ["accuracy", amountText(run.accuracy)], ["reward", amountText(run.reward)],
    ["left", run.eta_s ? span(run.eta_s) : "–"], ["last update", ago(run.updated_s)]];
  const box = make("input", { type: "checkbox", "aria-label": `choose ${run.label}` });
  box.checked = chosen.has(run.name);
  box.addEventListener("change", () => choose(run.name, box.checked));
  const made = make("tr", {},
    make("th", { scope: "row" }, box, link, run.words ? make("span", { class: "words" }, run.words) : null,
      run.note ? make("span", { class: "words" }, run.note) : null),
    make("td", { "data-label": "state" }, pill(run.kind)),
    ...numbers.map(([label, words]) => make("td", { class: words === "–" ? "num unknown" : "num", "data-label": label }, words)));
  made.lastChild.dataset.time = run.updated_s || "";
  return made;
}

function choose(name, isChosen) {
  isChosen ? chosen.add(name) : chosen.delete(name);
  compare.disabled = chosen.size < 2 || chosen.size > 12;
}

function show() {
  const rank = (run) => ORDER.indexOf(run.kind);
  const sorted = [...rows.values()].sort((a, b) => rank(a) - rank(b) || (b.updated_s || 0) - (a.updated_s || 0));
  const label = (one) => one && (one.getAttribute("href") || one.getAttribute("aria-label"));
  const focused = body.contains(document.activeElement) ? label(document.activeElement) : null;
  body.replaceChildren(...sorted.map(rowOf));
  none.hidden = sorted.length > 0;
  table.parentElement.hidden = !none.hidden;
  const again = focused && [...body.querySelectorAll("a, input")].find((one) => label(one) === focused);
  if (again) again.focus();
}

function take(found) {
  for (const run of found.runs || []) rows.set(run.name, run);
  for (const name of found.gone || []) { rows.delete(name); choose(name, false); }
  show();
}

listen("/events", {
  snapshot: (found) => { rows.clear(); title.textContent = found.dir; take(found); },
  change: take,
});
setInterval(() => {
  for (const cell of body.querySelectorAll("[data-time]")) cell.textContent = ago(Number(cell.dataset.time));
}, 5000);
