"use strict";
// One layout: its key figures, breakdown of the step time, memory per rank, and sensitivity.

const TERMS = {
  compute: ["compute", "#4477aa"], recompute: ["recomputation", "#8ab6dd"],
  tp: ["tensor-parallel communication", "#ee7733"], cp: ["context-parallel communication", "#ccaa22"],
  ep: ["expert dispatch", "#cc4455"], pp_p2p: ["pipeline sends", "#dd88aa"], pp_bubble: ["pipeline bubble", "#a9b0b8"],
  dp: ["gradients and parameters", "#8866aa"], optimizer: ["optimizer step", "#33a3a3"], overhead: ["launches and fixed costs", "#77716a"],
};
const OWNERS = ["#4477aa", "#ee7733", "#338866", "#ccaa22", "#aa3377", "#66bbdd", "#cc6655", "#8888cc", "#77716a"];
let current = null;

function fact(name, value, note) {
  const made = element("div", null, element("dt", name), element("dd", value));
  if (note) made.append(element("small", note));
  return made;
}

function showLayout(row, detail, place) {
  current = detail;
  $("#layout-title").textContent = row.title;
  $("#layout-place").textContent = place ? `No. ${place} in the table` : page.data.rows ? "from the map" : "";
  $("#layout-option").textContent = `--layout ${row.option}`;
  const facts = [fact("step time", seconds(row.seconds), row.interval), fact("throughput", rate(row.rate), "tokens/s/GPU")];
  if (row.mfu) facts.push(fact("MFU", percent(row.mfu), `of the ${row.precision} peak`));
  facts.push(fact("memory", gib(row.gib), `of ${gib(page.data.limit_gib)} usable, maximum of all ranks`));
  if (row.verdict !== "ok") facts.push(fact("verdict", row.verdict === "tight" ? "tight" : "does not fit"));
  if (detail) {
    facts.push(fact("bubble", percent(detail.terms.pp_bubble / detail.seconds), "of the step"));
    facts.push(fact("micro-batches", whole(detail.micro_batches), `per step; DP ${whole(detail.degrees.dp)}`));
  }
  $("#layout-facts").replaceChildren(...facts);
  $("#layout-more").hidden = Boolean(detail);
  if (!detail) {
    const command = page.data.explain.replace("{layout}", () => row.option).replace("{precision}", () => row.precision);
    $("#layout-command").textContent = command;
  }
  $("#layout-parts").hidden = !detail;
  if (!detail) return;
  drawTerms(detail);
  drawMemory(detail);
  drawTimeline(detail);
  whenNear($("#fig-ranks"), detail.ranks.gpus > 4096, () => drawRanks(detail));
  drawCurves(detail);
}

const stacked = () => ({ left: [], right: [], bottom: [], top: [], color: [], label: [], value: [], row: [], alpha: [] });

function bar(data, row, left, value, [label, paint], alpha = 1) {
  const cell = { left, right: left + value, bottom: row + 0.4, top: row - 0.4, color: paint, label, value, row, alpha };
  for (const key of Object.keys(data)) data[key].push(cell[key]);
  return left + value;
}

function setRows(name, words, height) {
  setTicks(`${name}_rows`, words.map((_, i) => i), words);
  setRange(`${name}_y`, words.length - 0.4, -0.6);
  model(name).height = height;
}

// The selected layout at the top, then the best layouts of the page for comparison.
function drawTerms(detail) {
  const others = (page.data.layouts ?? []).filter((one) => one && one !== detail).slice(0, 7);
  const compared = [detail, ...others];
  const data = stacked();
  for (const [row, one] of compared.entries()) {
    let at = 0;
    for (const [term, about] of Object.entries(TERMS)) {
      if (one.terms[term] > 0) at = bar(data, row, at, one.terms[term], about, row ? 0.55 : 1);
    }
  }
  model("terms").left[0].axis_label = null;
  model("terms").below[0].axis_label = "step time, s";
  const name = (one) => `No. ${page.data.layouts.indexOf(one) + 1}`;
  setRows("terms", compared.map((one, row) => (row ? name(one) : "this layout")), 84 + 24 * compared.length);
  setRange("terms_x", 0, Math.max(...compared.map((one) => one.seconds)) * 1.02);
  terms.compared = compared;
  model("terms").left[0].visible = compared.length > 1;
  page.sources.terms.data = data;
  const used = Object.entries(TERMS).filter(([term]) => compared.some((one) => one.terms[term] > 0.0005 * one.seconds));
  legend("#terms-legend", used.map(([, about]) => about));
  setTable("terms", ["term", "seconds", "share of the step"], () =>
    Object.entries(TERMS).filter(([term]) => detail.terms[term] > 0).sort((a, b) => detail.terms[b[0]] - detail.terms[a[0]])
      .map(([term, [label]]) => [label, seconds(detail.terms[term]), percent(detail.terms[term] / detail.seconds)]));
}
const terms = { compared: [] };

function drawMemory(detail) {
  const { owners, gib: sizes, reserved_gib: reserved, gpu_gib: gpu } = detail.memory;
  const data = stacked();
  for (const [rank, parts] of sizes.entries()) {
    let at = 0;
    for (const [k, size] of parts.entries()) if (size > 0) at = bar(data, rank, at, size, [owners[k], OWNERS[k % OWNERS.length]]);
    if (reserved[rank] > at) bar(data, rank, at, reserved[rank] - at, ["reserved, not allocated", "#9aa1a9"], 0.45);
  }
  const many = sizes.length > 24;
  const words = sizes.map((_, rank) => (many && rank % Math.ceil(sizes.length / 16) ? "" : String(rank)));
  setRows("memory", words, Math.min(620, 90 + (many ? 9 : 22) * sizes.length));
  model("memory").below[0].axis_label = "peak memory per GPU, GiB";
  model("memory").left[0].axis_label = "pipeline rank";
  setRange("memory_x", 0, Math.max(gpu * 1.03, Math.max(...reserved) * 1.03));
  model("memory_limit").location = detail.limit_gib;
  model("memory_gpu").location = gpu;
  page.sources.memory.data = data;
  legend("#memory-legend", [...owners.map((owner, k) => [owner, OWNERS[k % OWNERS.length]]), ["reserved, not allocated", "#9aa1a9"]]);
  setTable("memory", ["pipeline rank", ...owners.map((owner) => `${owner}, GiB`), "allocated, GiB", "reserved, GiB"], () =>
    sizes.map((parts, rank) => [String(rank), ...parts.map((size) => digits(size, 2)), digits(parts.reduce((a, b) => a + b, 0), 2), digits(reserved[rank], 2)]));
}

// ---- curves: the effect on this layout of changing one quantity
const curves = {};

function drawCurve(name, curve, at) {
  const place = $(`#fig-${name}`);
  place.hidden = !curve || curve.points.filter((point) => point.rate !== null).length < 2;
  if (place.hidden) return;
  const points = curve.points.filter((point) => point.rate !== null);
  curves[name] = { curve, points };
  $("figcaption b", place).textContent = curve.title[0].toUpperCase() + curve.title.slice(1);
  model(name).below[0].axis_label = curve.unit;
  const xs = points.map((point) => point.value);
  const padding = name.includes("imbalance") ? [xs[0] - 0.05, xs.at(-1) + 0.05] : [xs[0] / 1.25, xs.at(-1) * 1.25];
  setRange(`${name}_x`, ...padding);
  setRange(`${name}_y`, 0, Math.max(...points.map((point) => point.rate)) * 1.15);
  setTicks(`${name}_ticks`, xs, xs.map(short));
  model(name).left[0].axis_label = "tokens/s/GPU";
  model(`${name}_curve`).data = { x: xs, y: points.map((point) => point.rate) };
  curves[name].at = at;
  paintDots(name);
  setTable(name, [`${curve.title}, ${curve.unit}`, "tokens/s/GPU", "GiB reserved", "verdict"], () =>
    curve.points.map((point) => [short(point.value), point.rate === null ? "-" : rate(point.rate), point.gib === null ? "-" : digits(point.gib, 1), point.verdict]));
}

// Filled = fits; hollow = does not.
function paintDots(name) {
  if (!curves[name]) return;
  const { points, at } = curves[name];
  const [line, card, mark] = ["line", "card", "mark"].map(color);
  const paint = (point) => (point.verdict === "oom" ? card : point.value === at ? mark : line);
  model(`${name}_curve_points`).data = {
    x: points.map((point) => point.value), y: points.map((point) => point.rate),
    fill: points.map(paint), edge: points.map((point) => (point.value === at ? mark : line)),
  };
  model(`${name}_curve_line`).glyph.line_color = { value: line };
}

function drawCurves(detail) {
  const base = Object.fromEntries((detail.sensitivity ?? []).map((curve) => [curve.key, curve]));
  const values = { seq: page.data.seq, gbs: page.data.gbs, far: base.far?.points[2].value, near: base.near?.points[2].value, imbalance: 1 };
  for (const key of ["seq", "gbs", "far", "near", "imbalance"]) drawCurve(`sensitivity_${key}`, base[key], values[key]);
  for (const key of ["strong", "weak"]) drawCurve(`scaling_${key}`, detail.scaling?.find((curve) => curve.key === key), page.data.gpus);
  for (const part of ["scaling", "sensitivity"]) $(`#${part}`).hidden = !detail[part];
}

function describeBar(name, unit) {
  return (i) => {
    const { label, value, row } = page.sources[name].data;
    const whole = name === "terms" ? terms.compared[row[i]].seconds : current.limit_gib;
    const of = name === "terms" ? "of the step" : "of the usable memory";
    const who = name === "terms" ? terms.compared[row[i]].title : `pipeline rank ${row[i]}`;
    return { title: label[i], lines: [["", who], [unit === "s" ? "time" : "size", unit === "s" ? seconds(value[i]) : gib(value[i])], ["share", `${percent(value[i] / whole)} ${of}`]] };
  };
}

page.setups.unshift((data) => {
  if (!data.layouts) return;
  page.sources = { terms: model("terms_data"), memory: model("memory_data") };
  setupTimeline();
  setupRanks();
  onHover("terms_data", describeBar("terms", "s"));
  onHover("memory_data", describeBar("memory", "GiB"));
  for (const name of data.figures.filter((name) => /^(scaling|sensitivity)_/.test(name))) {
    onHover(`${name}_curve_points`, (i) => {
      const { curve, points } = curves[name];
      const point = points[i];
      const lines = [["throughput", `${rate(point.rate)} tokens/s/GPU`], ["memory", gib(point.gib)], ["", point.verdict === "oom" ? "does not fit" : point.verdict === "tight" ? "tight" : "fits"]];
      return { title: `${curve.title} ${short(point.value)} ${curve.unit}`, lines };
    });
  }
  page.onTheme.push(() => {
    for (const name of Object.keys(curves)) paintDots(name);
    for (const name of ["memory_limit", "memory_gpu"]) model(name).line_color = color(name === "memory_limit" ? "mark" : "muted");
    restyleTimeline();
    restyleRanks();
  });
  if (!data.rows) showLayout(data.layouts[0], data.layouts[0], 0);
});
