"""Take the pictures of the README and docs/ from real commands, in headless Chromium: `make pictures`.

`make pictures ONLY=terminal` takes only those whose file names begin with `terminal`.
"""

import fcntl
import io
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "pictures"
RECIPES = Path(sys.executable).parent / "recipes"
PLAN = "plan llama3_70b --gpu h100 --gpus 64 --gbs 128"
LARGE = 150_000
"""Size in bytes from which a picture is reduced to 256 colors."""
LAYOUT = "explain mixtral_8x7b --gpu h100 --gpus 32 --gbs 32 --layout tp=2,pp=4,vp=2,ep=4,etp=1,sp"

RUN = ROOT / "tests" / "reports" / "report_runs" / "tiny_llama3" / "20261123T071400Z-90bd23"
"""A real run with two killed attempts."""
REPORT = f"report {RUN.name}"


class Picture(NamedTuple):
    """A screenshot of one element of a page."""

    file: str
    command: str
    element: str
    theme: str = "light"
    before: str = ""
    """JavaScript that runs on the page before the screenshot."""


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


class Terminal(NamedTuple):
    """A picture of the output of a command in a terminal."""

    file: str
    command: str
    columns: int


TERMINALS = (Terminal("terminal_report.png", f"report runs/{RUN.parent.name}/{RUN.name}", 100),)
WINDOW = """<!doctype html><meta charset="utf-8"><style>
@font-face {{ font-family: Dots; src: local("DejaVu Sans"); unicode-range: U+2800-28FF; size-adjust: 82.3% }}
body {{ margin: 0; background: #0d1117 }}
pre {{ display: inline-block; margin: 0; padding: 14px 18px; color: #e6edf3; background: #0d1117;
       font: 13px/1.2 Dots, "DejaVu Sans Mono", monospace; white-space: pre }}
</style><pre id="screen">{text}</pre>"""


def main() -> None:
    """Write the pictures in docs/pictures/, or those whose names begin with the argument."""
    from playwright.sync_api import sync_playwright

    only = sys.argv[1] if len(sys.argv) > 1 else ""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        shutil.copytree(RUN, folder / RUN.name)  # `report` writes its curve to the run folder
        shutil.copytree(RUN, folder / "runs" / RUN.parent.name / RUN.name)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        pictures = [picture for picture in PICTURES if picture.file.startswith(only)]
        pages = _write_pages({picture.command for picture in pictures}, folder)
        for picture in pictures:
            _take_picture(browser, picture, pages)
        for terminal in TERMINALS:
            if terminal.file.startswith(only):
                _take_terminal(browser, terminal, folder)
        browser.close()
    for path in OUT.glob(f"{only}*.png"):
        if path.stat().st_size > LARGE:
            shrink(path)


def _write_pages(commands: set[str], folder: Path) -> dict[str, Path]:
    """Write the page of each command, and return command -> file."""
    pages = {command: folder / f"{i}.html" for i, command in enumerate(sorted(commands))}
    for command, page in pages.items():
        words = [RECIPES, *command.split(), "--html", page.name]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return pages


def _take_picture(browser: "Browser", picture: Picture, pages: Mapping[str, Path]) -> None:
    """Write a screenshot of an element of a page."""
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


def _take_terminal(browser: "Browser", terminal: Terminal, folder: Path) -> None:
    """Write a picture of the output of a command."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(width=terminal.columns, record=True, file=io.StringIO(), highlight=False)
    console.print(
        Text.from_ansi(f"$ recipes {terminal.command}\n{_run_in_terminal(terminal, folder).rstrip()}"), soft_wrap=True
    )
    text = console.export_html(theme=MONOKAI, code_format="{code}", inline_styles=True)
    window = browser.new_page(viewport={"width": 1040, "height": 900}, device_scale_factor=1.5)
    window.set_content(WINDOW.format(text=text))
    window.locator("#screen").screenshot(path=OUT / terminal.file)
    window.close()


def _run_in_terminal(terminal: Terminal, folder: Path) -> str:
    """Return the output of a command in a pseudo-terminal, with colors but without the path of `folder`."""
    master, tty = pty.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 50, terminal.columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    words = [RECIPES, *terminal.command.split()]
    running = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=tty, stderr=tty, env=environment)
    os.close(tty)
    written = b""
    while block := _read(master):
        written += block
    os.close(master)
    if running.wait():
        raise SystemExit(f"recipes {terminal.command} exited with {running.returncode}:\n{written.decode()}")
    return written.decode().replace("\r\n", "\n").replace(f"{folder}/", "")


def _read(terminal: int) -> bytes:
    """Return the next bytes of a pseudo-terminal; b"" at its end, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def shrink(path: Path) -> None:
    """Reduce a picture to 256 colors, which takes a third of the bytes without a visible difference."""
    from PIL import Image

    image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


if __name__ == "__main__":
    main()
