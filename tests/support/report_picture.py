"""Picture of a run's page for docs/report.md, in a real browser:

python -m tests.support.report_picture runs/demo docs/report.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from meshwright_plan.report.page import page
from meshwright_plan.report.run import read_run
from tests.support.chromium import Browser

WIDTH = 1100
END = "Math.ceil(document.querySelectorAll('.charts')[1].getBoundingClientRect().bottom) + 16"
"""Lower edge of the picture: below the first row of small charts."""


def draw(run: Path, png: Path) -> None:
    """Write the upper part of a run's page, by day, as a small PNG."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        html = Path(folder) / "page.html"
        html.write_text(page([read_run(run)]))
        browser.opened(html, WIDTH)
        height = browser.value(END)
        browser.picture(png)
    with Image.open(png) as whole:
        upper = whole.convert("RGB").crop((0, 0, WIDTH, height))
    upper.quantize(256).save(png, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
