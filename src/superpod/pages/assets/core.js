"use strict";
// Code shared by all figures of a page: data, theme, tooltips, tables. User text is inserted only as textContent.

const page = { data: null, figures: [], onTheme: [] };
const $ = (selector, within = document) => within.querySelector(selector);
const model = (name) => page.doc.get_model_by_name(name);

function bytesOf(base64) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i); // Uint8Array.from takes five times as long
  return bytes;
}

async function readData() {
  const stream = new Blob([bytesOf($("#data").textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const TYPES = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };

function column(packed) {
  return new TYPES[packed.type](bytesOf(packed.base64).buffer);
}

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

// Numbers, with their units where they have any.
const digits = (x, n) => x.toLocaleString("en-US", { minimumFractionDigits: n, maximumFractionDigits: n });
const whole = (x) => Math.round(x).toLocaleString("en-US");
const percent = (x, n = 1) => `${digits(100 * x, n)} %`;
const gib = (x) => `${digits(x, 1)} GiB`;
function seconds(x) {
  if (x >= 1) return `${digits(x, 3)} s`;
  if (x >= 1e-3) return `${digits(x * 1e3, 2)} ms`;
  return `${digits(x * 1e6, 1)} µs`;
}
const rate = (x) => (x >= 1000 ? whole(x) : digits(x, 1));
function short(x) {
  if (x >= 1048576 && x % 1048576 === 0) return `${x / 1048576}M`;
  if (x >= 1024 && x % 1024 === 0) return `${x / 1024}K`;
  return x >= 10000 ? `${digits(x / 1000, 0)}k` : String(Math.round(x * 100) / 100);
}

// Bokeh stores tick labels in a Map.
function setTicks(name, ticks, words) {
  const ticker = model(name);
  ticker.ticks = ticks;
  for (const figure of page.figures.map(model)) {
    for (const axis of [...figure.left, ...figure.below]) {
      if (axis.ticker === ticker) axis.major_label_overrides = new Map(ticks.map((tick, i) => [tick, words[i]]));
    }
  }
}

function setRange(name, start, end) {
  model(name).setv({ start, end, reset_start: start, reset_end: end });
}

// ---- theme: colours are defined in the style sheet, from which figures read them
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const theme = () => document.documentElement.dataset.theme;

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = $("#theme");
  button.textContent = name === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Show the page ${name === "dark" ? "light" : "dark"}`);
  if (!page.doc) return;
  const [card, ink, muted, rule] = ["card", "ink", "muted", "rule"].map(color);
  for (const figure of page.figures.map(model)) {
    figure.setv({ background_fill_color: card, border_fill_color: card });
    for (const axis of [...figure.left, ...figure.below]) {
      axis.setv({
        axis_line_color: muted, major_tick_line_color: muted,
        major_label_text_color: muted, axis_label_text_color: ink,
      });
    }
    for (const part of figure.center) {
      if ("grid_line_color" in part) part.grid_line_color = rule;
      else if (part.dimension) part.line_color = muted;
    }
  }
  for (const restyle of page.onTheme) restyle();
}

function setupTheme() {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const printed = matchMedia("print");
  let chosen = null;
  const current = () => (printed.matches ? "light" : chosen ?? (preferred.matches ? "dark" : "light"));
  const update = () => setTheme(current());
  $("#theme").addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    update();
  });
  preferred.addEventListener("change", update);
  printed.addEventListener("change", update);
  printed.addEventListener("change", () => [...pending.keys()].forEach(drawPending));
  update();
}

// ---- tooltips
const tip = element("div");
tip.id = "tip";
tip.setAttribute("role", "status");
tip.hidden = true;
const pointer = { x: 0, y: 0 };

function showTip({ title, lines }) {
  tip.replaceChildren(element("strong", title));
  const list = element("dl");
  for (const [name, value] of lines) list.append(element("dt", name), element("dd", value));
  tip.append(list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = pointer.x + 16 + width > innerWidth ? pointer.x - width - 12 : pointer.x + 16;
  const top = pointer.y + 16 + height > innerHeight ? pointer.y - height - 12 : pointer.y + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function onHover(source, describe) {
  const data = model(source);
  data.inspect.connect(() => {
    const i = data.inspected.indices[0];
    if (i === undefined) tip.hidden = true;
    else showTip(describe(i));
  });
}

function setupTips() {
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => Object.assign(pointer, { x: event.clientX, y: event.clientY }));
  for (const plot of document.querySelectorAll(".plot")) plot.addEventListener("pointerleave", () => (tip.hidden = true));
  addEventListener("scroll", () => (tip.hidden = true), { passive: true });
}

// ---- the numbers of a figure as a table, also for screen readers
function setTable(name, titles, rows) {
  const place = $(`[data-table="${name}"]`);
  if (!place) return;
  const fill = () => {
    const head = element("tr", null, ...titles.map((title) => Object.assign(element("th", title), { scope: "col" })));
    const body = rows().map((row) => element("tr", null, ...row.map((cell) => element("td", cell))));
    place.replaceChildren(element("table", null, element("thead", null, head), element("tbody", null, ...body)));
  };
  const details = place.closest("details");
  details.ontoggle = () => details.open && fill();
  if (details.open) fill();
}

function legend(place, entries) {
  $(place).replaceChildren(
    ...entries.map(([name, paint]) => {
      const patch = element("i");
      patch.style.background = paint;
      return element("li", null, patch, name);
    }),
  );
}

// Figures that are slow to draw are drawn only when the reader scrolls near them, or prints the page.
const pending = new Map();
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) drawPending(target);
}, { rootMargin: "500px" });

function drawPending(place) {
  near.unobserve(place);
  const draw = pending.get(place);
  pending.delete(place);
  draw?.();
}

function whenNear(place, isLarge, draw) {
  if (!isLarge) return draw();
  pending.set(place, draw);
  near.unobserve(place); // observing it again makes the observer report its position
  near.observe(place);
}

function setupCopying() {
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText($(button.dataset.copy).textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
  }
}

// Models are filled after Bokeh has read them and before it draws them, so that each figure is drawn only once.
function fillModels(document_) {
  page.doc = document_;
  page.figures = page.data.figures;
  for (const setup of page.setups) setup(page.data);
  setupTheme();
}

async function start() {
  page.data = await readData();
  setupTips();
  setupCopying();
  const { Document } = Bokeh.require("document");
  const read = Document.from_json;
  Document.from_json = (...given) => {
    const made = read.apply(Document, given);
    fillModels(made);
    return made;
  };
  page.embed();
  while (!page.doc?.is_idle) await new Promise(requestAnimationFrame);
  for (const finish of page.onReady) finish();
  document.documentElement.dataset.ready = "yes";
}
page.setups = [];
page.onReady = [];
