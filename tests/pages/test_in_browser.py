"""Pages in Chromium: their content and interaction."""

import json
import shlex

import numpy as np
import pytest

from superpod.pages import layout_points, rank_map, step_timeline
from superpod.planner import explain, intervals
from tests.cli.planning.small_plans import SMALL, printed
from tests.pages.planning import job, search

pytestmark = pytest.mark.slow

MODEL = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 1024,'
    '"intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000}'
)


def shown_rows(page):
    return page.locator("#best tbody tr:not([hidden])")


def pixel_of(page, figure, x, y):
    """Return the position of a data point in the window."""
    return page.evaluate(
        """([name, x, y]) => {
            const find = (views) => { for (const v of views) { if (v.model.name === name) return v;
                const inner = find(v.child_views ?? []); if (inner) return inner; } };
            const view = find([...Bokeh.index]) ?? find(Object.values(Bokeh.index));
            const box = view.el.getBoundingClientRect();
            const frame = view.frame.bbox;
            return [box.left + view.frame.x_scale.compute(x), box.top + view.frame.y_scale.compute(y), frame.width];
        }""",
        [figure, x, y],
    )


def test_the_table_can_be_sorted_and_filtered(plan_page, visit):
    path, plan = plan_page
    with visit(path) as page:
        rows = shown_rows(page)
        assert rows.count() == len(plan["layouts"])
        first = rows.nth(0).locator("td").all_inner_texts()
        best = plan["layouts"][0]
        interval = intervals.text(best["step_time_s"], best["step_time_low_s"], best["step_time_high_s"], unit="")
        assert first[2] == interval
        head = page.locator("#best th", has_text="GiB")
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        sizes = [float(text) for text in page.locator("#best tbody tr td:nth-child(6)").all_inner_texts()]
        assert sizes == sorted(sizes)
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        names = page.locator("#best th", has_text="layout")
        names.locator("button").click()
        titles = page.locator("#best tbody tr td:nth-child(2)").all_inner_texts()
        assert titles == sorted(titles, key=str.lower)
        points = page.evaluate("map.shown.length")
        page.fill("#filter", "tp=2 gib<70 sp")
        page.locator("#best tbody tr[hidden]").first.wait_for(state="attached")
        wanted = [
            one for one in plan["layouts"]
            if one["layout"]["tp"] == 2 and one["reserved_gib"] < 70 and one["layout"]["sp"]
        ]  # fmt: skip
        assert 0 < shown_rows(page).count() == len(wanted) < len(plan["layouts"])
        assert 0 < page.evaluate("map.shown.length") < points
        page.fill("#filter", "tp<>4")
        page.locator("#filter[aria-invalid=true]").wait_for()
        assert "is not a comparison" in page.inner_text("#filter-count")


def most_alone(page, layouts):
    """Return the index of the layout in the table with the most isolated point of the map."""
    points = np.array(page.evaluate("[Array.from(map.columns.gib), Array.from(map.columns.seconds)]"))
    wide = np.ptp(points, axis=1, keepdims=True)
    mine = np.array([[layout["reserved_gib"], layout["step_time_s"]] for layout in layouts])
    nearest = [np.sort(np.hypot(*((points - at[:, None]) / wide)))[1] for at in mine]  # the first is the point itself
    return int(np.argmax(nearest))


def test_hover_names_a_layout_and_a_click_shows_it(plan_page, visit):
    path, plan = plan_page
    with visit(path) as page:
        page.locator("#fig-map").scroll_into_view_if_needed()
        place = most_alone(page, plan["layouts"])
        layout = plan["layouts"][place]
        x, y, _ = pixel_of(page, "map", layout["reserved_gib"], layout["step_time_s"])
        page.mouse.move(x - 2, y)
        page.mouse.move(x, y)
        page.wait_for_selector("#tip:not([hidden])")
        title = page.locator("#best tbody tr").nth(place).locator("button").inner_text()
        assert page.inner_text("#tip strong") == title
        assert f"{layout['step_time_s']:.3f} s" in page.inner_text("#tip")
        assert "tokens/s/GPU" in page.inner_text("#tip")
        page.mouse.click(x, y)
        page.locator("#layout-title", has_text=title).wait_for()
        assert page.inner_text("#layout-place") == f"No. {place + 1} in the table"
        assert page.locator("#best tr[data-chosen] button").inner_text() == title
        page.mouse.move(2, 2)
        page.wait_for_selector("#tip[hidden]", state="attached")


def test_names_of_points_equal_the_planners(plan_page, visit):
    """The page composes the names of 14,000 points by itself."""
    path, _ = plan_page
    result = next(iter(search().values()))
    named = {(explain.title(result.layout(i)), layout_points.option(result.layout(i))) for i in range(len(result))}
    with visit(path) as page:
        pairs = page.evaluate("Array.from(map.columns.gib, (_, i) => [pointTitle(i), pointOption(i)])")
    assert len(pairs) > 10_000
    assert {tuple(pair) for pair in pairs} <= named


def test_a_point_without_details_shows_the_command(plan_page, visit):
    path, _ = plan_page
    with visit(path) as page:
        page.evaluate("choosePoint(map.columns.gib.findIndex((_, i) => !map.columns.fits[i]))")
        assert page.locator("#layout-parts").is_hidden()
        assert "does not fit" in page.inner_text("#layout-facts")
        command = page.inner_text("#layout-command")
        assert command.startswith("recipes explain llama3_8b --gpu h100 --gpus 16 --gbs 64 --precision bf16 --layout ")
        page.locator("#best tbody tr").nth(1).locator("button").press("Enter")
        assert page.locator("#layout-parts").is_visible()


def test_colors_legends_and_the_filter_of_fitting_layouts(plan_page, visit):
    path, _ = plan_page
    with visit(path) as page:
        assert page.locator("#map-legend li").all_inner_texts() == ["TP 1", "TP 2", "TP 4", "TP 8"]
        page.select_option("#map-by", "recompute")
        assert "no recomputation" in page.locator("#map-legend li").all_inner_texts()
        every = page.evaluate("model('map_data').data.gib.length")
        page.check("#map-fits")
        limit = page.evaluate("page.data.map.limit_gib")
        shown = page.evaluate("Array.from(model('map_data').data.gib)")
        assert 0 < len(shown) < every
        assert max(shown) <= limit * (1 + 1e-6)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(plan_page, visit, scheme):
    path, _ = plan_page
    other = {"light": "dark", "dark": "light"}[scheme]
    with visit(path, color_scheme=scheme) as page:

        def colours():
            return page.evaluate(
                "[getComputedStyle(document.body).backgroundColor, model('map').background_fill_color]"
            )

        assert page.get_attribute("html", "data-theme") == scheme
        before = colours()
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == other
        after = colours()
        assert before[0] != after[0]
        assert before[1] != after[1]
        page.emulate_media(media="print")
        page.wait_for_selector("html[data-theme=light]", timeout=5000)  # media change with the next frame


def test_a_width_of_400_pixels(plan_page, visit):
    path, _ = plan_page
    with visit(path, width=400) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        wide = page.evaluate(
            "[...document.querySelectorAll('.plot')].map((plot) => plot.getBoundingClientRect().width)"
        )
        assert max(wide) <= 400
        assert page.locator("#best button").first.is_visible()


def test_the_page_works_with_the_keyboard(plan_page, visit):
    path, _ = plan_page
    with visit(path) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        unnamed = page.evaluate(
            """[...document.querySelectorAll('button, select, input, [role=img]')].filter((one) =>
                !(one.getAttribute('aria-label') || one.textContent.trim() || one.closest('label')))
                .filter((one) => !one.closest('.plot')).length"""
        )
        assert unnamed == 0
        page.locator("#best th button").first.focus()
        for _ in range(60):
            if page.evaluate("Boolean(document.activeElement.closest('#best tbody'))"):
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.inner_text("#layout-place") == "No. 2 in the table"
        page.locator("#fig-memory summary").press("Enter")
        page.locator("#fig-memory tbody tr").first.wait_for()  # the page fills it when it is told that it is open


def test_the_timeline_shows_the_simulated_passes(visit, recipes_cli, tmp_path):
    words = ("llama3_8b", "--gpu", "h100", "--gpus", "64", "--gbs", "128", "--layout", "tp=2,pp=4,vp=4,sp")
    printed(recipes_cli, "explain", *words, "--html", "one.html", cwd=tmp_path)
    run = job(tp=2, pp=4, vp=4, sp=True)
    step = step_timeline.simulate_step(run)
    with visit(tmp_path / "one.html") as page:
        drawn = page.evaluate("line.passes.map((p) => [p.kind, p.rank, p.chunk, p.micro, p.start, p.end])")
        key = [(e.kind, e.stage, e.chunk, e.micro_batch) for e in sorted(step.events, key=lambda e: (e.stage, e.start))]
        assert [tuple(one[:4]) for one in drawn] == key
        assert page.evaluate("line.step.step_s") == pytest.approx(step.step_s)
        for one, event in zip(drawn, sorted(step.events, key=lambda e: (e.stage, e.start)), strict=True):
            assert one[4:] == pytest.approx([event.start, event.end], rel=1e-5, abs=1e-5)
        page.locator("#fig-timeline").scroll_into_view_if_needed()
        page.click("[data-timeline=first]")
        before = page.evaluate("model('timeline_x').end")
        page.click("[data-timeline=in]")
        assert page.evaluate("model('timeline_x').end") < before
        page.click("[data-timeline=whole]")
        first = step.events[0]
        x, y, _ = pixel_of(page, "timeline", (first.start + first.end) / 2, 0)
        page.mouse.move(x, y + 3)
        page.mouse.move(x, y)
        page.wait_for_selector("#tip:not([hidden])")
        assert "forward of micro-batch" in page.inner_text("#tip")


def test_the_rank_map_has_the_process_groups(visit, recipes_cli, tmp_path):
    words = ("mixtral_8x7b", "--gpu", "h100", "--gpus", "32", "--gbs", "64", "--layout", "tp=2,pp=2,ep=4,etp=1,sp")
    printed(recipes_cli, "explain", *words, "--html", "one.html", cwd=tmp_path)
    grid = rank_map.rank_grid(job("mixtral_8x7b", 32, 64, tp=2, pp=2, ep=4, etp=1, sp=True))
    with visit(tmp_path / "one.html") as page:
        for names in (rank_map.DENSE, rank_map.EXPERTS[:3]):
            for name in (name for name in names if grid[name].size > 1):
                page.select_option("#ranks-by", name)
                own = rank_map.DENSE if name in rank_map.DENSE else rank_map.EXPERTS
                groups = {tuple(group) for group in rank_map.groups(grid, own, (name,))}
                drawn = page.evaluate(f"ranks.cells.map((_, rank) => peersOf(rank, '{name}'))")
                assert {tuple(sorted(peers)) for peers in drawn} == groups
                assert all(rank in peers for rank, peers in enumerate(drawn))
                colours = page.evaluate("model('gpus').data.color")
                of = [int(grid[name].coordinate(rank)) for rank in range(32)]
                assert len({*zip(of, colours, strict=True)}) == grid[name].size
        page.locator("#fig-ranks").scroll_into_view_if_needed()
        page.select_option("#ranks-by", "ep")
        box = page.evaluate("ranks.cells[9]")
        x, y, _ = pixel_of(page, "ranks", (box["left"] + box["right"]) / 2, (box["top"] + box["bottom"]) / 2)
        page.mouse.click(x, y)
        page.locator("#ranks-says", has_text="GPU 9:").wait_for()
        assert "8, 9, 10, 11" in page.inner_text("#ranks-says")


def test_names_are_escaped(visit, recipes_cli, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>'\"&lt;"
    folder.mkdir()
    (folder / "config.json").write_text(MODEL)
    words = (str(folder), "--gpu", "h100", "--gpus", "8", "--gbs", "32")
    printed(recipes_cli, "plan", *words, "--html", "plan.html", cwd=tmp_path)
    with visit(tmp_path / "plan.html") as page:
        assert "onerror=alert(1)>" in page.inner_text("#command")
        assert page.locator("img").count() == 0
        page.evaluate("choosePoint(map.columns.gib.length - 1)")
        page.evaluate("choosePoint(0)")
        assert "onerror=alert(1)>" in page.inner_text("#layout-command")


@pytest.mark.parametrize(
    "words",
    [
        (
            "memory",
            "llama3_70b",
            "--gpu",
            "h100",
            "--gpus",
            "64",
            "--gbs",
            "128",
            "--layout",
            "tp=4,pp=4,vp=10,cp=2,sp",
        ),
        ("scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,16"),
        ("cost", *SMALL, "--tokens", "1T", "--price", "2", "--currency", "<b>"),
        ("explain", "llama3_8b", "--gpu", "gb200", "--gpus", "144", "--gbs", "288", "--layout", "pp=2"),
    ],
    ids=lambda words: words[0],
)
def test_pages_of_other_verbs_in_the_dark_theme_and_narrow(visit, recipes_cli, tmp_path, words):
    printed(recipes_cli, *words, "--html", "one.html", cwd=tmp_path)
    assert (tmp_path / "one.html").stat().st_size < 5e6
    with visit(tmp_path / "one.html", width=400, color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert shlex.split(page.inner_text("#command"))[:2] == ["recipes", words[0]]
        drawn = "Bokeh.documents[0].roots().filter((f) => f.inner_width > 0 && f.inner_height > 0).length"
        assert page.evaluate(drawn) >= 2


def test_a_plan_without_fitting_layouts_has_a_page(visit, recipes_cli, tmp_path):
    words = ("plan", "llama31_405b", "--gpu", "h100", "--gpus", "8", "--gbs", "8", "--html", "no.html")
    printed(recipes_cli, *words, code=2, cwd=tmp_path)
    with visit(tmp_path / "no.html") as page:
        assert "No layout fits" in page.inner_text("main")
        assert "does not fit" in page.inner_text("#layout-facts")


def test_the_data_of_the_page_equals_the_plan(plan_page, visit):
    path, plan = plan_page
    assert path.stat().st_size < 5e6
    with visit(path) as page:
        rows = page.evaluate("page.data.rows")
        details = page.evaluate("page.data.layouts")
        edge = page.evaluate("page.data.map.frontier")
        printed_table = page.locator("#best tbody tr").nth(0).inner_text()
    for row, entry in zip(rows, plan["layouts"], strict=False):
        assert row["seconds"] == pytest.approx(entry["step_time_s"])
        assert row["gib"] == pytest.approx(entry["reserved_gib"])
    for detail, entry in zip(details, plan["layouts"], strict=False):
        assert detail["terms"] == pytest.approx(entry["terms_s"])
        sizes = [sum(stage["bytes"].values()) / 2**30 for stage in entry["stages"]]
        assert [sum(parts) for parts in detail["memory"]["gib"]] == pytest.approx(sizes, abs=0.01)
    assert json.dumps(edge["gib"]) == json.dumps(sorted(edge["gib"]))
    assert f"{plan['layouts'][0]['mfu'] * 100:.1f}" in printed_table


def test_a_large_rank_map_is_drawn_when_scrolled_to(visit, recipes_cli, tmp_path):
    words = ("llama31_405b", "--gpu", "h100", "--gpus", "8192", "--gbs", "1024", "--layout", "tp=8,pp=16,vp=8,cp=2")
    words = (*words[:-1], words[-1] + ",embedding_as_layer,loss_as_layer")
    printed(recipes_cli, "memory", *words, "--html", "one.html", cwd=tmp_path)
    with visit(tmp_path / "one.html") as page:
        assert page.evaluate("ranks.cells.length") == 0
        page.locator("#fig-ranks").scroll_into_view_if_needed()
        page.locator("#ranks-says", has_text="8,192 GPUs in 1,024 nodes of 8").wait_for()
        assert page.evaluate("model('gpus').data.left.length") == 8192


_BOXES = """() => [...document.querySelectorAll("*")].map((box) => {
  const style = getComputedStyle(box);
  const scrolls = (way) => ["auto", "scroll"].includes(way);
  return {
    name: box.tagName + "." + box.className,
    down: scrolls(style.overflowY) && box.scrollHeight > box.clientHeight + 1 && box !== document.documentElement,
  };
}).filter((box) => box.down).map((box) => box.name)"""
_WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
_TICKS = """() => page.figures.map(model).flatMap((figure) => [...figure.left, ...figure.below])
  .map((axis) => axis.major_label_policy.type)"""


def test_a_page_on_a_phone_scrolls_vertically_only(visit, plan_page):
    with visit(plan_page[0], width=400) as page:
        assert page.evaluate(_WIDTHS) == [400, 400]
        assert page.evaluate(_BOXES) == [], "a box that scrolls down inside the page"
        assert set(page.evaluate(_TICKS)) == {"NoOverlap"}
