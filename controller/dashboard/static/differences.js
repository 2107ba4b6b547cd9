"use strict";
// What is set differently in the runs that the address names.

const box = make("div", { class: "scroll", tabindex: "0", hidden: true });
const words = make("p", { class: "missing", role: "status" }, "reading");
content.append(make("section", {}, make("h2", {}, "What is set differently"), words, box));
place("brand").textContent = "← Runs";

async function show() {
  const answer = await fetch(`/differences/rows${location.search}`, { headers: { Accept: "application/json" } });
  const found = await answer.json();
  live("read once", true);
  document.body.dataset.seen = "1";
  if (!answer.ok) { words.textContent = found.error; return; }
  words.textContent = [...found.problems, found.rows.length ? "" : "Nothing but the name."].filter(Boolean).join("; ");
  words.hidden = !words.textContent;
  const names = found.runs.map((run) => make("th", { scope: "col" }, make("a", { href: `/run/${encodeURIComponent(run.name)}` }, run.label)));
  box.append(make("table", { class: "differences" },
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "key"), ...names)),
    make("tbody", {}, ...found.rows.map((row) => make("tr", {}, make("th", { scope: "row" }, make("code", {}, row.key)), ...row.cells.map((cell) => make("td", {}, cell)))))));
  box.hidden = !found.rows.length;
}
show().catch(() => { words.textContent = "The dashboard does not answer."; });
