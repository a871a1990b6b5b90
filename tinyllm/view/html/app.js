"use strict";
/* The frame of the page: reads its blocks, draws sections, charts and tables. The record may hold anything that a model
   or a user wrote, so texts reach the document as text nodes only. */

const page = { data: null, panels: [], current: -1, charts: [], browser: null };
const TYPES = {
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
  float32: Float32Array, float64: Float64Array,
};

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node && !name.startsWith("aria-")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Blocks

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function blockBytes(number) {
  const node = document.getElementById(`block-${number}`);
  const packed = fromBase64(node.textContent);
  node.remove(); // each block is read once; its text would stay in memory
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function blockText(number) {
  return new TextDecoder().decode(await blockBytes(number));
}

async function blockJson(number) {
  return JSON.parse(await blockText(number));
}

/** Numbers whose bytes of equal weight were stored together. */
async function blockNumbers({ block, type, length }) {
  const planes = await blockBytes(block);
  const size = TYPES[type].BYTES_PER_ELEMENT;
  if (size === 1) return planes;
  const bytes = new Uint8Array(length * size);
  for (let k = 0; k < size; k++) {
    for (let i = 0, from = k * length, to = k; i < length; i++, from++, to += size) bytes[to] = planes[from];
  }
  return new TYPES[type](bytes.buffer);
}

async function blockTexts({ texts, rows }) {
  const [table, numbers] = await Promise.all([blockJson(texts), blockNumbers(rows)]);
  return { table, rows: numbers, at: (i) => table[numbers[i]] };
}

// Sections

async function start() {
  setTheme(remembered());
  const main = document.getElementById("main");
  if (!("DecompressionStream" in window)) {
    main.replaceChildren(make("p", {}, "This browser is too old to unpack the report; use one of 2023 or later."));
    return;
  }
  page.data = await blockJson(document.body.dataset.block);
  main.replaceChildren();
  const tabs = document.getElementById("tabs");
  page.data.sections.forEach((section, i) => {
    const tab = make("button", { type: "button", role: "tab", id: `tab-${i}`, "aria-controls": `panel-${i}` }, section.title);
    tab.addEventListener("click", () => show(i));
    tabs.append(tab);
    const panel = make("section", { role: "tabpanel", id: `panel-${i}`, "aria-labelledby": `tab-${i}`, hidden: true });
    main.append(panel);
    page.panels.push(panel);
  });
  tabs.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.stopPropagation();
    const to = (page.current + move + page.panels.length) % page.panels.length;
    show(to);
    tabs.children[to].focus();
  });
  document.getElementById("theme").addEventListener("click", otherTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  document.addEventListener("keydown", onKey);
  window.addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(drawNow));
  const wanted = page.data.sections.findIndex((section) => "#" + slug(section.title) === location.hash);
  show(Math.max(0, wanted));
  ready("page");
}

/** Says how far the page is, to whoever measures or drives it. */
function ready(what) {
  document.body.dataset.ready = what;
  performance.mark(`ready ${what}`);
}

function slug(title) {
  return encodeURIComponent(title.toLowerCase().replaceAll(" ", "-"));
}

function show(number) {
  if (number === page.current) return;
  page.current = number;
  page.panels.forEach((panel, i) => {
    panel.hidden = i !== number;
    const tab = document.getElementById(`tab-${i}`);
    tab.setAttribute("aria-selected", i === number);
    tab.tabIndex = i === number ? 0 : -1;
  });
  const panel = page.panels[number];
  if (!panel.childElementCount) panel.append(...page.data.sections[number].blocks.map(draw));
  history.replaceState(null, "", "#" + slug(page.data.sections[number].title));
  window.scrollTo(0, 0);
}

const DRAW = {
  heading: ({ text, note }) => make("h2", {}, text, note ? make("small", {}, note) : null),
  text: ({ text }) => make("p", { className: "text" }, text),
  tiles: ({ items }) => make("div", { className: "tiles" }, ...items.map(drawTile)),
  table: drawTable,
  command: ({ text }) => drawCommand(text),
  notes: ({ items }) => make("ul", { className: "notes" }, ...items.map(drawNote)),
  charts: ({ charts }) => make("div", { className: "charts" }, ...charts.map(drawChart)),
  browser: () => (page.browser = new Browser(page.data.runs)).node,
};

function draw(block) {
  return DRAW[block.type](block);
}

function drawTile([name, value, note]) {
  return make("div", { className: "tile" }, make("span", {}, name), make("b", {}, value), make("span", {}, note));
}

function drawTable({ head, rows, wide }) {
  const cell = (value) => make("td", typeof value === "number" ? { className: "number" } : {}, plain(value));
  const top = make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map(cell)));
  const table = make("table", wide ? { className: "wide" } : {}, make("thead", {}, top), make("tbody", {}, ...body));
  return make("div", { className: "scroll" }, table);
}

function drawCommand(text) {
  const button = make("button", { type: "button" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "selected";
    }
  });
  return make("div", { className: "command" }, make("code", {}, text), button);
}

const MARKS = { stop: "✕ stopped", problem: "✕ problem", warn: "▲ warning", notice: "✓ fine" };

function drawNote({ level, step, text, remedy, filter }) {
  const words = make("span", {}, text, ...(remedy ? [" ", make("em", {}, remedy)] : []));
  const place = make("span", { className: "place" }, `step ${step}`);
  const note = make("li", { className: level }, make("span", { className: "mark" }, MARKS[level]), words, place);
  const rollouts = page.data.sections.findIndex((section) => section.blocks.some((block) => block.type === "browser"));
  if (filter && rollouts >= 0) {
    const button = make("button", { type: "button" }, "show rollouts");
    button.addEventListener("click", () => {
      show(rollouts);
      page.browser.setFilter(filter);
    });
    note.append(button);
  }
  return note;
}

/** A number as its shortest exact form; a cell of another kind as it is. */
function plain(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return String(value);
}

function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
}

// Charts

const PALETTES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b0578d", "#8a6d00", "#3a3a3a"],
  dark: ["#5bb4f0", "#f0884a", "#3cc79c", "#e39bc7", "#e0c040", "#c8c8c8"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
let library = null;

/** Plotly from its block, run once, when the first chart comes into view. */
function loadPlotly() {
  library ??= blockText(page.data.library).then((source) => {
    document.head.append(make("script", { textContent: source }));
    return window.Plotly;
  });
  return library;
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      drawNow(entry.target);
    }
  },
  { rootMargin: "300px" },
);

function drawNow(node) {
  seen.unobserve(node);
  if (!page.charts.includes(node)) page.charts.push(node);
  return loadPlotly().then((plotly) => plot(plotly, node));
}

function drawChart(chart) {
  const node = make("div", { className: "plot", role: "img", "aria-label": describe(chart) });
  node.chart = chart;
  seen.observe(node);
  const numbers = make("details", {}, make("summary", {}, "numbers"));
  numbers.addEventListener("toggle", () => numbers.childElementCount > 1 || numbers.append(chartTable(chart)), { once: true });
  return make("div", { className: "chart" }, make("h3", {}, chart.title), make("p", {}, noteOf(chart)), node, numbers);
}

function seriesName(chart, series) {
  if (page.data.runs.length === 1 || new Set(chart.series.map((s) => s.run)).size < 2) return series.name;
  const run = page.data.runs[series.run].name;
  return new Set(chart.series.map((s) => s.name)).size > 1 ? `${run}: ${series.name}` : run;
}

function describe(chart) {
  const ends = chart.series.map((s) => `${seriesName(chart, s)} from ${short(s.y[0])} to ${short(s.y.at(-1))}`);
  return `${chart.title}: ${ends.join("; ")}`;
}

/** A flat line says little; its value is said in words too. */
function noteOf(chart) {
  const values = new Set(chart.series.flatMap((series) => series.y));
  if (values.size > 1) return chart.note;
  return `${chart.note}${chart.note ? "; " : ""}${short([...values][0])} throughout`;
}

function chartTable(chart) {
  const head = ["step"];
  const steps = new Map();
  for (const series of chart.series) {
    head.push(seriesName(chart, series));
    series.x.forEach((x, i) => {
      if (!steps.has(x)) steps.set(x, []);
      steps.get(x)[head.length - 2] = series.y[i];
    });
  }
  const rows = [...steps].sort((a, b) => a[0] - b[0]);
  return drawTable({ head, rows: rows.map(([x, values]) => [x, ...head.slice(1).map((_, i) => values[i] ?? "")]) });
}

function traces(chart) {
  const colors = PALETTES[theme()];
  const several = new Set(chart.series.map((s) => s.run)).size > 1;
  return chart.series.flatMap((series) => {
    const color = colors[(several ? series.run : series.role) % colors.length];
    const name = seriesName(chart, series);
    const base = { x: series.x, name, mode: series.points ? "lines+markers" : "lines", marker: { color, size: 6 } };
    const line = { color, width: 2, dash: DASHES[series.role % DASHES.length] };
    const found = [];
    if (series.low) {
      const edge = { x: series.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      found.push({ ...edge, y: series.low });
      found.push({ ...edge, y: series.high, fill: "tonexty", fillcolor: color + "2b" });
    }
    const few = series.points || series.raw || series.y.length < 8;
    if (!few) found.push({ ...base, y: series.y, line: { ...line, width: 1 }, opacity: 0.35, showlegend: false });
    const means = few ? series.y : series.y.map((_, i) => mean(series.y.slice(Math.max(0, i - 2), i + 3)));
    found.push({ ...base, y: means, line, hoverinfo: few ? "all" : "skip" });
    return found;
  });
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function layout(chart) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--grid"), linecolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
  const shares = chart.unit === "share";
  const steps = chart.series.flatMap((series) => series.x);
  const few = Math.max(...steps) - Math.min(...steps) < 9; // else ticks between whole steps, rounded
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--ink") },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    margin: { l: 44, r: 12, t: 8, b: 34 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
    showlegend: chart.series.length > 1,
    legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", traceorder: "normal", bgcolor: "transparent" },
    xaxis: { ...axis, title: { text: "step", standoff: 4 }, nticks: 9, tickformat: "d", ...(few ? { dtick: 1 } : {}) },
    yaxis: { ...axis, rangemode: chart.zero ? "tozero" : "normal", tickformat: shares ? ".2~%" : "~g", nticks: 6, hoverformat: ".4g" },
  };
}

function plot(plotly, node) {
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  return plotly.react(node, traces(node.chart), layout(node.chart), options);
}

// Theme and keys

function remembered() {
  try {
    const kept = localStorage.getItem("tinyllm-theme");
    if (kept === "light" || kept === "dark") return kept;
  } catch { /* a page on disk may have no storage */ }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function theme() {
  return document.documentElement.dataset.theme;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const drawn = page.charts.splice(0); // drawn again at once where visible, else when seen
  drawn.forEach((node) => seen.observe(node));
}

function otherTheme() {
  const name = theme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("tinyllm-theme", name);
  } catch { /* it holds until the page is closed */ }
  setTheme(name);
}

function showKeys() {
  document.getElementById("keys").showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input, select, textarea");
  const browsing = page.browser && !page.browser.node.closest("section").hidden;
  if (typing) {
    if (event.key === "Escape" && browsing) page.browser.focusList();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= page.panels.length) show(number - 1);
  else if (event.key === "t") otherTheme();
  else if (event.key === "?") showKeys();
  else if (!browsing || !page.browser.onKey(event)) return;
  event.preventDefault();
}
