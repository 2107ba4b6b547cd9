"use strict";
// Sorts, filters and opens the rows of the table. Nothing is fetched; texts stay text.
const root = document.documentElement;
const body = document.querySelector("tbody");
const rows = body ? [...body.rows] : [];
const search = document.getElementById("search");
const sort = document.getElementById("sort");
const count = document.getElementById("count");
let falling = false;

function remembered(value) {
  try {
    if (value === undefined) return localStorage.getItem("areal-like-theme");
    localStorage.setItem("areal-like-theme", value);
  } catch (error) { /* a browser may forbid storage to files: then the theme is not remembered */ }
  return null;
}

const chosen = remembered();
if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
document.getElementById("theme").addEventListener("click", () => {
  const isDark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  remembered(root.dataset.theme);
});

function arrange() {
  const key = sort.value;
  const value = (row) => row.getAttribute("data-" + key);
  const known = rows.filter((row) => value(row) !== "");
  const unknown = rows.filter((row) => value(row) === "");
  const isNumeric = known.every((row) => !Number.isNaN(Number(value(row))));
  known.sort((a, b) => {
    const order = isNumeric ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b));
    return (falling ? -order : order) || Number(a.dataset.order) - Number(b.dataset.order);
  });
  body.append(...known, ...unknown);
  for (const button of document.querySelectorAll("thead button")) {
    if (button.dataset.key === key) button.setAttribute("aria-sort", falling ? "descending" : "ascending");
    else button.removeAttribute("aria-sort");
  }
  document.getElementById("turn").textContent = falling ? "\u2191" : "\u2193";
}

function filter() {
  const needle = search.value.trim().toLowerCase();
  let shown = 0;
  for (const row of rows) {
    const text = [...row.querySelectorAll(".text")].map((one) => one.textContent).join("\n").toLowerCase();
    row.hidden = needle !== "" && !text.includes(needle);
    if (!row.hidden) shown += 1;
  }
  count.textContent = shown + " shown";
}

function measure() {
  for (const row of rows) {
    if (row.classList.contains("open")) continue;
    let isLong = false;
    for (const text of row.querySelectorAll(".text")) {
      const isCut = text.scrollHeight > text.clientHeight + 2;
      text.classList.toggle("cut", isCut);
      isLong = isLong || isCut;
    }
    row.classList.toggle("long", isLong);
    let more = row.querySelector(".more");
    if (isLong && !more) {
      more = document.createElement("button");
      more.type = "button";
      more.className = "more";
      more.addEventListener("click", () => open(row, !row.classList.contains("open")));
      row.querySelector("td.answer").append(more);
    }
    if (more) {
      more.hidden = !isLong;
      more.textContent = "show all";
    }
  }
}

function open(row, isOpen) {
  if (!row.classList.contains("long")) return;
  row.classList.toggle("open", isOpen);
  row.querySelector(".more").textContent = isOpen ? "show less" : "show all";
}

if (body) {
  sort.addEventListener("change", () => { falling = false; arrange(); });
  document.getElementById("turn").addEventListener("click", () => { falling = !falling; arrange(); });
  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      falling = sort.value === button.dataset.key ? !falling : false;
      sort.value = button.dataset.key;
      arrange();
    });
  }
  search.addEventListener("input", filter);
  const all = document.getElementById("all");
  all.addEventListener("click", () => {
    const isOpen = all.getAttribute("aria-pressed") !== "true";
    all.setAttribute("aria-pressed", String(isOpen));
    all.textContent = isOpen ? "close all" : "open all";
    for (const row of rows) open(row, isOpen);
  });
  for (const row of rows) {
    for (const text of row.querySelectorAll(".text")) {
      text.addEventListener("click", () => {
        if (!String(getSelection())) open(row, !row.classList.contains("open"));
      });
    }
  }
  measure();
  addEventListener("resize", measure);
}
