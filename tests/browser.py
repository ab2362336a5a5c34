"""A headless Chromium for tests of the page, and for its screenshots.

``REBUNO_CHROMIUM`` and ``REBUNO_CHROMEDRIVER`` name others than those on the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver

#: How long the browser waits for a page, in seconds.
PATIENCE = 60.0
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-proxy-server",
)


class NoBrowser(Exception):
    """There is no Chromium, or none of its driver; the message says how to get them."""


def find() -> tuple[str, str]:
    """Return where Chromium and its driver are.

    Raises:
        NoBrowser: one of them is not there.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    installed = next(filter(None, map(shutil.which, names)), None)
    chromium = os.environ.get("REBUNO_CHROMIUM") or installed
    driver = os.environ.get("REBUNO_CHROMEDRIVER") or shutil.which("chromedriver")
    if not chromium or not driver:
        missing = "chromium" if not chromium else "chromedriver"
        raise NoBrowser(
            f"{missing} was not found; on Debian: apt-get install chromium chromium-driver"
        )
    return chromium, driver


@contextlib.contextmanager
def browser(width: int = 1200, height: int = 900, *switches: str) -> Iterator[WebDriver]:
    """Start a browser of its own profile, and end it.

    Args:
        width: of the window, in CSS pixels.
        height: of the window, in CSS pixels.
        switches: further ones for the command line.

    Raises:
        NoBrowser: there is none.
    """
    chromium, driver = find()
    with tempfile.TemporaryDirectory(prefix="rebuno-chromium-") as profile:
        options = Options()
        options.binary_location = chromium
        for switch in (*_SWITCHES, f"--user-data-dir={profile}", *switches):
            options.add_argument(switch)
        options.add_argument(f"--window-size={width},{height}")
        # What the page's console says: a violated policy, an error of the script.
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        started = webdriver.Chrome(options, Service(driver))
        try:
            started.set_page_load_timeout(PATIENCE)
            started.set_script_timeout(PATIENCE)
            yield started
        finally:
            started.quit()


def resize(driver: WebDriver, width: int, height: int, scale: float = 1.0) -> None:
    """Give the page this size, which may be narrower than a window can be."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600},
    )


def prefer(driver: WebDriver, scheme: str) -> None:
    """Have the page shown to somebody who likes it ``dark`` or ``light``."""
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
