"""Pages in headless Chromium: `make pages`. No test may be skipped for want of a browser."""

import os
import re
from pathlib import Path

import pytest
import torch
from playwright.sync_api import sync_playwright

from hookcb.report.page import Page
from tests.pages.support import KINDS

# what a page must not do, and when it was ready
WATCH = """
window.wrong = []; window.alert = (text) => wrong.push(`alert: ${text}`);
addEventListener("securitypolicyviolation", (e) => wrong.push(`${e.violatedDirective}: ${e.sample}`), true);
new MutationObserver(() => {
  if (!document.body?.dataset.ready || window.readyAt) return;
  window.readyAt = performance.now();
  window.drawnWhenReady = document.querySelectorAll("canvas").length;
})
  .observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ["data-ready"]});
"""
# a page is ready before its charts, which it draws one after another; one that only frames another has none
DRAWN = """async () => {
  while (typeof waiting !== "undefined" && waiting.length) await new Promise(requestAnimationFrame);
}"""
BUILD = Path("build") / "pages"  # screenshots and measured numbers, for looking at


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, or the one that CHROMIUM names."""
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Writes the page of a kind of run, once; returns its path."""
    folder, written = tmp_path_factory.mktemp("pages"), {}

    def write(kind):
        if kind not in written:
            torch.manual_seed(0)
            written[kind] = Page(KINDS[kind]()).save(folder / f"{kind}.html")
        return written[kind]

    return write


@pytest.fixture
def open_page(browser):
    """Opens a file, all sections unfolded; afterwards nothing must have gone wrong, nor been fetched."""
    opened, wrong = [], []

    def open_(path, width=1280, scheme="light", height=900, is_live=False, is_folded=False, **options):
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, **options)
        context.add_init_script(WATCH)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        page.on("request", lambda sent: wrong.extend({sent.url} - {path.as_uri()}))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready=yes]", timeout=20_000)
        if not is_folded:
            page.evaluate(
                "document.querySelectorAll('details.section').forEach((own) => { own.open = true; })"
            )
        if not is_live:  # a page that loads itself anew ends what is evaluated in it
            page.evaluate(DRAWN)
        opened.append(page)
        return page

    yield open_
    for page in opened:
        wrong += page.evaluate("wrong")
        page.context.close()
    assert wrong == []


@pytest.fixture
def shoot():
    """Writes a screenshot of the whole page to build/pages if SCREENSHOTS is set: each takes seconds."""
    if not os.environ.get("SCREENSHOTS"):
        return lambda page, name: None
    BUILD.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=BUILD / f"{name}.png", full_page=True)


@pytest.fixture
def note():
    """Writes a measured number to the folder build/pages, and returns it."""

    def write(what, number, unit):
        BUILD.mkdir(parents=True, exist_ok=True)
        text = f"{what}: {number:,.0f} {unit}"
        (BUILD / f"{re.sub('[^a-z0-9]+', '-', what)}.txt").write_text(f"{text}\n", encoding="utf-8")
        return number

    return write
