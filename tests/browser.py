"""Headless Chromium for the report tests: the fixture `browser`."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
#: Texts and lines with too little contrast by WCAG with all that is painted behind them, each colour over the one before.
CONTRAST = """
const pixel = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
const light = (colours) => {
  for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); }
  return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0); };
const behind = (e) => e ? [...behind(e.parentElement), getComputedStyle(e).backgroundColor] : ['white'];
let looks = 0;
const found = [];
const look = (e, ink, least, name) => {
  looks += 1;
  const [a, b] = [light(behind(e)), light([...behind(e), ink])].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
  if (ratio < least) found.push([name, e.tagName, ratio]); };
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode());) {
  const e = node.parentElement, style = getComputedStyle(e);
  if (!node.data.trim() || e.closest('script, style, noscript, template, [hidden]') || !e.getClientRects().length) continue;
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
  look(e, e.closest('svg') ? style.fill : style.color, large ? 3 : 4.5, node.data.trim().slice(0, 40)); }
if (looks <= 10) throw new Error(`Only ${looks} texts are seen.`);
for (const e of document.querySelectorAll(arguments[0])) look(e, getComputedStyle(e).stroke, 3, e.getAttribute('class'));
return found;
"""


class Browser:
    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder  # selenium's, and where `show` writes its pages

    def show(
        self, page: str | Path, *, width: int = 1200, height: int = 900, dark: bool = False, fragment: str = ""
    ) -> None:
        """Open a page (HTML text or a file) at this size and colour scheme, with an empty console."""
        path = self.folder / "page.html" if isinstance(page, str) else page.resolve()
        if isinstance(page, str):
            path.write_text(page, encoding="utf-8")
        self.driver.get("about:blank")
        self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        # A window without the focus gets no event of it.
        self.driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        self.driver.get_log("browser")
        self.driver.get(path.as_uri() + (f"#{fragment}" if fragment else ""))

    def size(self, width: int, height: int) -> None:
        """Give the page this size in CSS pixels; a window cannot be as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def hard_to_see(self, lines: str = ".no-lines") -> list[list[Any]]:
        """Return the texts of the page, and the lines of this selector, that have too little contrast."""
        return self.run(CONTRAST, lines)

    def wait(self, script: str, *, seconds: float = 10.0) -> Any:
        """Wait until a script returns something true, and return it."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, poll_frequency=0.02).until(lambda driver: driver.execute_script(script))

    @contextmanager
    def on_paper(self) -> Iterator[None]:
        """Show the page as it is printed, once it has been drawn so."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def each(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def scroll_to(self, element: Any, *, block: str = "center") -> None:
        """Scroll at once until an element is in the middle of the window, or at its start or end."""
        self.run("arguments[0].scrollIntoView({block: arguments[1], behavior: 'instant'})", element, block)

    def point_at(self, element: Any, *, right: int = 0) -> None:
        """Move the pointer onto the middle of an element, or so many pixels to the right of it."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).move_to_element_with_offset(element, right, 0).perform()

    def press(self, *keys: str) -> None:
        """Press keys, one after the other (a letter, or the name of one of selenium's `Keys`)."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            ActionChains(self.driver).send_keys(getattr(Keys, key, key)).perform()

    def console(self) -> list[str]:
        """Warnings and errors of the console since the page was opened (or since the last call)."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def picture(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]))


@contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """A Chromium, offline, that writes its pages into `folder`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield Browser(driver, folder)
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium for the whole session; skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium and chromedriver on the PATH")
    pytest.importorskip("selenium.webdriver", reason="needs selenium")
    with opened(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The session's Chromium. At the end of a test the page's console is empty, and no text of it has run as a script."""
    yield chromium
    assert chromium.console() == []
    assert chromium.run("return window.hacked") is None
