"use strict";
// The cost of a token budget: a bar for each GPU type.

const BUDGET = { days: ["days", 1], gpu_hours: ["GPU-hours", 0], energy_mwh: ["MWh", 0], money: ["price", 0] };

page.setups.push((data) => {
  if (!data.budgets) return;
  for (const name of data.figures) {
    const key = name.replace("cost_", "");
    const known = data.budgets.filter((one) => one[key] !== null);
    const columns = ["left", "right", "bottom", "top", "color", "label", "value", "row", "alpha"];
    const rows = known.map((one, row) => ({
      left: 0, right: one[key], bottom: row + 0.4, top: row - 0.4, color: one.fits ? "#4477aa" : "#a9b0b8",
      label: one.name, value: one[key], row, alpha: 1,
    }));
    $(`#fig-${name}`).hidden = !known.length;
    if (!known.length) continue;
    model(`${name}_data`).data = Object.fromEntries(columns.map((column) => [column, rows.map((row) => row[column])]));
    setTicks(`${name}_rows`, rows.map((row) => row.row), rows.map((row) => row.label));
    setRange(`${name}_y`, rows.length - 0.4, -0.6);
    setRange(`${name}_x`, 0, Math.max(...rows.map((row) => row.value)) * 1.05);
    const [unit, decimals] = BUDGET[key];
    model(name).below[0].axis_label = key === "money" ? data.currency || unit : unit;
    model(name).left[0].axis_label = null;
    model(name).height = 70 + 34 * rows.length;
    onHover(`${name}_data`, (i) => {
      const one = known[i];
      const lines = [["layout", one.title], ["throughput", `${rate(one.rate)} tokens/s/GPU`], [unit, digits(one[key], decimals)]];
      return { title: one.name, lines: one.fits ? lines : [...lines, ["", "does not fit"]] };
    });
  }
});
