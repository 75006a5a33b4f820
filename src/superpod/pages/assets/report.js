"use strict";
// A run report: tooltips, the numbers as tables, and buttons that hide the curves of a run.

const figureOf = (x) => (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6 ? String(Number(x.toPrecision(5))) : x.toExponential(3));

// A common tooltip for all runs: a source without a hit must not hide the tooltip of another source.
function hoverTogether(sources) {
  const hits = new Map();
  const show = () => {
    const shown = [...hits.entries()].sort(([a], [b]) => a - b).map(([, hit]) => hit);
    if (!shown.length) tip.hidden = true;
    else showTip({ title: `step ${whole(shown[0].step)}`, lines: shown.map((hit) => [hit.name, hit.value]) });
  };
  sources.forEach(([name, describe], order) => {
    const data = model(name);
    data.inspect.connect(() => {
      const k = data.inspected.indices[0];
      if (k === undefined) hits.delete(order);
      else hits.set(order, describe(k));
      show();
    });
  });
}

function setupCurve(field, lines, data) {
  const unit = data.units[field];
  const of = (points, name) => (k) => ({ step: points.x[k], name, value: `${figureOf(points.y[k])} ${unit}` });
  const dots = field === "loss" ? data.dots : [];
  hoverTogether([
    ...lines.map((line, i) => [`${field}_${i}`, of(line, data.names[i])]),
    ...dots.map((points, i) => [`loss_${i}_dots`, of(points, `validation, ${data.names[i]}`)]).filter(([name]) => model(name)),
  ]);
  const titles = ["step", ...data.names, ...(field === "loss" ? data.names.filter((_, i) => data.dots[i].x.length).map((name) => `validation, ${name}`) : [])];
  setTable(field, titles, () => {
    const columns = [...lines, ...(field === "loss" ? data.dots.filter((dots) => dots.x.length) : [])];
    const cells = columns.map((points) => new Map(points.x.map((x, k) => [x, points.y[k]])));
    const steps = [...new Set(columns.flatMap((points) => points.x))].sort((a, b) => a - b);
    return steps.map((step) => [whole(step), ...cells.map((values) => (values.has(step) ? figureOf(values.get(step)) : "-"))]);
  });
}

function setupBars(name, unit) {
  const bars = model(`${name}_data`).data;
  const axis = model(name).left[0];
  const rows = (i) => axis.major_label_overrides.get?.(i) ?? axis.major_label_overrides[i] ?? String(i);
  onHover(`${name}_data`, (k) => ({ title: rows(bars.row[k]), lines: [[bars.label[k], `${figureOf(bars.value[k])} ${unit}`]] }));
  setTable(name, ["", "part", unit], () => Array.from(bars.value, (value, k) => [rows(bars.row[k]), bars.label[k], figureOf(value)]));
}

function setupButtons(data) {
  const place = $("#run-buttons .buttons");
  if (!place || data.names.length < 2) return;
  data.names.forEach((name, i) => {
    const patch = element("i", "\u25cf ");
    patch.style.color = data.colors[i];
    const button = element("button", null, patch, name);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      button.style.opacity = shown ? "" : "0.5";
      for (const field of Object.keys(data.curves)) {
        for (const part of ["line", "point", "marks"]) {
          const glyph = model(`${field}_${i}_${part}`);
          if (glyph) glyph.visible = shown;
        }
      }
    });
    place.append(button);
  });
}

page.setups.push((data) => {
  if (!data.curves || !data.units) return;
  for (const [field, lines] of Object.entries(data.curves)) setupCurve(field, lines, data);
  for (const name of ["time", "terms"]) if (data.figures.includes(name)) setupBars(name, "s");
  setupButtons(data);
});
