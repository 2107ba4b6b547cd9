"use strict";
// Decisions about labels that are likely wrong. Keys: a accept, r reject, x remove, u undecided, j and k next and previous.

const NAMES = { accept: "accept", reject: "reject", remove: "remove", undecided: "undecided" };
const KEYS = { a: "accept", r: "reject", x: "remove", u: "undecided" };
const summary = make("p", { class: "note", role: "status" }, "reading");
const list = make("div", {});
const write = make("button", { type: "button", class: "plain", disabled: true }, "write the new set");
const result = make("p", { class: "note", role: "status" });
const help = make("p", { class: "note" }, "accept: the answer becomes the label; reject: the label stays; remove: the row is left out. Keys: a, r, x, u, and j, k for the next and the previous row.");
content.append(make("section", {}, make("h2", {}, "Labels that are probably wrong"), summary, help, make("p", { class: "row" }, write), result, list));

async function ask(address, body) {
  const sent = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(address, { ...sent, headers: { ...(sent.headers || {}), Accept: "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function counted(counts) {
  summary.textContent = Object.keys(NAMES).filter((name) => counts[name]).map((name) => `${counts[name]} ${NAMES[name]}`).join(", ");
}

function mark(card, decision) {
  for (const button of card.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.name === decision));
}

function shown(row) {
  const buttons = Object.keys(NAMES).map((name) => make("button", { type: "button", class: "plain", "data-name": name }, NAMES[name]));
  const from = row.versions ? `, versions ${row.versions[0]} to ${row.versions[1]}` : "";
  const card = make("section", { class: "answer", tabindex: "0", "data-number": row.number },
    make("p", { class: "note" }, row.where || row.key || ""),
    make("pre", { class: "prompt" }, row.prompt || ""),
    make("p", {}, "label: ", make("code", {}, row.label), ` (${row.num_label} of ${row.num_answers} answers)`),
    make("p", {}, "answer: ", make("code", {}, row.answer), ` (${row.num_agree} of ${row.num_answers} answers${from})`),
    make("p", { class: "row" }, ...buttons));
  for (const button of buttons) button.addEventListener("click", () => decide(card, button.dataset.name));
  mark(card, row.decision || "undecided");
  return card;
}

async function decide(card, name) {
  try {
    const found = await ask("/decisions", { number: Number(card.dataset.number), decision: name === "undecided" ? null : name });
    mark(card, name);
    counted(found.counts);
    problem("");
  } catch (error) { problem(error.message); }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const cards = [...list.children], at = cards.indexOf(document.activeElement?.closest("[data-number]"));
  const next = (step) => cards[Math.min(cards.length - 1, Math.max(0, at + step))];
  if (event.key === "j" || event.key === "k") next(event.key === "j" ? 1 : -1)?.focus();
  else if (KEYS[event.key] && at >= 0) decide(cards[at], KEYS[event.key]);
});

write.addEventListener("click", async () => {
  write.disabled = true;
  try {
    result.textContent = (await ask("/set", {})).words;
  } catch (error) { problem(error.message); write.disabled = false; }
});

ask("/rows").then((found) => {
  live("read once", true);
  counted(found.counts);
  list.append(...found.rows.map(shown));
  write.disabled = !found.folder;
  result.textContent = found.folder ? `to ${found.folder}` : "To write the new set here, start the command with the data files and -o FOLDER.";
  document.body.dataset.seen = "1";
}).catch((error) => { summary.textContent = error.message; });
