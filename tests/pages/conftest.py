"""A headless Chromium for tests of pages, which reports errors and network requests of a page."""

import os
import shutil
from contextlib import contextmanager

import pytest

from tests.cli.planning.small_plans import SMALL, printed


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "these tests act in Chromium: apt-get install chromium, as .ci/run does"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a file in a new window, `with visit(path, width=400) as page`; an error of the page fails the test."""

    @contextmanager
    def opened(path, width=1280, height=900, **how):
        faults = []
        context = chromium.new_context(viewport={"width": width, "height": height}, **how)
        page = context.new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and faults.append(f"console: {m.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or faults.append(f"asks {r.url}"))
        page.goto(f"file://{path}")
        # Playwright's wait_for_function evaluates text, which the page's own policy forbids.
        page.locator("html[data-ready=yes]").wait_for(state="attached", timeout=60_000)
        yield page
        assert faults == []
        context.close()

    return opened


@pytest.fixture(scope="session")
def plan_page(recipes_cli, tmp_path_factory):
    """Write the page of a plan for 16 GPUs; returns its path and the plan's JSON."""
    import json

    folder = tmp_path_factory.mktemp("plan")
    text = printed(recipes_cli, "plan", *SMALL, "--html", "plan.html", "--json", "--top", "60", cwd=folder)
    assert os.listdir(folder) == ["plan.html"]
    return folder / "plan.html", json.loads(text)
