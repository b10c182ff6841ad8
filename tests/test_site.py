"""The site that `make docs` builds, of some pages: where it begins, what it finds."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GUIDES = ("index", "troubleshooting", "scaling", "training", "examples", "decisions/*")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pages = [*(f"docs/{name}.md" for name in GUIDES), "benchmarks/*.md"]
    subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-Q", "-c", "docs"),
            *("-D", f"include_patterns={','.join(pages)}", ".", str(folder)),
        ],
        cwd=ROOT,
        check=True,
    )
    return folder


def test_the_first_page(site: Path) -> None:
    """Law: the page at the root leads to one of the site."""
    (target,) = re.findall('url=([^"]*)', (site / "index.html").read_text())
    assert (site / target).is_file()


def test_dated_pages_stand_aside(site: Path) -> None:
    """Law: no measurement is in the sidebar or in the index; its page is there."""
    names = [path.stem for path in (ROOT / "benchmarks").glob("20*.md")]
    sidebar = (site / "search.html").read_text()
    assert "benchmarks/README.html" in sidebar
    assert "benchmarks/20" not in sidebar
    assert all((site / f"benchmarks/{name}.html").is_file() for name in names)
    script = (site / "searchindex.js").read_text()
    index = json.loads(script[script.index("{") : script.rindex("}") + 1])
    dated = {n for n, name in enumerate(index["docnames"]) if "benchmarks/20" in name}
    assert len(dated) == len(names)
    for pages in (*index["terms"].values(), *index["titleterms"].values()):
        assert not dated & {*(pages if isinstance(pages, list) else [pages])}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("loss is NaN", "docs/troubleshooting.html#the-loss-is-nan-or-inf"),
        ("overflow", "docs/troubleshooting.html"),
        ("resume", "docs/training.html"),
    ],
)
def test_search(site: Path, tmp_path: Path, query: str, first: str) -> None:
    """Law: what helps a user comes before decisions, lists and examples."""
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
            *("--virtual-time-budget=30000", f"--user-data-dir={tmp_path}"),
            *("--dump-dom", f"{(site / 'search.html').as_uri()}?q={quote(query)}"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    results = done.stdout.partition('<ul role="list" class="search">')[2]
    links = re.findall(r'<li[^>]*><a href="([^"?#]*)[^"#]*(#[^"]*)?"', results)
    assert "".join(links[0]) == first
