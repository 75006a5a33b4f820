"""The page of a run report in Chromium shows the values of the run's files."""

import json

import pytest

from tests.cli.planning.small_plans import printed
from tests.reports.report_cases import BRIDGE, KILLED_TWICE, MEGATRON, copied, lines_of, made_up

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report pages")


@pytest.fixture(scope="module")
def killed(folder, recipes_cli):
    """Write the page of a run of three attempts; returns its path and the JSON of its figures."""
    run = copied(KILLED_TWICE, folder)
    printed(recipes_cli, "report", run.path, "--html", "one.html", cwd=folder)
    return folder / "one.html", run, json.loads(printed(recipes_cli, "report", run.path, "--json"))["figures"]


def table_of(page, name):
    """Open the table of a figure and return its cells."""
    page.locator(f"#fig-{name} details summary").click()
    page.locator(f"#fig-{name} tbody tr").first.wait_for()
    rows = page.locator(f"#fig-{name} tbody tr")
    return [rows.nth(i).locator("td").all_inner_texts() for i in range(rows.count())]


def test_a_run_shows_the_values_of_its_files(killed, visit):
    path, run, figures = killed
    assert path.stat().st_size < 5e6
    losses = {line["step"]: line["loss"] for line in lines_of(run)}
    with visit(path) as page:
        assert run.path.name in page.inner_text("h1")
        assert f"{figures['goodput']:.1%}" in page.inner_text(".facts")
        assert page.inner_text("#next").startswith("Next:")
        data = page.evaluate("model('loss_0').data")
        assert [*data["x"]] == sorted(losses)
        assert [*data["y"]] == pytest.approx([losses[step] for step in sorted(losses)])
        rows = table_of(page, "loss")
        assert [row[0] for row in rows] == [str(step) for step in sorted(losses)]
        assert float(rows[-1][1]) == pytest.approx(losses[60], abs=1e-3)
        times = {row[1]: float(row[2]) for row in table_of(page, "time")}
        assert times["repeated steps"] == pytest.approx(figures["time_s"]["repeated steps"], rel=1e-3)
        assert sum(times.values()) == pytest.approx(figures["wall_s"], rel=1e-3)
        assert page.locator("#plan").count() == 0  # a rehearsal is held against no plan


def test_hover_over_a_curve_shows_step_and_value(killed, visit):
    path, run, _ = killed
    loss = next(line["loss"] for line in lines_of(run) if line["step"] == 30 and line["attempt"] == "002")
    with visit(path) as page:
        page.locator("#fig-loss").scroll_into_view_if_needed()
        x, y = page.evaluate(
            """([step, loss]) => {
                const view = [...Bokeh.index].find((one) => one.model.name === "loss");
                const box = view.el.getBoundingClientRect();
                return [box.left + view.frame.x_scale.compute(step), box.top + view.frame.y_scale.compute(loss)];
            }""",
            [30, loss],
        )
        page.mouse.move(x - 3, y + 1)
        page.mouse.move(x, y)
        page.wait_for_selector("#tip:not([hidden])")
        assert "30" in page.inner_text("#tip")
        assert f"{loss:.4f}" in page.inner_text("#tip")
        page.mouse.move(2, 2)
        page.wait_for_selector("#tip[hidden]", state="attached")


def test_several_runs_share_a_chart_and_can_be_hidden(folder, visit, recipes_cli):
    run = copied("tiny_llama3_fp32/20261123T071212Z-3df4ca", folder)
    words = (run.path, MEGATRON, BRIDGE, "--gpu", "h100", "--compare", "--html", "three.html")
    printed(recipes_cli, "report", *words, cwd=folder)
    with visit(folder / "three.html", width=400, color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.locator("html").get_attribute("data-theme") == "dark"
        assert page.locator("#runs tbody tr").count() == 3
        lines = "[0, 1, 2].map((i) => model(`loss_${i}_line`).visible)"
        assert page.evaluate(lines) == [True, True, True]
        button = page.locator("#run-buttons button", has_text=BRIDGE.name)
        button.focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-pressed") == "false"
        assert page.evaluate(lines) == [True, True, False]
        drawn = "Bokeh.documents[0].roots().every((f) => f.inner_width > 0 && f.inner_height > 0)"
        assert page.evaluate(drawn)


def test_a_run_on_gpus_is_compared_with_its_plan(folder, visit, recipes_cli):
    run = made_up(folder, slower=1.2)
    printed(recipes_cli, "report", run.path, "--html", "gpu.html", cwd=folder)
    planned = json.loads(printed(recipes_cli, "report", run.path, "--json"))["figures"]["planned"]
    with visit(folder / "gpu.html") as page:
        rows = table_of(page, "terms")
        terms = {row[1]: float(row[2]) for row in rows if row[0] == "planned"}
        assert sum(terms.values()) == pytest.approx(planned["step_s"], rel=1e-3)
        assert float(rows[-1][2]) == pytest.approx(planned["step_s"] * 1.2, rel=1e-3)
        assert page.locator("#stages tbody tr").nth(0).locator("td").all_inner_texts()[-1] == "52.00"


def test_names_are_escaped(folder, visit, recipes_cli):
    log = folder / "<img src=x onerror=alert(1)>'\"&lt;.log"
    log.write_text(BRIDGE.read_text())
    printed(recipes_cli, "report", log, "--html", "odd.html", cwd=folder)
    with visit(folder / "odd.html") as page:
        assert "onerror=alert(1)>" in page.inner_text("h1")
        assert "onerror=alert(1)>" in page.inner_text("#command")
        assert page.locator("img").count() == 0
