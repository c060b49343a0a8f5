"""A headless Chromium, where there is one, and what tests ask of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
AXE = "axe_playwright_python"
"""The package that brings axe-core. Nothing but its file is used, and no Playwright."""

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")

NEEDED = "MLX_LM_KVCACHE_NEEDS_BROWSER"
"""A variable: where it is set, all of this has to be installed, and nothing is skipped."""

WAIT_SECONDS = 10


class Browser:
    """A page in a window; text is asked for as a screen shows it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._axe = axe_core()

    def open(self, url: str) -> None:
        """Show a page, with nothing left of the one before."""
        self.leave()
        self.complaints()
        self.requests()
        self.driver.get(url)

    def leave(self) -> None:
        """Show nothing: no page goes on asking."""
        self.driver.get("about:blank")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What an element shows, "" if it is hidden."""
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def until(self, script: str, *arguments: Any) -> None:
        """Wait for a script to return something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.02)
        waiting.until(lambda driver: driver.execute_script(script, *arguments), message=script)

    def shows(self, selector: str, text: str) -> None:
        """Wait until an element shows a text."""
        script = "return document.querySelector(arguments[0])?.innerText.includes(arguments[1])"
        self.until(script, selector, text)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def looks(self, width: int, height: int, scheme: str) -> None:
        """Give the window any size, and a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """What the console was told since the last time: errors, and what the policy forbade."""
        return [each["message"] for each in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last time."""
        messages = [json.loads(each["message"]) for each in self.driver.get_log("performance")]
        return [
            each["message"]["params"]["request"]["url"]
            for each in messages
            if each["message"]["method"] == "Network.requestWillBeSent"
        ]

    def violations(self, with_contrast: bool = True) -> list[str]:
        """What axe-core has against the page as it is now."""
        self.run("if (!window.axe) (0, eval)(arguments[0])", self._axe)
        found = self.driver.execute_async_script(
            "const [options, done] = arguments; axe.run(document, options).then(done)",
            {
                "runOnly": list(RULES),
                "rules": {"color-contrast": {"enabled": with_contrast}},
                "resultTypes": ["violations"],
                "preload": False,
            },
        )
        return [
            f"{each['id']}: {place['html'][:120]} {place['failureSummary']}"
            for each in found["violations"]
            for place in each["nodes"]
        ]


@contextmanager
def opened() -> Iterator[Browser]:
    """Start a browser, and end it; skips the test where something for it is not installed."""
    if find_spec("selenium") is None:
        _skip("selenium is not installed")
    axe_core()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _installed(*BROWSERS)
    for argument in (
        "--headless=new",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=_installed(DRIVER))
    with webdriver.Chrome(options=options, service=service) as driver:
        yield Browser(driver)


def axe_core() -> str:
    """The source of axe-core; skips the test where it is not installed."""
    spec = find_spec(AXE)
    if spec is None or spec.origin is None:
        _skip(f"{AXE} is not installed, which brings axe-core")
    return Path(spec.origin).with_name("axe.min.js").read_text(encoding="utf-8")


def _installed(*commands: str) -> str:
    """The path of the first command that is here; Selenium would download one."""
    found = [path for path in map(shutil.which, commands) if path]
    if not found:
        _skip(f"{' or '.join(commands)} is not installed")
    return found[0]


def _skip(why: str) -> NoReturn:
    """Skip the test, unless it must not be."""
    if os.environ.get(NEEDED):
        pytest.fail(f"{why}, and {NEEDED} is set")
    pytest.skip(why)
