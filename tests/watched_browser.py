"""Chromium for tests of the page; all modules share the fixture `browser` in conftest.py.

    with watched_page(browser, url) as page:
        page.goto(url)

At the end of the block, the page must not have requested any other address, raised an error, opened
a dialog or violated its content security policy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE = 15_000  # milliseconds; long, because the machine may be busy

# Runs before the page's own script, in every document.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (e) =>
    window.violations.push(`${e.effectiveDirective} ${e.blockedURI}`));
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium; on Debian: apt-get install chromium")
    extra = "an extra: pip install -e '.[browser]'"
    sync_api = pytest.importorskip("playwright.sync_api", reason=extra)
    sync_api.expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def watched_page(browser: Browser, origin: str, **options: Any) -> Iterator[Page]:
    """Open a new window with its own storage; `options` are those of Playwright's new_context."""
    context = browser.new_context(**({"viewport": {"width": 960, "height": 900}} | options))
    context.set_default_timeout(PATIENCE)
    context.add_init_script(WATCH)
    page = context.new_page()
    requests: list[str] = []
    troubles: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
    yield page
    assert troubles == []
    assert page.evaluate("violations") == []
    assert [url for url in requests if not url.startswith((origin, "data:"))] == []
    context.close()


def expect(*args: Any) -> Any:
    """Call Playwright's `expect`, which is imported only if a browser runs."""
    from playwright.sync_api import expect as of_playwright

    return of_playwright(*args)
