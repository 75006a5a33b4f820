"""Make the pictures of docs/pages.md and docs/reports.md from real commands, in headless Chromium: `make pictures`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "pictures"
PLAN = "plan llama3_70b --gpu h100 --gpus 64 --gbs 128"
LARGE = 150_000
"""Bytes of a picture that is worth fewer colours."""
LAYOUT = "explain mixtral_8x7b --gpu h100 --gpus 32 --gbs 32 --layout tp=2,pp=4,vp=2,ep=4,etp=1,sp"

RUN = ROOT / "tests" / "lifecycle" / "report_runs" / "tiny_llama3" / "20261123T071400Z-90bd23"
"""A real run of which two attempts were killed."""
REPORT = f"report {RUN.name}"


class Picture(NamedTuple):
    """One element of a page, as a file."""

    file: str
    command: str
    element: str
    theme: str = "light"
    before: str = ""
    """A script that acts on the page first."""


CHOSEN_GPU = """() => {
    $("#ranks-by").value = ranks.by = "ep";
    ranks.chosen = 9;
    paintRanks();
}"""

PICTURES = (
    Picture("map.png", PLAN, "#fig-map"),
    Picture("map_dark.png", PLAN, "#fig-map", "dark"),
    Picture("table.png", PLAN, ".tall", "light", "document.querySelector('.tall').style.maxHeight = '19rem'"),
    Picture("terms.png", PLAN, "#fig-terms"),
    Picture("memory.png", PLAN, "#fig-memory"),
    Picture("timeline.png", LAYOUT, "#fig-timeline"),
    Picture("ranks.png", LAYOUT, "#fig-ranks", "light", CHOSEN_GPU),
    Picture("sensitivity.png", PLAN, "#sensitivity .row"),
    Picture("report_loss.png", REPORT, "#fig-loss"),
    Picture("report_time.png", REPORT, "#fig-time"),
)


def main() -> None:
    """Write docs/pictures/."""
    from playwright.sync_api import sync_playwright

    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        shutil.copytree(RUN, Path(folder, RUN.name))  # `report` draws its curve into a run
        pages = {command: Path(folder, f"{i}.html") for i, command in enumerate((PLAN, LAYOUT, REPORT))}
        for command, page in pages.items():
            words = [Path(sys.executable).parent / "recipes", *command.split(), "--html", page.name]
            subprocess.run(words, cwd=folder, check=True, capture_output=True)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            window = browser.new_page(viewport={"width": 1040, "height": 900}, device_scale_factor=1.5)
            window.emulate_media(color_scheme="dark" if picture.theme == "dark" else "light")
            window.goto(f"file://{pages[picture.command]}")
            window.locator("html[data-ready=yes]").wait_for(state="attached", timeout=120_000)
            if picture.before:
                window.evaluate(picture.before)
            window.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            window.wait_for_timeout(500)
            window.locator(picture.element).first.screenshot(path=OUT / picture.file)
            window.close()
        browser.close()
    for path in OUT.glob("*.png"):
        if path.stat().st_size > LARGE:
            shrink(path)


def shrink(path: Path) -> None:
    """A picture of 256 colours takes a third of the bytes, and nobody sees it."""
    from PIL import Image

    image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


if __name__ == "__main__":
    main()
