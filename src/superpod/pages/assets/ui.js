"use strict";
// The controls of the planner, and live runs. The address of a window contains what it shows, so that it can be reloaded
// and two windows can show different things. Text of runs is inserted as textContent.

const LOOK_MS = 2000;
const live = { run: new URLSearchParams(location.search).get("run") ?? "", stamp: "", first: true, failures: 0 };
const fields = () => [...$("#controls").elements].filter((one) => one.name);

function remember() {
  const query = new URLSearchParams();
  for (const field of fields()) if (field.value !== (page.data.defaults[field.name] ?? "")) query.set(field.name, field.value);
  if (live.run) query.set("run", live.run);
  const text = query.toString();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
}

// ---- the planner
function showPlan() {
  const query = new URLSearchParams(fields().map((field) => [field.name, field.value]));
  $("#plan-says").textContent = "planning ...";
  remember();
  $("#plan").contentWindow.location.replace(`plan?${query}`); // no entry in the history of the window
}

function setupPlanner() {
  const given = new URLSearchParams(location.search);
  for (const field of fields()) {
    const wanted = given.get(field.name) ?? page.data.defaults[field.name] ?? "";
    field.value = wanted;
    if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = page.data.defaults[field.name];
    field.addEventListener("change", () => $("#controls").reportValidity() && showPlan());
  }
  $("#controls").addEventListener("submit", (event) => {
    event.preventDefault();
    showPlan();
  });
  $("#plan").addEventListener("load", () => {
    const shown = $("#plan").contentDocument;
    if (!shown || shown.location.href === "about:blank") return;
    const refused = $("#refused", shown);
    $("#plan-says").textContent = refused ? "not planned: see below" : "";
    if (!refused) followTheme();
  });
  showPlan();
}

// The plan is a separate page with its own theme, which follows the button of this page.
function followTheme() {
  const shown = $("#plan").contentDocument;
  const button = shown && $("#theme", shown);
  if (!button) return;
  button.hidden = true;
  if (!shown.documentElement.dataset.ready) setTimeout(followTheme, 200);
  else if (shown.documentElement.dataset.theme !== theme()) button.click();
}

// ---- runs
const span = (x) => (x === null ? "-" : x >= 7200 ? `${digits(x / 3600, 1)} h` : x >= 120 ? `${whole(x / 60)} min` : `${whole(x)} s`);
const or = (x, show) => (x === null ? "-" : show(x));

function runRow(run) {
  const button = element("button", run.id);
  button.type = "button";
  button.setAttribute("aria-pressed", String(run.id === live.run));
  button.addEventListener("click", () => chooseRun(run.id));
  const state = element("td", run.state);
  if (["failed", "stalled", "unreadable"].includes(run.state)) state.className = "bad";
  const figures = [
    run.max_steps ? `${whole(run.step)} of ${whole(run.max_steps)}` : whole(run.step), or(run.loss, (x) => digits(x, 4)),
    or(run.tokens_per_s, rate), or(run.mfu, percent), span(run.eta_s), run.attempt || "-",
  ];
  const row = element("tr", null, element("td", null, button), state, ...figures.map((text) => element("td", text)));
  if (run.id === live.run) row.dataset.chosen = "";
  return row;
}

function chooseRun(id) {
  Object.assign(live, { run: id, stamp: "", first: true });
  remember();
  for (const row of document.querySelectorAll("#runs-table tbody tr")) {
    const own = $("button", row).textContent === id;
    row.toggleAttribute("data-chosen", own);
    $("button", row).setAttribute("aria-pressed", String(own));
  }
  look();
}

function showRuns({ runs, problem, hint }) {
  $("#runs-says").textContent = problem ? `${problem}${hint ? `; ${hint}` : ""}` : runs.length === 1 ? "1 run" : `${whole(runs.length)} runs`;
  if (problem) return;
  const body = $("#runs-table tbody");
  const focused = document.activeElement?.closest?.("#runs-table") ? document.activeElement.textContent : null;
  const state = JSON.stringify(runs);
  if (body.dataset.state === state) return;
  body.dataset.state = state;
  body.replaceChildren(...runs.map(runRow));
  if (focused) [...body.querySelectorAll("button")].find((one) => one.textContent === focused)?.focus();
  if (!live.run && runs.length) {
    const going = runs.filter((run) => ["running", "saving", "stalled"].includes(run.state));
    chooseRun((going.length ? going : runs).at(-1).id);
  }
}

function showRun(run) {
  $("#run").hidden = false;
  $("#run-title").textContent = live.run;
  if (run.problem) {
    $("#run-says").replaceChildren(element("li", run.problem));
    return;
  }
  $("#run-says").replaceChildren(...run.says.map((text) => element("li", text)), ...run.ranks.map((text) => element("li", text)));
  const lines = $("#lines");
  const atEnd = live.first || lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 30;
  const text = run.lines.join("\n");
  if (lines.textContent !== text) lines.textContent = text || "no lines yet";
  if (atEnd) lines.scrollTop = lines.scrollHeight;
  live.stamp = run.stamp;
  live.first = false;
  if (run.rate_unit) setUnit("rate", run.rate_unit);
  if (run.curves) for (const [key] of page.data.curves) drawCurve(key, run.curves[key]);
}

// The ranks of a rehearsal run on CPUs, so the unit is not per GPU.
function setUnit(key, unit) {
  page.data.curves.find(([known]) => known === key)[2] = unit;
  $(`#unit-${key}`).textContent = unit;
}

function ends(values) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return low < high ? [low, high] : [low - Math.max(1e-6, Math.abs(low) * 0.01), high + Math.max(1e-6, Math.abs(high) * 0.01)];
}

function drawCurve(key, { x, y }) {
  const name = `live_${key}`;
  model(`${name}_data`).data = { x, y };
  const [, , unit] = page.data.curves.find(([known]) => known === key);
  $(`#newest-${key}`).textContent = x.length ? `${digits(y.at(-1), key === "loss" ? 4 : 0)} at step ${whole(x.at(-1))}` : "no data yet";
  setTable(name, ["step", unit], () => x.map((step, i) => [whole(step), digits(y[i], key === "loss" ? 4 : 1)]).slice(-300).reverse());
  if (!x.length) return;
  const [left, right] = x.length > 1 ? [x[0], x.at(-1)] : [x[0] - 1, x[0] + 1];
  const [low, high] = ends(y);
  setRange(`${name}_x`, left, right);
  setRange(`${name}_y`, low - (high - low) * 0.05, high + (high - low) * 0.05);
}

async function answer(place) {
  const response = await fetch(place, { cache: "no-store", credentials: "omit" });
  if (!response.ok) throw new Error(`${response.status}`);
  return response.json();
}

async function look() {
  clearTimeout(live.timer);
  const id = live.run;
  try {
    const runs = await answer("runs.json");
    showRuns(runs);
    if (live.run && live.run === id) {
      const run = await answer(`run.json?${new URLSearchParams({ run: id, stamp: live.stamp })}`);
      if (live.run === id) showRun(run);
    }
    live.failures = 0;
  } catch {
    live.failures += 1;
    if (live.failures > 1) $("#runs-says").textContent = "`recipes ui` does not respond: has it been stopped?";
  }
  clearTimeout(live.timer);
  live.timer = setTimeout(look, LOOK_MS * Math.min(15, 1 + live.failures));
}

page.setups.push((data) => {
  for (const curve of data.curves) {
    const [key, title] = curve;
    onHover(`live_${key}_data`, (i) => {
      const { x, y } = model(`live_${key}_data`).data;
      return { title, lines: [["step", whole(x[i])], [curve[2], digits(y[i], 4)]] };
    });
  }
  page.onTheme.push(() => {
    for (const [key] of data.curves) model(`live_${key}_line`).glyph.line_color = { value: color("line") };
    followTheme();
  });
});
page.onReady.push(setupPlanner, look);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(live.timer) : look()));
