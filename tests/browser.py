"""A headless Chromium for the tests of report.html: Debian's, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def require_chromium() -> str:
    """Its path. Only where nobody could have installed it is a test skipped; root can (scripts/setup.sh tools)."""
    if CHROMIUM is None and os.geteuid() != 0:
        pytest.skip("no Chromium here; install it: sudo apt-get install chromium")
    assert CHROMIUM, "no Chromium here; run: sh scripts/setup.sh tools .venv"
    return CHROMIUM


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    path = require_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A report opened from disk; its errors and its requests to a network are kept, and none are expected."""

    def __init__(self, browser: Any, file: Path, mark: str = "", **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        self.view = self.context.new_page()
        self.faults: list[str] = []
        self.view.on("pageerror", lambda error: self.faults.append(str(error)))
        self.view.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        self.view.on("request", lambda request: self._local(request.url))
        self.view.goto(file.as_uri() + mark)
        self.view.locator("body[data-ready]").wait_for()

    def _local(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:", "about:")):
            self.faults.append(f"request to {url}")

    def rollouts(self) -> Any:
        """The browser of rollouts, once every token is there."""
        self.view.get_by_role("tab", name="Rollouts").click()
        self.view.locator("body[data-ready=tokens]").wait_for()
        return self.view

    def count(self) -> int:
        """How many rollouts fit the filter."""
        return int(self.view.locator(".count [role=status]").inner_text().split()[0].replace(",", ""))

    def close(self) -> None:
        self.context.close()
        assert not self.faults, self.faults
