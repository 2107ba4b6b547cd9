"use strict";
// Draws the charts of #page-data. Colours are names; the palette of the theme turns them into values.
const page = JSON.parse(document.getElementById("page-data").textContent);
const root = document.documentElement;
const isTouch = matchMedia("(pointer: coarse)").matches;
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const hidden = {};  // names switched off, by chart

function memory(value) {
  try {
    if (value === undefined) return localStorage.getItem("areal-like-theme");
    localStorage.setItem("areal-like-theme", value);
  } catch (error) { /* a browser may forbid storage to files: then the theme is not remembered */ }
  return null;
}

function theme() {
  return root.dataset.theme || (systemDark.matches ? "dark" : "light");
}

function colour(name) {
  return page.palettes[theme()][name] || name;
}

function faded(hex, alpha) {
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${alpha})`;
}

function axis(found, more) {
  const made = {
    title: { text: found.unit ? `${found.label} (${found.unit})` : found.label, font: { size: 12, color: colour("muted") }, standoff: 8 },
    gridcolor: colour("grid"), linecolor: colour("grid"), zerolinecolor: colour("grid"),
    tickfont: { size: 11, color: colour("muted") }, automargin: true, exponentformat: "e", minexponent: 6, separatethousands: true,
    nticks: 7, ...more,
  };
  if (found.is_share) made.tickformat = ".3~%";
  if (found.scale === "log") Object.assign(made, { type: "log", dtick: 1, tickformat: ",.6~r" });
  else if (found.bottom !== null && found.top !== null) made.range = [found.bottom, found.top];
  else if (found.bottom === 0) made.rangemode = "tozero";
  else if (found.top !== null) made.autorangeoptions = { include: found.top };
  return made;
}

function layout(more) {
  return {
    margin: { l: 8, r: 14, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
    showlegend: false, dragmode: isTouch ? false : "zoom", bargap: 0.12,
    hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
    ...more,
  };
}

const settings = { responsive: true, displayModeBar: false };

function amount(value, y) {
  if (value === null) return "";
  if (y.is_share) return `${+(value * 100).toPrecision(3)}%`;
  return value.toLocaleString("en", value >= 10000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
}

function trace(series, chart, width) {
  const shade = colour(series.colour);
  const made = {
    name: series.name, x: series.xs, y: series.ys, connectgaps: false,
    visible: !(hidden[chart.key] || new Set()).has(series.name),
    hovertemplate: `%{y${chart.y.is_share ? ":.3~p" : ":,.4~g"}}${chart.y.unit ? " " + chart.y.unit : ""}`,
  };
  if (series.kind === "bars" || series.kind === "stacked") {
    Object.assign(made, { type: "bar", marker: { color: shade } });
    if (series.kind === "bars") {
      if (series.xs.length < 3 && chart.series.length === 1) made.width = 0.4;
      if (width / (chart.series.length * series.xs.length) > 44) {
        Object.assign(made, { text: series.ys.map((value) => amount(value, chart.y)), textposition: "outside",
          cliponaxis: false, textangle: 0, textfont: { color: colour("ink"), size: 11 } });
      }
    } else {
      made.marker.line = { color: shade, width: 0.6 };  // hides the hairline between neighbours
    }
    return made;
  }
  Object.assign(made, { type: "scatter", mode: series.kind === "dots" ? "lines+markers" : "lines",
    opacity: series.emphasis === "faint" ? 0.7 : 1, line: { color: shade, width: strokes[series.emphasis], dash: series.dash } });
  if (series.xs.length === 1) made.mode = "lines+markers";
  if (series.kind === "dots") Object.assign(made, { marker: { color: shade, size: series.xs.length > 40 ? 4 : 8, line: { color: colour("paper"), width: 1 } } });
  if (series.kind === "steps") Object.assign(made, { fill: "tozeroy", fillcolor: faded(shade, 0.14) });
  if (series.kind === "steps") made.line.shape = "hv";
  return made;
}

const strokes = { plain: 1.8, faint: 1.4, bold: 2.8, limit: 1.2 };

function swatch(shade, { dash, emphasis, isArea, isHatched }) {
  const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  box.setAttribute("width", isArea ? 14 : 26);
  box.setAttribute("height", 12);
  box.setAttribute("aria-hidden", "true");
  const put = (kind, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    box.append(made);
  };
  const dashes = { dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4" };
  if (!isArea) put("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: shade, "stroke-width": strokes[emphasis] || 2.4, opacity: emphasis === "faint" ? 0.6 : 1, "stroke-dasharray": dashes[dash] || "" });
  else if (isHatched) {
    put("rect", { width: 14, height: 12, rx: 2, fill: faded(shade, 0.3) });
    for (const at of [-6, 0, 6, 12]) put("line", { x1: at, y1: 12, x2: at + 12, y2: 0, stroke: shade, "stroke-width": 1.8 });
  } else put("rect", { width: 14, height: 12, rx: 2, fill: shade });
  return box;
}

function legend(key, entries, redraw) {
  const box = document.querySelector(`[data-legend="${key}"]`);
  if (!box) return;
  box.replaceChildren(...entries.map((entry) => {
    const button = document.createElement("button");
    const off = (hidden[key] = hidden[key] || new Set());
    button.type = "button";
    button.append(swatch(colour(entry.colour), entry), entry.name);
    button.classList.toggle("off", off.has(entry.name));
    button.setAttribute("aria-pressed", String(!off.has(entry.name)));
    button.addEventListener("click", () => {
      off.has(entry.name) ? off.delete(entry.name) : off.add(entry.name);
      redraw();
    });
    return button;
  }));
}

// Names below bars, cut so that they fit; plotly turns them where they are many.
function named(chart) {
  const names = [...new Set(chart.series.flatMap((series) => series.xs))];
  const room = innerWidth < 820 ? 10 : 16;
  const cut = (name) => (name.length > room ? `${name.slice(0, room / 3)}…${name.slice(name.length - room * 2 / 3 + 1)}` : name);
  return { type: "category", tickvals: names, ticktext: names.map(cut) };
}

function drawChart(target) {
  const chart = page.charts[target.dataset.chart];
  const isBars = chart.series.some((series) => series.kind === "bars" || series.kind === "stacked");
  const isNamed = chart.series.some((series) => typeof series.xs[0] === "string");
  const isStacked = chart.series.some((series) => series.kind === "stacked");
  const areas = (series) => ["bars", "stacked", "steps"].includes(series.kind);
  const x = axis(chart.x, isNamed ? named(chart) : { hoverformat: ",.6~g" });
  const places = new Set(chart.series.flatMap((series) => series.xs));
  if (!isNamed && places.size === 1) Object.assign(x, { tickvals: [...places], range: [[...places][0] - 1, [...places][0] + 1] });
  const y = axis(chart.y);
  if (isBars && !isStacked) {
    const highest = Math.max(...chart.series.flatMap((series) => series.ys.map((value) => value || 0)));
    y.range = chart.y.scale === "log" ? [-0.3, Math.log10(highest) + 0.4] : [0, highest * 1.16 || 1];
  }
  Plotly.react(target, chart.series.map((series) => trace(series, chart, target.clientWidth)), layout({
    xaxis: x, yaxis: y, barmode: isStacked ? "stack" : "group",
    hovermode: isNamed ? "closest" : "x unified",
    bargap: isStacked ? 0 : 0.3,
  }), settings);
  if (chart.series.length > 1 || !isBars) {
    legend(chart.key, chart.series.map((series) => ({ ...series, isArea: areas(series) })),
      () => drawChart(target));
  }
}

function drawTimeline(target) {
  const line = page.timeline, off = hidden.timeline || new Set();
  const count = line.strips.length, height = 1 / count, traces = [];
  const made = layout({
    xaxis: axis(line.x, { range: [0, line.length], showgrid: false, ticks: "outside", tickcolor: colour("grid"), anchor: count > 1 ? `y${count}` : "y" }), hovermode: "x",
    annotations: [], shapes: line.breaks.map((at) => ({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1,
      line: { color: colour("ink"), width: 1, dash: "dash" } })),
    margin: { l: 8, r: 14, t: 4, b: 8 },
  });
  line.strips.forEach((strip, place) => {
    const at = place ? place + 1 : "", top = 1 - place * height;
    const domain = [top - height + height * 0.06, top - height * 0.38];
    made[`yaxis${at}`] = { domain, range: [0, 1], fixedrange: true, showticklabels: false, showgrid: false, zeroline: false };
    made.shapes.push({ type: "rect", xref: "paper", yref: "paper", x0: 0, x1: 1, y0: domain[0], y1: domain[1], layer: "below",
      line: { width: 0 }, fillcolor: faded(colour("c6"), 0.13) });
    made.annotations.push({ text: strip.label, x: 0, xref: "paper", xanchor: "left", y: top - height * 0.38, yref: "paper",
      yanchor: "bottom", showarrow: false, font: { size: 12, color: colour("ink") } });
    for (const activity of line.activities) {
      const ys = strip.shares[activity.name];
      if (!ys || off.has(activity.name)) continue;
      const shade = colour(activity.colour);
      traces.push({ type: "scatter", mode: "lines", name: activity.name, x: strip.xs, y: ys, yaxis: `y${at}`, stackgroup: `s${place}`,
        line: { width: 0, shape: "hv", color: shade }, fillcolor: activity.is_wait ? faded(shade, 0.3) : shade,
        ...(activity.is_wait ? { fillpattern: { shape: "/", size: 6, solidity: 0.35, fgcolor: shade, bgcolor: faded(shade, 0.3) } } : {}),
        hovertemplate: "%{y:.3~p}" });
    }
  });
  Plotly.react(target, traces, made, settings);
  legend("timeline", line.activities.map((activity) => ({ name: activity.name, colour: activity.colour, isArea: true, isHatched: activity.is_wait })),
    () => drawTimeline(target));
}

function paint() {
  for (const dot of document.querySelectorAll("[data-activity]")) {
    const activity = page.timeline.activities.find((one) => one.name === dot.dataset.activity);
    if (activity) dot.style.background = colour(activity.colour);
  }
}

// One chart per turn of the event loop, so that a phone shows text at once.
function drawAll() {
  const jobs = [...document.querySelectorAll("[data-chart]")].map((target) => [target, () => drawChart(target)]);
  for (const target of document.querySelectorAll("[data-timeline]")) jobs.push([target, () => drawTimeline(target)]);
  jobs.sort((a, b) => (a[0].compareDocumentPosition(b[0]) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1));
  paint();
  document.body.dataset.drawn = "no";
  const next = () => {
    const job = jobs.shift();
    if (!job) { document.body.dataset.drawn = theme(); return; }
    job[1]();
    setTimeout(next, 0);
  };
  next();
}

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  memory(root.dataset.theme);
  drawAll();
});
systemDark.addEventListener("change", () => { if (!root.dataset.theme) drawAll(); });
const remembered = memory();
if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;
drawAll();
