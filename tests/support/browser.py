"""A real browser: headless Chromium, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60.0  # a busy machine renders and answers slowly


def needs_browser() -> pytest.MarkDecorator:
    found = shutil.which("chromium") and shutil.which("chromedriver")
    return pytest.mark.skipif(not found, reason="needs Chromium and chromedriver: scripts/browser.sh installs them")


class Browser:
    """One window. `wait` returns what a condition gives once it is true."""

    def __init__(self) -> None:
        options = Options()
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.binary_location = shutil.which("chromium") or ""
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_window_size(1280, 900)

    def open(self, url: str) -> None:
        """Load an address anew, even if it differs from the present one only behind `#`."""
        self.driver.get("about:blank")
        self.driver.get(url)

    def wait(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05, ignored_exceptions=(Exception,)).until(
            lambda _: condition()
        )

    def find_all(self, path: str) -> list[WebElement]:
        """The elements at an XPath, as they are now."""
        return self.driver.find_elements(By.XPATH, path)

    @contextmanager
    def width(self, pixels: int) -> Iterator[None]:
        """A phone of this width; a window cannot be so narrow."""
        size = {"width": pixels, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def wait_other(self, script: str, value: Any) -> None:
        """Wait until a script gives another value."""
        self.wait(lambda: self.evaluate(script) != value)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def find(self, selector: str) -> WebElement:
        return self.wait(lambda: self.driver.find_element(By.CSS_SELECTOR, selector))

    def click(self, words: str) -> None:
        """Press the button or link with these words."""
        path = f"//*[self::button or self::a][normalize-space()='{words}']"
        self.wait(lambda: self.driver.find_element(By.XPATH, path).click() is None)

    def sees(self, words: str) -> bool:
        """Whether the words appear on the page, sooner or later."""
        return bool(self.wait(lambda: words in self.text))

    @property
    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def evaluate(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    @property
    def errors(self) -> list[str]:
        """What the page has written to the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self.driver.quit()
