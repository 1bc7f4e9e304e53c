"""Sees to it that the report page can be tested in a real browser: finds a Chromium, or installs Debian's.

Says in one line what it found, did, or why it could not; ends with 0 in any case: without a browser its tests skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

# as in tests/helpers/browser.py; POLYFED_CHROMIUM names another
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chromium-headless-shell")
SECONDS = 300


def main() -> int:
    """Find or install."""
    named = os.environ.get("POLYFED_CHROMIUM")
    names = (named,) if named else NAMES
    found = next((path for name in names if (path := shutil.which(name))), None)
    print(f"browser: {found or install()}", file=sys.stderr)
    return 0


def install() -> str:
    """What came of it, in one line."""
    apt = shutil.which("apt-get")
    if apt is None:
        return "no chromium, and no apt-get to install it with; the tests in a browser skip"
    if os.geteuid() != 0:
        return f"no chromium; the tests in a browser skip until an administrator runs `{apt} install chromium`"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    wanted = [apt, "install", "-y", "--no-install-recommends", "-qq", "chromium"]
    problem = ""
    for command in (wanted, [apt, "update", "-qq"], wanted):  # lists may be missing or old
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"no chromium: `{' '.join(command)}` took more than {SECONDS} s; the tests in a browser skip"
        if command is wanted and done.returncode == 0 and (found := shutil.which("chromium")):
            return f"{found}, installed now"
        problem = next(iter(done.stderr.strip().splitlines()[-1:]), f"status {done.returncode}")
    return f"no chromium, and apt-get could not install it ({problem}); the tests in a browser skip"


if __name__ == "__main__":
    raise SystemExit(main())
