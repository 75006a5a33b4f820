"use strict";
// The position of each GPU in the parallel groups.

const ranks = { about: null, cells: [], by: "pp", chosen: null };
const MAX_DRAWN = 65536;
const DENSE = ["tp", "cp", "dp", "pp"];
const NAMES = { tp: "tensor", cp: "context", dp: "data", pp: "pipeline", etp: "expert tensor", ep: "expert", edp: "expert data" };

const coordinate = (rank, [stride, size]) => Math.floor(rank / stride) % size;
const gridOf = (name) => (DENSE.includes(name) ? DENSE : ["etp", "ep", "edp", "pp"]);

// Ranks in the same group: all coordinates of the grid are equal except one.
function peersOf(rank, name) {
  const { grid, gpus } = ranks.about;
  const names = gridOf(name).filter((other) => grid[other] && other !== name);
  const base = names.reduce((sum, other) => sum + coordinate(rank, grid[other]) * grid[other][0], 0);
  const [stride, size] = grid[name];
  return Array.from({ length: size }, (_, k) => base + k * stride).filter((peer) => peer < gpus);
}

const paintOfRank = (k, size) => (size <= HUES.length ? HUES[k] : RAMP[Math.round((k * (RAMP.length - 1)) / (size - 1))]);

function place(count) {
  const { node, domain } = ranks.about;
  const nodes = Math.ceil(count / node);
  const inDomain = Math.max(1, Math.round(domain / node));
  const wide = inDomain > 1 ? inDomain : 2 ** Math.round(Math.log2(Math.sqrt(nodes * 0.9)));
  const across = Math.max(1, Math.min(nodes, wide, innerWidth < 700 ? 4 : 64));
  const box = (rank) => {
    const at = Math.floor(rank / node);
    const x = (at % across) * (node + 1) + (rank % node);
    const y = Math.floor(at / across) * 1.35;
    return { left: x + 0.06, right: x + 0.94, top: y + 0.06, bottom: y + 0.94 };
  };
  return { nodes, across, box, width: across * (node + 1) - 1, rows: Math.ceil(nodes / across) };
}

const columnsOf = (boxes) => Object.fromEntries(["left", "right", "bottom", "top"].map((key) => [key, boxes.map((box) => box[key])]));
const around = (boxes, margin) => ({
  left: Math.min(...boxes.map((b) => b.left)) - margin, right: Math.max(...boxes.map((b) => b.right)) + margin,
  top: Math.min(...boxes.map((b) => b.top)) - margin, bottom: Math.max(...boxes.map((b) => b.bottom)) + margin,
});

function drawRanks(detail) {
  ranks.about = detail.ranks;
  ranks.chosen = null;
  const { grid, gpus, node, domain } = ranks.about;
  const select = $("#ranks-by");
  const names = Object.keys(grid).filter((name) => grid[name][1] > 1);
  const choices = names.length ? names : ["dp"];
  if (!choices.includes(ranks.by)) ranks.by = ["pp", "tp", "cp", "ep", "dp"].find((name) => choices.includes(name));
  select.replaceChildren(...choices.map((name) => Object.assign(element("option", `${NAMES[name]} parallelism (${name.toUpperCase()} ${grid[name][1]})`), { value: name, selected: name === ranks.by })));
  const count = Math.min(gpus, MAX_DRAWN);
  const plan = place(count);
  ranks.cells = Array.from({ length: count }, (_, rank) => plan.box(rank));
  const nodes = [];
  for (let start = 0; start < count; start += node) nodes.push(around(ranks.cells.slice(start, start + node), 0.06));
  model("nodes").data = columnsOf(domain === node ? [] : nodes);
  const thin = nodes.length > 128 ? 0.3 : 1.3;
  model("domains_lines").glyph.line_width = { value: thin };
  const domains = [];
  const [step, own] = [Math.max(1, Math.round(domain / node)), Math.max(1, domain)];
  if (domain > 1 && step * node === own) for (let k = 0; k < nodes.length; k += step) domains.push(around(nodes.slice(k, k + step), 0.1));
  model("domains").data = columnsOf(domains);
  setRange("ranks_x", -0.6, plan.width + 0.6);
  setRange("ranks_y", plan.rows * 1.35 + 0.1, -0.4);
  model("ranks").height = Math.max(120, Math.min(620, 60 + plan.rows * Math.min(34, (900 / plan.width) * 1.5 + 4)));
  $("#ranks-says").textContent =
    `${whole(gpus)} GPUs in ${whole(Math.ceil(gpus / node))} nodes of ${node}` +
    (domain > 1 ? `; NVLink connects ${whole(domain)} (bold frame)` : "; no NVLink") +
    (count < gpus ? `; the first ${whole(count)} are shown` : "") + ". Click a GPU to see its group.";
  paintRanks();
}

function paintRanks() {
  const { grid } = ranks.about;
  const { by, cells, chosen } = ranks;
  const size = grid[by][1];
  const of = cells.map((_, rank) => coordinate(rank, grid[by]));
  const source = model("gpus");
  source.selected.indices = [];
  source.data = { ...columnsOf(cells), color: of.map((k) => paintOfRank(k, size)) };
  const wide = cells.length <= 512 ? cells : [];
  model("gpu_words").data = { x: wide.map((b) => (b.left + b.right) / 2), y: wide.map((b) => (b.top + b.bottom) / 2), text: wide.map((_, rank) => String(of[rank])) };
  const peers = chosen === null ? [] : peersOf(chosen, by).filter((peer) => peer < cells.length);
  model("peers").data = columnsOf(peers.map((peer) => around([cells[peer]], 0.02)));
  if (chosen !== null) {
    $("#ranks-says").textContent = `GPU ${chosen}: ${NAMES[by]} group of ${peers.length}: ${peers.slice(0, 16).join(", ")}${peers.length > 16 ? ", ..." : ""}.`;
  }
  const shown = size <= HUES.length ? Array.from({ length: size }, (_, k) => k) : [0, Math.floor(size / 4), Math.floor(size / 2), Math.floor((3 * size) / 4), size - 1];
  legend("#ranks-legend", shown.map((k) => [`${by} ${k}`, paintOfRank(k, size)]));
  setTable("ranks", ["GPU", "node", ...Object.keys(grid)], () => cells.slice(0, 512).map((_, rank) => [String(rank), String(Math.floor(rank / ranks.about.node)), ...Object.values(grid).map((dimension) => String(coordinate(rank, dimension)))]));
}

function setupRanks() {
  $("#ranks-by").addEventListener("change", (event) => {
    ranks.by = event.target.value;
    paintRanks();
  });
  const { selected } = model("gpus");
  selected.change.connect(() => {
    const rank = selected.indices[0];
    if (rank === undefined) return;
    ranks.chosen = rank;
    paintRanks();
  });
  onHover("gpus", (rank) => {
    const { grid, node } = ranks.about;
    const lines = [["node", `${Math.floor(rank / node)}, local GPU ${rank % node}`]];
    for (const [name, dimension] of Object.entries(grid)) if (dimension[1] > 1) lines.push([name, `${coordinate(rank, dimension)} of ${dimension[1]}`]);
    return { title: `GPU ${rank}`, lines };
  });
}

function restyleRanks() {
  model("nodes_lines").glyph.line_color = { value: color("muted") };
  model("domains_lines").glyph.line_color = { value: color("ink") };
  model("peers_lines").glyph.line_color = { value: color("mark") };
}
