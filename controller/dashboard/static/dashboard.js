"use strict";
// What every page needs: elements without markup, words for numbers, the stream of events. Runs after the report's script,
// whose `page`, `drawChart`, `drawTimeline` and `theme` it uses.
//
// Text of a run is put into the document by textContent and by attributes of our own choice only: it never becomes markup.

const content = document.getElementById("content");
// It is megabytes, and comes when it comes: words and numbers are there before it.
window.Plotly = window.Plotly || { react() {} };
const canDraw = () => Boolean(window.Plotly.newPlot);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const place = (id) => document.getElementById(id);
const amountText = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));

// As controller/run_folder/formatting.py writes it: at most two units.
function span(seconds) {
  const rounded = Math.max(0, Math.round(seconds));
  for (const [unit, length, part, partLength] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (rounded < length) continue;
    const rest = Math.floor((rounded % length) / partLength);
    return `${Math.floor(rounded / length)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
  }
  return `${rounded} s`;
}

function ago(then_s) {
  if (!then_s) return "–";
  const seconds = Date.now() / 1000 - then_s;
  if (seconds > 30 * 86400) return new Date(then_s * 1000).toLocaleDateString("en-CA");
  return seconds < 1.5 ? "just now" : `${span(seconds)} ago`;
}

function pill(kind) {
  return make("span", { class: `pill ${kind}` }, kind);
}

function problem(words) {
  const box = place("problem");
  box.textContent = words;
  box.hidden = !words;
}

function live(words, isUp) {
  const box = place("live");
  box.textContent = words;
  box.classList.toggle("up", isUp);
}

// `handlers` by event. The browser connects again by itself, and then gets a whole snapshot. A page that nobody looks at
// ends its stream: it costs work, and a browser has six connections for all pages of a server.
const HIDDEN_MS = 5000;
function listen(address, handlers) {
  let source = connect(address, handlers), timer = 0;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) {
      if (!source) source = connect(address, handlers);
      return;
    }
    timer = setTimeout(() => {
      if (source) source.close();
      source = null;
      live("paused", false);
    }, HIDDEN_MS);
  });
  addEventListener("pagehide", () => source && source.close());
}

function connect(address, handlers) {
  const source = new EventSource(address);
  source.addEventListener("open", () => live("live", true));
  source.addEventListener("error", () => {
    live(source.readyState === EventSource.CLOSED ? "ended" : "no connection, trying again", false);
    if (source.readyState === EventSource.CLOSED) explain(address);
  });
  for (const [name, handler] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => {
      const found = JSON.parse(event.data);
      if (found.problem !== undefined) problem(found.problem);
      handler(found);
      document.body.dataset.seen = String(1 + Number(document.body.dataset.seen || 0));
    });
  }
  return source;
}

// A stream that was refused says nothing; the same address as a plain request says why.
async function explain(address) {
  const abort = new AbortController();
  try {
    const answer = await fetch(address, { signal: abort.signal, headers: { Accept: "application/json" } });
    if (answer.ok) { abort.abort(); return; }
    problem((await answer.json()).error);
  } catch (error) {
    problem("The dashboard does not answer. Is `areal-like dashboard` still running?");
  }
}
