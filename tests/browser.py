"""A headless Chromium, where there is one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Debian's, or another of that name. Tests say that they were left out where there is none."""
    if (command := shutil.which("chromium")) is None:
        pytest.skip("chromium was not found: walking the job's page in a browser was left out")
    api = pytest.importorskip("playwright.sync_api", reason="playwright: a browser was left out")
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=command, args=flags)
        try:
            yield browser
        finally:
            browser.close()


def complains(said: Any) -> bool:
    """A connection that is lost is not the page's fault: it connects again."""
    return said.type in ("error", "warning") and "net::" not in said.text


@contextlib.contextmanager
def opened(browser: Any, url: str, errors: list[str], **about: Any) -> Iterator[Any]:
    """A page of its own; what it complains of, also of its policy, goes to `errors`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **about})
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if complains(said) else None)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
