"""Headless Chromium for drills that look at the pages of Prefect and MLflow.

These drills need chromium and the package playwright (`.venv/bin/pip install playwright`). If NIGHTJAR_PICTURES is the path of
a folder, they write screenshots into this folder.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")


@contextmanager
def browser_page() -> Iterator[Any]:
    """Yield a new page; skip the test if chromium or playwright is not installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser.new_page(viewport={"width": 1280, "height": 1000})
        browser.close()


def log_in_to_prefect(page: Any, address: str, *, password: str) -> None:
    """Open the Prefect UI and enter the password."""
    page.goto(f"{address}/deployments")
    page.locator("input").first.fill(password)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/(dashboard|deployments)"))


def take_picture(page: Any, name: str, *, width: int = 1280) -> None:
    """Write a screenshot to NAME.png in the folder NIGHTJAR_PICTURES; without this variable, only wait 2 s."""
    page.wait_for_timeout(2_000)  # until the animations have ended
    folder = os.environ.get("NIGHTJAR_PICTURES")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", clip={"x": 0, "y": 0, "width": width, "height": 1000})
