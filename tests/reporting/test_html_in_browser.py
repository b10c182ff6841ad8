"""Pages in a headless Chromium: no overflow, readable charts, nothing loaded."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from halfstep.reporting.html import (
    Chart,
    ConfusionMatrix,
    Curve,
    Drawing,
    Section,
    page,
)
from halfstep.reporting.table import Table

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
PROBE = """<script>
const rgb = (element, name) => getComputedStyle(element)[name];
parent.document.title = JSON.stringify({
  across: document.documentElement.scrollWidth,
  body: rgb(document.body, "color"),
  texts: [...new Set([...document.querySelectorAll("svg text")].map(
    text => rgb(text, "fill")))],
  requests: performance.getEntriesByType("resource").map(entry => entry.name),
});
</script></body>"""


def whole_page() -> str:
    """Return a page with one part of each kind, some of them wide."""
    names = tuple(f"a long name of column {number}" for number in range(12))
    table = Table("Wide", names, (tuple(range(12)),))
    counts = Table("Confusion", ("true", "a", "b"), (("a", 2, 1), ("b", 0, 1)))
    x = tuple(map(float, range(100)))
    section = Section(
        "One",
        "Some text.",
        points=("/a/path/without/breaks" * 9,),
        tables=(table,),
        confusion_matrices=(ConfusionMatrix(counts, "predicted"),),
        charts=(
            Chart("Loss", "step", "nats", (Curve("a", x, x, 9), Curve("b", x, x))),
            Chart("Scale", "step", "scale", (Curve("", x, x),), log_y=True, step=True),
        ),
        drawings=(Drawing("Map", Chart("m", "x", "y", (Curve("", x, x),)).svg()),),
    )
    headline = [("time of a step", "0.55 x fp32", "105.7 ms against 208.6 ms")] * 4
    return page("A run", [section], "It went well.", headline)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("theme", "width"), [("dark", 400), ("light", 1280)])
def test_a_page_fits_its_window(tmp_path: Path, width: int, theme: str) -> None:
    """Law: no scrolling to the side, texts as bright as the theme's, nothing loaded."""
    file = tmp_path / "page.html"
    inner = escape(whole_page().replace("</body>", PROBE))
    # A window has at least 500 pixels.
    frame = f'<iframe width="{width}" height="900" srcdoc="{inner}"></iframe>'
    file.write_text(f"<!doctype html><title></title>{frame}", encoding="utf-8")
    scheme = ("dark", "light").index(theme)
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
            f"--blink-settings=preferredColorScheme={scheme}",
            *("--window-size=1400,1000", "--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    (title,) = re.findall("<title>(.*)</title>", done.stdout)
    seen = json.loads(unescape(title))
    assert seen["across"] <= width
    assert seen["requests"] == []
    assert seen["texts"] == [seen["body"]]
    red = int(re.findall(r"\d+", seen["body"])[0])
    assert (red > 200) if theme == "dark" else (red < 50)
