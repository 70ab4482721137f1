"""A run's page in a browser: headless Chromium, which .ci/run installs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.report.html_report import write_report
from tests.support.report_runs import make_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium"),
    pytest.mark.spread(3),  # each report once, and each screen
]

PHONE, DESK = 400, 1280  # CSS pixels
# Boxes of all pieces of text, those of a closed <details> left out.
TEXTS = """() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    if (!node.data.trim() || node.parentElement.closest('title, pre')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width && box.height)
        found.push([node.data.trim(), box.left, box.top + scrollY, box.right, box.bottom + scrollY]);
  }
  return found;
}"""
# Of each curve: its frame, and what it draws.
CURVES = """() => [...document.querySelectorAll('svg [id^=curve-]')].map(curve => {
  const frame = curve.closest('svg').querySelector('[id=patch_2]').getBoundingClientRect();
  const box = curve.getBoundingClientRect(), path = curve.querySelector('path'), style = getComputedStyle(path);
  return [curve.id, frame.left, frame.top, frame.right, frame.bottom, box.left, box.top, box.right, box.bottom,
          path.getTotalLength(), style.stroke === 'none' ? style.fill : style.stroke];
})"""
STROKE = 4.0  # pixels by which a dot's or line's width may stand out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # Without its sandbox, which root in a container has no right to; it opens our own page alone.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[1, 5, 2000])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("run") / "a run", request.param, reason="the disk is full"))


@pytest.fixture(params=[(PHONE, "light"), (PHONE, "dark"), (DESK, "light")], ids=str)
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """Yield the open page. At the end it must have printed nothing and asked for nothing but itself."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert said == []
    assert asked == [report.as_uri()]


def test_curves_are_drawn_in_their_frames(page: Any) -> None:
    curves = page.evaluate(CURVES)
    assert len(curves) >= 13
    page_color = page.evaluate("getComputedStyle(document.querySelector('svg [id=patch_2] path')).fill")
    for name, left, top, right, bottom, *box, length, color in curves:
        assert right - left > 200, name
        assert left - STROKE <= box[0] <= box[2] <= right + STROKE, name
        assert top - STROKE <= box[1] <= box[3] <= bottom + STROKE, name
        assert length > 0 or box[2] - box[0] <= 2 * STROKE, name
        assert color not in (page_color, "none", "rgba(0, 0, 0, 0)"), name


def test_no_text_lies_on_another_or_outside(page: Any) -> None:
    width = page.viewport_size["width"]
    texts = [(text, *box) for text, *box in page.evaluate(TEXTS)]
    assert len(texts) > 100
    for k, (text, left, top, right, bottom) in enumerate(texts):
        assert left >= 0, text
        for other, left2, top2, right2, bottom2 in texts[k + 1 :]:
            across, down = min(right, right2) - max(left, left2), min(bottom, bottom2) - max(top, top2)
            assert across <= 1 or down <= 2, f"{text!r} lies on {other!r}"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
