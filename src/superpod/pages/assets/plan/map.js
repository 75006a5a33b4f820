"use strict";
// All legal layouts: step time against memory.

const map = { columns: {}, shown: null, by: "tp" };
const RAMP = ["#7a55b8", "#5a6fc0", "#3f86c0", "#2f97ae", "#21a091", "#32ad7b", "#55b95f", "#85c34a", "#b5c23a", "#d9b92e", "#e79a2b", "#d9702c", "#c24a35"];
const HUES = ["#4477aa", "#ee7733", "#228833", "#aa3377", "#ccaa22", "#66ccee", "#bb5566", "#8888cc", "#88aa55", "#aa7744", "#44aa99", "#dd77aa", "#777777"];
const NUMERIC = ["tp", "pp", "vp", "cp", "ep", "etp", "mbs"];

const joinParts = (parts, between) => parts.filter(Boolean).join(between);
const word = (key, i, which) => page.data.map.words[key][map.columns[key][i]][which];

function pointTitle(i) {
  const c = map.columns;
  const degrees = ["tp", "pp", "vp", "cp", "ep", "etp"].filter((key) => c[key][i] > 1 && !(key === "etp" && c.etp[i] === c.tp[i]));
  const names = [...degrees.map((key) => `${key.toUpperCase()}${c[key][i]}`), ...(c.sp[i] ? ["SP"] : [])];
  return joinParts([names.join(" ") || "DP only", `mbs ${c.mbs[i]}`, ...["split", "recompute", "sharding"].map((key) => word(key, i, 0))], ", ");
}

function pointOption(i) {
  const c = map.columns;
  const degrees = ["tp", "pp", "vp", "cp", "ep"].filter((key) => c[key][i] > 1).map((key) => `${key}=${c[key][i]}`);
  if (c.etp[i] !== c.tp[i]) degrees.push(`etp=${c.etp[i]}`);
  if (c.sp[i]) degrees.push("sp");
  if (c.mbs[i] > 1) degrees.push(`mbs=${c.mbs[i]}`);
  return joinParts([...degrees, ...["split", "recompute", "sharding"].map((key) => word(key, i, 1)), c.tp[i] > 1 && !c.sp[i] ? "sp=false" : ""], ",") || "tp=1";
}

const pointPrecision = (i) => page.data.map.words.precision[map.columns.precision[i]];
const pointFigures = (i) => (key) => (key === "s" ? map.columns.seconds[i] : map.columns[key][i]);

function pointLines(i) {
  const c = map.columns;
  const lines = [
    ["step time", seconds(c.seconds[i])],
    ["throughput", `${rate(page.data.map.tokens_per_gpu / c.seconds[i])} tokens/s/GPU`],
    ["memory", `${gib(c.gib[i])} of ${gib(page.data.map.limit_gib)} usable`],
  ];
  if (page.data.map.words.precision.length > 1) lines.unshift(["precision", pointPrecision(i)]);
  if (!c.fits[i]) lines.push(["", "does not fit"]);
  return lines;
}

// The distinct values of the column by which points are coloured, with their colours.
function colorKey() {
  const values = [...new Set(map.columns[map.by])].sort((a, b) => a - b);
  const numeric = NUMERIC.includes(map.by);
  const paint = values.map((_, k) =>
    numeric ? RAMP[values.length > 1 ? Math.round((k * (RAMP.length - 1)) / (values.length - 1)) : 3] : HUES[k % HUES.length],
  );
  const names = values.map((value) => {
    if (numeric) return `${map.by.toUpperCase()} ${value}`;
    if (map.by === "fits") return value ? "fits" : "does not fit";
    const named = page.data.map.words[map.by][value];
    return map.by === "precision" ? named : named[0] || { split: "even stages", recompute: "no recomputation", sharding: "zero1" }[map.by];
  });
  return { values, paint, names };
}

function drawMap() {
  const { columns } = map;
  const { values, paint, names } = colorKey();
  const place = new Map(values.map((value, k) => [value, k]));
  const count = columns.gib.length;
  const only = $("#map-fits").checked;
  const filter = parseFilter($("#filter").value);
  const shown = [];
  for (let i = 0; i < count; i++) {
    if (only && !columns.fits[i]) continue;
    if (filter.any && !filter.test(pointFigures(i), () => pointTitle(i))) continue;
    shown.push(i);
  }
  map.shown = shown;
  const take = (from, make = Float32Array) => make.from(shown, (i) => from[i]);
  const mapper = model("map_colors");
  mapper.setv({ palette: paint, low: -0.5, high: paint.length - 0.5 });
  const source = model("map_data");
  source.selected.indices = [];
  source.data = {
    gib: take(columns.gib), seconds: take(columns.seconds),
    color: Float32Array.from(shown, (i) => place.get(columns[map.by][i])),
  };
  legend("#map-legend", names.map((name, k) => [name, paint[k]]));
  $("#map-count").textContent =
    `${whole(shown.length)} of ${whole(count)} points` +
    (count < page.data.map.all ? `, for ${whole(page.data.map.all)} layouts: of overlapping points, only the fastest is shown` : "");
  setTable("map", ["layout", "step time", "GiB reserved", "fits"], () =>
    [...shown].sort((a, b) => columns.seconds[a] - columns.seconds[b]).slice(0, 200)
      .map((i) => [pointTitle(i), seconds(columns.seconds[i]), digits(columns.gib[i], 1), columns.fits[i] ? "yes" : "no"]));
}

function ringAt(x, y) {
  model("chosen").data = { gib: [x], seconds: [y] };
}

function wholeMap() {
  const { columns } = map;
  const limit = page.data.map.limit_gib;
  let [least, most, fast] = [Infinity, 0, Infinity];
  for (let i = 0; i < columns.gib.length; i++) {
    least = Math.min(least, columns.gib[i]);
    most = Math.max(most, columns.gib[i]);
    fast = Math.min(fast, columns.seconds[i]);
  }
  setRange("map_x", least * 0.85, Math.max(limit * 1.1, Math.min(most * 1.1, limit * 8)));
  setRange("map_y", fast * 0.9, fast * 7);
}

page.setups.push((data) => {
  if (!data.map) return;
  for (const [key, packed] of Object.entries(data.map.columns)) map.columns[key] = column(packed);
  const several = (key) => new Set(map.columns[key]).size > 1;
  const select = $("#map-by");
  for (const option of [...select.options]) if (!several(option.value)) option.remove();
  map.by = select.value;
  model("frontier").data = data.map.frontier;
  model("map_limit").location = data.map.limit_gib;
  model("map_words").setv({ x: data.map.limit_gib, text: `${gib(data.map.limit_gib)} usable` });
  wholeMap();
  drawMap();
  select.addEventListener("change", () => { map.by = select.value; drawMap(); });
  $("#map-fits").addEventListener("change", drawMap);
  onHover("map_data", (k) => ({ title: pointTitle(map.shown[k]), lines: pointLines(map.shown[k]) }));
  const { selected } = model("map_data");
  selected.change.connect(() => {
    const k = selected.indices[0];
    if (k !== undefined) choosePoint(map.shown[k]);
  });
  page.onTheme.push(() => {
    model("edge").glyph.line_color = { value: color("ink") };
    model("ring").glyph.line_color = { value: color("mark") };
    model("map_limit").line_color = color("mark");
    model("map_words").text_color = color("mark");
  });
});
