"""`recipes ui` in Chromium."""

from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.pages.ui.serving import serving
from tests.reports.growing_run import GrowingRun

pytestmark = pytest.mark.slow

SAYS = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    run = GrowingRun(tmp_path_factory.mktemp("ui") / "runs")
    run.grow(50, SAYS)
    run.beat(behind=[3])
    return run


@pytest.fixture(scope="module")
def served(growing):
    with serving(growing.path.parents[1]) as process:
        yield process


@pytest.fixture
def visit(chromium, served):
    """Open the page in a new window; an error or a request to another host fails the test."""

    @contextmanager
    def opened(query="", width=1280, height=1000, **how):
        faults = []
        context = chromium.new_context(viewport={"width": width, "height": height}, **how)
        page = context.new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and faults.append(f"console: {m.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: is_ours(r.url) or faults.append(f"asks {r.url}"))
        page.goto(served.url + query)
        page.locator("html[data-ready=yes]").wait_for(state="attached", timeout=60_000)
        planned(page)
        yield page
        assert faults == []
        assert context.cookies() == []
        context.close()

    def is_ours(url):
        parts = urlsplit(url)
        return parts.scheme in ("data", "blob") or (parts.netloc == f"127.0.0.1:{served.port}")

    return opened


def planned(page, words=""):
    """Return the frame with the plan once it shows the given text."""
    frame = page.frame_locator("#plan")
    frame.locator("html[data-ready=yes]").wait_for(state="attached", timeout=60_000)
    if words:
        frame.locator("body", has_text=words).wait_for(timeout=60_000)
    return frame


def test_another_gpu_gives_another_plan(visit):
    with visit() as page:
        assert planned(page).locator("h1").inner_text() == "llama3_8b on 64 × H100"
        page.select_option("[name=gpu]", "b200")
        frame = planned(page, "llama3_8b on 64 × B200")
        assert "--gpu b200" in frame.locator("#command").inner_text()
        page.fill("[name=gpus]", "16")
        page.press("[name=gpus]", "Enter")
        planned(page, "llama3_8b on 16 × B200")
        page.fill("[name=model]", "mixtral_8x7b")
        page.click("#controls button")
        planned(page, "mixtral_8x7b on 16 × B200")
        page.reload()  # what a window shows stands in its address
        planned(page, "mixtral_8x7b on 16 × B200")


def test_the_plan_is_interactive(visit):
    with visit("?gpus=16&gbs=64") as page:
        frame = planned(page, "on 16 × H100")
        frame.locator("#best tbody tr button").nth(2).click()
        frame.locator("#layout-place", has_text="No. 3 in the table").wait_for()


def test_invalid_values_are_reported_on_the_page(visit):
    with visit() as page:
        page.fill("[name=model]", "<img src onerror>")
        page.click("#controls button")
        planned(page, "<img src onerror>")
        assert page.frame_locator("#plan").locator("img").count() == 0
        page.locator("#plan-says", has_text="not planned").wait_for()
        page.fill("[name=model]", "llama3_8b")
        page.fill("[name=gpus]", "x")
        page.press("[name=gpus]", "Enter")
        planned(page, "--gpus must be a whole number, not")


def test_a_curve_grows_with_its_file(visit, growing):
    with visit() as page:
        page.locator("#newest-loss", has_text=f"at step {growing.step}").wait_for(timeout=60_000)
        before = page.evaluate("model('live_loss_data').data.x.length")
        assert before == growing.step
        growing.grow(25, SAYS)
        page.locator("#newest-loss", has_text=f"at step {growing.step}").wait_for(timeout=60_000)
        assert page.evaluate("Array.from(model('live_loss_data').data.x)") == [*range(1, growing.step + 1)]
        assert page.evaluate("model('live_loss_x').end") == growing.step
        assert page.evaluate("model('live_rate_data').data.y.length") == growing.step
        page.locator("#lines", has_text=f"step {growing.step} {SAYS}").wait_for()
        page.locator("#run-says", has_text="slowest: rank 3").wait_for()
        page.locator("#fig-live_loss summary").press("Enter")
        page.locator("#fig-live_loss tbody tr").first.wait_for()
        assert page.locator("#fig-live_loss tbody td").first.inner_text() == str(growing.step)


def test_two_windows_are_independent(visit, growing):
    other = GrowingRun(growing.path.parents[1], "zzz_other", rehearsal=True)
    other.grow(7)
    with visit("?gpu=h200") as first, visit("?gpu=b200") as second:
        first.locator("#runs-table button", has_text="zzz_other").click()
        first.locator("#newest-loss", has_text="at step 7").wait_for(timeout=60_000)
        second.locator("#runs-table button", has_text="tiny_llama3").click()
        second.locator("#newest-loss", has_text=f"at step {growing.step}").wait_for(timeout=60_000)
        assert first.locator("#unit-rate").inner_text() == "tokens/s/rank"
        first.locator("#fig-live_rate summary").press("Enter")
        assert first.locator("#fig-live_rate thead").inner_text().split() == ["step", "tokens/s/rank"]
        assert second.locator("#unit-rate").inner_text() == "tokens/s/GPU"
        planned(first, "× H200")
        planned(second, "× B200")
        assert first.locator("#runs-table tr[data-chosen] button").inner_text().startswith("zzz_other/")
        other.grow(2)
        first.locator("#newest-loss", has_text="at step 9").wait_for(timeout=60_000)


def test_a_narrow_window_in_the_dark_theme(visit):
    with visit(width=400, height=800, color_scheme="dark") as page:
        page.locator("#run").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.get_attribute("html", "data-theme") == "dark"
        frame = planned(page)
        frame.locator("html[data-theme=dark]").wait_for(state="attached")
        dark = page.evaluate("model('live_loss').background_fill_color")
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == "light"
        frame.locator("html[data-theme=light]").wait_for(state="attached")
        assert page.evaluate("model('live_loss').background_fill_color") != dark


def test_controls_have_names_and_are_reachable_by_keyboard(visit):
    with visit() as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        unnamed = page.evaluate(
            """[...document.querySelectorAll('button, select, input, [role=img], iframe')].filter((one) =>
                !(one.getAttribute('aria-label') || one.title || one.textContent.trim() || one.closest('label')))
                .filter((one) => !one.closest('.plot')).length"""
        )
        assert unnamed == 0


def test_the_page_reports_a_stopped_server(chromium, growing):
    with serving(growing.path.parents[1]) as served:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.locator("#runs-says", has_text="run").wait_for(timeout=60_000)
        assert served.interrupt() == 0
        page.locator("#runs-says", has_text="does not respond").wait_for(timeout=60_000)
        context.close()
