"use strict";
// The table of the best layouts: sorting by any column, filtering, selection.

const table = { rows: [], chosen: 0 };
const rowFigures = (row) => (key) => ({ ...row.degrees, s: row.seconds, gib: row.gib })[key];

function sortTable(head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of $("#best").tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const at = head.cellIndex;
  const value = (row) => {
    const { sort, textContent } = Object.assign(row.cells[at], { sort: row.cells[at].dataset.value });
    return sort === undefined ? textContent : Number(sort);
  };
  const body = $("#best").tBodies[0];
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return (down ? -order : order) || a.dataset.i - b.dataset.i;
  });
  body.append(...rows);
}

function filterTable() {
  const filter = parseFilter($("#filter").value);
  $("#filter").setAttribute("aria-invalid", filter.wrong ? "true" : "false");
  if (filter.wrong) return void ($("#filter-count").textContent = filter.wrong);
  let shown = 0;
  for (const tr of $("#best").tBodies[0].rows) {
    const row = table.rows[tr.dataset.i];
    tr.hidden = !filter.test(rowFigures(row), () => `${row.title} ${row.precision}`);
    shown += !tr.hidden;
  }
  $("#filter-count").textContent = `${shown} of ${table.rows.length} rows`;
  drawMap();
}

function chooseRow(i, { scroll = true } = {}) {
  table.chosen = i;
  const row = table.rows[i];
  for (const tr of $("#best").tBodies[0].rows) {
    tr.toggleAttribute("data-chosen", Number(tr.dataset.i) === i);
    $("button", tr).setAttribute("aria-pressed", Number(tr.dataset.i) === i);
  }
  ringAt(row.gib, row.seconds);
  showLayout(row, page.data.layouts[i] ?? null, i + 1);
  if (scroll) $("#layout").scrollIntoView({ behavior: "smooth" });
}

// Select a point of the map: show its row if it is one of the best layouts, else what the map contains about it.
function choosePoint(i) {
  const [option, precision] = [pointOption(i), pointPrecision(i)];
  const row = table.rows.findIndex((one) => one.option === option && one.precision === precision);
  if (row >= 0) return chooseRow(row, { scroll: false });
  for (const tr of $("#best").tBodies[0].rows) {
    tr.removeAttribute("data-chosen");
    $("button", tr).setAttribute("aria-pressed", false);
  }
  const s = map.columns.seconds[i];
  ringAt(map.columns.gib[i], s);
  const about = { title: pointTitle(i), option, precision, seconds: s, gib: map.columns.gib[i], rate: page.data.map.tokens_per_gpu / s };
  showLayout({ ...about, verdict: map.columns.fits[i] ? "ok" : "oom" }, null, 0);
}

page.setups.push((data) => {
  if (!data.rows) return;
  table.rows = data.rows;
  for (const head of $("#best").tHead.rows[0].cells) $("button", head).addEventListener("click", () => sortTable(head));
  $("#best").tBodies[0].addEventListener("click", (event) => {
    const tr = event.target.closest("tr");
    if (tr) chooseRow(Number(tr.dataset.i), { scroll: Boolean(event.target.closest("button")) });
  });
  let waiting = 0;
  $("#filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filterTable, 120);
  });
  if (table.rows.length) chooseRow(0, { scroll: false });
});
