"use strict";
// The passes of a step, with a row for each pipeline rank.

const PASS = {
  forward: { compute: "#4477aa", recompute: "#8ab6dd" },
  backward: { compute: "#338866", recompute: "#8fc9a9" },
};
const line = { parts: null, passes: [] };
// Later chunks of a rank are lighter.
function paintOf(kind, term, chunk, chunks) {
  if (!PASS[kind][term]) return TERMS[term][1];
  const white = chunks > 1 ? (0.32 * chunk) / (chunks - 1) : 0;
  const mixed = PASS[kind][term].match(/[0-9a-f]{2}/g).map((hex) => Math.round(parseInt(hex, 16) * (1 - white) + 255 * white));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

function drawTimeline(detail) {
  const step = detail.timeline;
  $("#timeline-none").hidden = !step.none;
  $("#timeline-body").hidden = Boolean(step.none);
  line.passes = [];
  if (step.none) return void ($("#timeline-none").textContent = `Not shown: ${step.none}.`);
  const c = Object.fromEntries(["rank", "backward", "chunk", "micro_batch", "start"].map((key) => [key, column(step[key])]));
  const data = { left: [], right: [], bottom: [], top: [], color: [], i: [], term: [] };
  const part = (rank, left, width, paint, i, term) => {
    const cell = { left, right: left + width, bottom: rank + 0.4, top: rank - 0.4, color: paint, i, term };
    for (const key of Object.keys(data)) data[key].push(cell[key]);
    return left + width;
  };
  for (let i = 0; i < c.start.length; i++) {
    const kind = c.backward[i] ? "backward" : "forward";
    const parts = step.passes[kind][c.rank[i]];
    let at = c.start[i];
    for (const [term, width] of Object.entries(parts)) at = part(c.rank[i], at, width, paintOf(kind, term, c.chunk[i], detail.degrees.vp), i, term);
    line.passes.push({ rank: c.rank[i], kind, chunk: c.chunk[i], micro: c.micro_batch[i], start: c.start[i], end: at });
  }
  for (const [rank, start, end, count] of step.middle) part(rank, start, end - start, "#9aa1a9", -1, `${whole(count)} more passes`);
  for (let rank = 0; rank < step.bubble_s.length; rank++) {
    let at = step.span_s;
    for (const [term, width] of Object.entries(step.after)) if (width > 0) at = part(rank, at, width, TERMS[term][1], -1, term);
  }
  line.step = step;
  const ranks = step.bubble_s.length;
  const every = Math.ceil(ranks / 24);
  setRows("timeline", step.bubble_s.map((_, rank) => (rank % every ? "" : String(rank))), Math.min(640, 110 + Math.max(9, 30 - ranks) * ranks));
  model("timeline_data").data = data;
  model("frames").data = {
    left: line.passes.map((p) => p.start), right: line.passes.map((p) => p.end),
    bottom: line.passes.map((p) => p.rank + 0.4), top: line.passes.map((p) => p.rank - 0.4),
  };
  setRange("timeline_x", 0, step.step_s);
  if (line.passes.length > 160 * ranks) model("timeline_x").end = Math.min(step.step_s, firstRound());
  sayTimeline(detail, step);
  if (document.documentElement.dataset.ready) numberPasses();
}

function sayTimeline(detail, step) {
  const { pp, vp } = detail.degrees;
  const mean = step.bubble_s.reduce((a, b) => a + b, 0) / step.bubble_s.length;
  const least = Math.max(0, Math.min(...step.bubble_s));
  const kind = pp === 1 ? "One pipeline rank: no bubble." : `${vp > 1 ? `Interleaved 1F1B, ${vp} chunks per rank` : "1F1B"}; the busiest rank is idle for ${seconds(least)}, ${percent(least / step.span_s)} of the schedule, all ranks on average for ${seconds(mean)}, ${percent(mean / step.span_s)}.`;
  const apart = step.step_s / step.plan_s - 1;
  const same = Math.abs(apart) < 5e-5 ? "as planned" : `the closed formula of the plan gives ${seconds(step.plan_s)}, ${percent(Math.abs(apart), 2)} ${apart < 0 ? "more" : "less"}`;
  $("#timeline-says").textContent = `${kind} The step takes ${seconds(step.step_s)}: ${same}.`;
  const used = new Map([["forward: compute", PASS.forward.compute], ["backward: compute", PASS.backward.compute]]);
  const of = (kind, term) => step.passes[kind].some((parts) => parts[term] > 0);
  if (of("backward", "recompute")) used.set("backward: recomputation", PASS.backward.recompute);
  for (const [term, [label, paint]] of Object.entries(TERMS)) {
    const exposed = ["tp", "cp", "ep", "pp_p2p"].includes(term) || (term === "dp" && !step.after.dp);
    if (exposed && (of("forward", term) || of("backward", term))) used.set(`exposed: ${label}`, paint);
  }
  for (const [term, width] of Object.entries(step.after)) if (width > 0) used.set(`after: ${TERMS[term][0]}`, TERMS[term][1]);
  if (step.middle.length) used.set("more passes of the same kind", "#9aa1a9");
  legend("#timeline-legend", [...used]);
  setTable("timeline", ["pipeline rank", "forward pass of a micro-batch through a chunk", "backward pass", "waiting (bubble)", "share of the schedule"], () =>
    step.bubble_s.map((idle, rank) => {
      const sum = (kind) => Object.values(step.passes[kind][rank]).reduce((a, b) => a + b, 0);
      return [String(rank), seconds(sum("forward")), seconds(sum("backward")), seconds(Math.max(0, idle)), percent(Math.max(0, idle) / step.span_s)];
    }));
}

// Show micro-batch numbers in passes that are wide enough.
function numberPasses() {
  if (!line.passes.length) return;
  const range = model("timeline_x");
  const pixels = (model("timeline").inner_width || 800) / (range.end - range.start);
  const data = { x: [], y: [], text: [] };
  for (const pass of line.passes) {
    const middle = (pass.start + pass.end) / 2;
    if ((pass.end - pass.start) * pixels < 13 || middle < range.start || middle > range.end) continue;
    data.x.push(middle);
    data.y.push(pass.rank);
    data.text.push(String(pass.micro));
  }
  model("numbers").data = data;
  // Frames around thousands of narrow passes would hide them.
  model("frame_lines").visible = (line.passes[0].end - line.passes[0].start) * pixels > 6;
}

function zoomTimeline(factor, shift = 0) {
  const range = model("timeline_x");
  const width = (range.end - range.start) * factor;
  const middle = (range.start + range.end) / 2 + shift * width;
  const start = Math.max(0, Math.min(middle - width / 2, line.step.step_s - width));
  range.setv({ start, end: Math.min(line.step.step_s, start + width) });
}

function setupTimeline() {
  page.onReady.push(numberPasses); // the width of a pass on the screen is known only then
  let waiting = 0;
  model("timeline_x").change.connect(() => {
    clearTimeout(waiting);
    waiting = setTimeout(numberPasses, 60);
  });
  const act = {
    whole: () => model("timeline_x").setv({ start: 0, end: line.step.step_s }),
    first: () => model("timeline_x").setv({ start: 0, end: Math.min(line.step.step_s, firstRound()) }),
    last: () => model("timeline_x").setv({ start: Math.max(0, line.step.step_s - firstRound()), end: line.step.step_s }),
    in: () => zoomTimeline(0.5), out: () => zoomTimeline(2),
    left: () => zoomTimeline(1, -0.5), right: () => zoomTimeline(1, 0.5),
  };
  for (const button of document.querySelectorAll("[data-timeline]")) button.addEventListener("click", () => act[button.dataset.timeline]());
  onHover("timeline_data", (k) => {
    const { i, term, left, right } = model("timeline_data").data;
    const label = TERMS[term[k]]?.[0] ?? term[k];
    const pass = line.passes[i[k]];
    if (!pass) return { title: label, lines: [["time", seconds(right[k] - left[k])], ["start", seconds(left[k])]] };
    const lines = [["", label], ["time", seconds(right[k] - left[k])], ["entire pass", `${seconds(pass.end - pass.start)}, starts at ${seconds(pass.start)}`], ["chunk", String(pass.chunk)], ["pipeline rank", String(pass.rank)]];
    return { title: `${pass.kind} of micro-batch ${pass.micro}`, lines };
  });
}

// The time until the first backward pass of rank 0 has ended, when the pipeline is full.
function firstRound() {
  const back = line.passes.find((pass) => pass.rank === 0 && pass.kind === "backward");
  return back ? back.end * 1.15 : line.step.step_s;
}

function restyleTimeline() {
  model("frame_lines").glyph.line_color = { value: color("card") };
}
