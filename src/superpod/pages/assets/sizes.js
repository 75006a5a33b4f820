"use strict";
// Throughput against size: a curve of the best layouts for a fixed batch size, and one for a growing batch size.

function drawSizes(name, value, unit) {
  const colors = { strong: color("line"), weak: color("mark") };
  const all = page.data.points.filter((point) => point.seconds !== null);
  const sizes = [...new Set(all.map((point) => point.gpus))];
  setTicks(`${name}_ticks`, sizes, sizes.map(short));
  setRange(`${name}_x`, sizes[0] / 1.25, sizes.at(-1) * 1.25);
  setRange(`${name}_y`, 0, Math.max(...all.map(value)) * 1.12);
  model(name).left[0].axis_label = unit;
  model(name).below[0].axis_label = "GPUs";
  for (const kind of ["strong", "weak"]) {
    const points = all.filter((point) => point.kind === kind);
    const [x, y] = [points.map((point) => point.gpus), points.map(value)];
    model(`${name}_${kind}`).data = { x, y };
    model(`${name}_${kind}_points`).data = { x, y, fill: x.map(() => colors[kind]), edge: x.map(() => colors[kind]) };
    model(`${name}_${kind}_line`).glyph.line_color = { value: colors[kind] };
  }
  legend(`#${name}-legend`, [["strong scaling: fixed global batch size", colors.strong], ["weak scaling: fixed batch size per GPU", colors.weak]]);
}

const drawAllSizes = () => {
  drawSizes("sizes_rate", (point) => point.tokens_per_s / point.gpus, "tokens/s/GPU");
  drawSizes("sizes_efficiency", (point) => 100 * point.efficiency, "% of the smallest number of GPUs");
};

page.setups.push((data) => {
  if (!data.points) return;
  for (const name of data.figures) {
    for (const kind of ["strong", "weak"]) {
      onHover(`${name}_${kind}_points`, (i) => {
        const point = data.points.filter((one) => one.kind === kind && one.seconds !== null)[i];
        const lines = [["layout", point.title], ["global batch size", whole(point.gbs)], ["step time", seconds(point.seconds)], ["throughput", `${rate(point.tokens_per_s / point.gpus)} tokens/s/GPU`], ["efficiency", percent(point.efficiency)]];
        return { title: `${whole(point.gpus)} GPUs, ${kind} scaling`, lines };
      });
    }
  }
  page.onTheme.push(drawAllSizes);
});
