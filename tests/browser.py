"""A real browser for tests: loads a page at a width, answers JavaScript, takes a screenshot.

Chromium of this machine, or else the headless one of an npm package with its libraries, kept in data/browser.
It is driven by its DevTools protocol.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 60
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PACKAGE = "@sparticuz/chromium@143.0.4"
PLACE = Path(__file__).resolve().parent.parent / "data/browser"
# Without a GPU, and without the sandbox that root cannot have; other ways of drawing hang.
FLAGS = ["--headless", "--no-sandbox", "--no-zygote", "--in-process-gpu", "--disable-dev-shm-usage"]
FLAGS += ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
FONTS = f"<fontconfig><dir>{PLACE}/fonts</dir></fontconfig>"  # the package's own file names another place
UNPACK = """
const fs = require("fs"), zlib = require("zlib"), path = process.argv[1];
for (const name of ["chromium", "al2023.tar", "swiftshader.tar", "fonts.tar"])
  fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync(`${path}/${name}.br`)), { mode: 0o755 });
"""


def browser() -> Path | None:
    """The executable; None if this machine has none and cannot get it."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return Path(found)
    if not (PLACE / "chromium").exists() and shutil.which("npm"):
        PLACE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PLACE.parent) as building:
            install = ["npm", "install", "--silent", "--ignore-scripts", "--omit=optional", PACKAGE]
            if subprocess.run(install, cwd=building, timeout=600, check=False).returncode:
                return None
            packed = Path(building, "node_modules/@sparticuz/chromium/bin")
            subprocess.run(["node", "-e", UNPACK, packed], cwd=building, timeout=600, check=True)
            for archive in Path(building).glob("*.tar"):
                subprocess.run(["tar", "xf", archive, "--no-same-owner"], cwd=building, check=True)
            with contextlib.suppress(OSError):  # another process was faster
                Path(building).rename(PLACE)
            Path(building).mkdir(exist_ok=True)  # for the context to remove
    return PLACE / "chromium" if (PLACE / "chromium").exists() else None


class Tab:
    """The browser's only tab."""

    def __init__(self, socket: ClientConnection):
        self.socket, self.number = socket, 0

    def call(self, method: str, **parameters) -> dict:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE_S))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def event(self, name: str) -> None:
        while json.loads(self.socket.recv(timeout=PATIENCE_S)).get("method") != name:
            pass

    def load(self, page: Path, width: int, dark: bool = False) -> None:
        self.call("Page.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.event("Page.loadEventFired")

    def ask(self, expression: str):
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """A PNG of the whole page."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        )


@contextlib.contextmanager
def tab(executable: Path) -> Iterator[Tab]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        own = {}
        if executable.parent == PLACE:
            Path(profile, "fonts.conf").write_text(FONTS)
            own = {"LD_LIBRARY_PATH": f"{PLACE}/lib", "FONTCONFIG_FILE": f"{profile}/fonts.conf"}
        command = [
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            "about:blank",
        ]
        with subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True) as process:
            try:
                lines = (re.search(r"ws://([^/]+)/", line) for line in process.stderr)
                host = next(filter(None, lines))[1]
                with urllib.request.urlopen(f"http://{host}/json/list", timeout=PATIENCE_S) as answer:
                    pages = [each for each in json.load(answer) if each["type"] == "page"]
                with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
                    yield Tab(socket)
            finally:
                process.kill()
