"""A real browser for the tests of the page: Debian's Chromium, without a window.

Invariant: whatever a page complained of, and whatever it asked of whom, is kept and can be checked.
"""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

WITHIN_MS = 90_000
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# What Chromium itself says when nobody answers; the page can do nothing about it.
AWAY = "Failed to load resource"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=WITHIN_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            timeout=WITHIN_MS,
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page at an address, what it complained of, and what it asked for."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(WITHIN_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def _hear(self, message: ConsoleMessage) -> None:
        self.complaints.append(f"{message.type}: {message.text}")

    def check(self, *, may_be_away: bool = False) -> None:
        """Nothing in the console, and nothing asked of anybody but the agent."""
        left = [each for each in self.complaints if not (may_be_away and AWAY in each)]
        assert not left, f"the page complains: {left}"
        elsewhere = {each for each in self.requests if each not in (f"{self.url}/", f"{self.url}/status")}
        assert not elsewhere, f"the page asks elsewhere: {elsewhere}"
        assert f"{self.url}/status" in self.requests


@contextlib.contextmanager
def watched(browser: Browser, url: str, **settings: Any) -> Iterator[Watched]:
    with contextlib.closing(browser.new_context(**({"viewport": WIDE} | settings))) as context:
        found = Watched(context.new_page(), url)
        found.page.goto(f"{url}/")
        yield found
