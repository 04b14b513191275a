#!/usr/bin/env python3
"""Opens a report's page in headless Chromium and uses it as a reader would.

    python tools/check_report.py report.html [--shots FOLDER] [--chromium PATH]

Fails on console errors, on any request but the file itself, on switches, series and hover that do not do their work, on
pictures without a text alternative, and on a page wider than a phone. --shots keeps screenshots: 400 and 1400 pixels
wide, light and dark, and as printed. Needs Python's standard library and a Chromium.
"""
import argparse
import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile

NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"]

# Seconds after which a browser that says nothing is taken for dead.
PATIENCE = 300


class Browser:
    """Chromium spoken to through a pair of pipes: JSON messages that end in a zero byte."""

    def __init__(self, program, profile):
        read_theirs, self.write_end = os.pipe()
        self.read_end, write_theirs = os.pipe()
        # Chromium reads messages from descriptor 3 and writes to 4.
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", str(read_theirs), str(write_theirs), program, *flags],
            pass_fds=(read_theirs, write_theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_theirs)
        os.close(write_theirs)
        self.number, self.buffer, self.events, self.session = 0, b"", [], None

    def message(self):
        while b"\0" not in self.buffer:
            if not select.select([self.read_end], [], [], PATIENCE)[0]:
                raise SystemExit(f"error: the browser said nothing for {PATIENCE} seconds")
            chunk = os.read(self.read_end, 1 << 20)
            if not chunk:
                raise SystemExit("error: the browser ended")
            self.buffer += chunk
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write_end, json.dumps(request).encode() + b"\0")
        while True:
            found = self.message()
            if found.get("id") == self.number:
                if "error" in found:
                    raise SystemExit(f"error: {method}: {found['error']}")
                return found["result"]
            if "method" in found:
                self.events.append(found)

    def wait(self, method):
        while not any(event["method"] == method for event in self.events):
            found = self.message()
            if "method" in found:
                self.events.append(found)

    def value(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise SystemExit(f"error: {script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def look(self, width, dark=False, media=""):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)

    def shot(self, path, whole=True):
        """The whole page, or what is in sight."""
        params = {"format": "png"}
        if whole:
            width, height = self.value("[window.innerWidth, document.documentElement.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, 16000), "scale": 1}
            params |= {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **params)["data"]))

    def mouse(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
        finally:
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def check(browser, page, shots):
    """What is wrong with the page, one line each."""
    faults = []
    demand = lambda holds, fault: holds or faults.append(fault)
    browser.open(page.as_uri())
    browser.look(1400)
    figures = browser.value("document.querySelectorAll('figure').length")
    charts = browser.value("document.querySelectorAll('.panel svg').length")
    demand(figures > 0 and charts > 0, "the page has no figure")
    unnamed = "[...document.querySelectorAll('.panel svg')].filter(s => !s.querySelector('title')?.textContent || " \
              "!s.querySelector('desc')?.textContent || s.getAttribute('role') !== 'img').length"
    demand(browser.value(unnamed) == 0, "a picture has no text alternative")
    demand(browser.value("[...document.querySelectorAll('figure')].every(f => f.querySelector('details.data table'))"),
           "a figure has no table of its numbers")

    # Series: every box hides its lines, and shows them again.
    boxes = browser.value("document.querySelectorAll('[data-series]').length")
    for i in range(boxes):
        hidden = f"""(() => {{
            const box = document.querySelectorAll('[data-series]')[{i}], figure = box.closest('figure');
            const lines = () => [...figure.querySelectorAll('.series')].filter(g => g.dataset.name === box.dataset.series);
            const seen = () => lines().filter(g => getComputedStyle(g).display !== 'none').length;
            const before = seen(); box.click(); const off = seen(); box.click();
            return before > 0 && off === 0 && seen() === before;
        }})()"""
        demand(browser.value(hidden), f"series box {i} does not hide and show its lines")
    # Switches: every one changes which view is shown, in at least one panel, and back.
    switches = browser.value("document.querySelectorAll('[data-switch]').length")
    for i in range(switches):
        changed = f"""(() => {{
            const box = document.querySelectorAll('[data-switch]')[{i}], figure = box.closest('figure');
            const shown = () => [...figure.querySelectorAll('.view')].map(v => v.hidden).join();
            const one = () => [...figure.querySelectorAll('.panel')].every(p => p.querySelectorAll('.view:not([hidden])').length === 1);
            const before = shown(); box.click(); const after = shown(), single = one(); box.click();
            return before !== after && single && shown() === before;
        }})()"""
        demand(browser.value(changed), f"switch {i} does not change the view")
    # Hover: values appear under the pointer and go away; arrow keys do the same.
    for i in range(figures):
        place = browser.value(f"""(() => {{
            const svg = [...document.querySelectorAll('figure')][{i}].querySelector('.view:not([hidden]) svg[data-x]');
            if (!svg) return null;
            svg.scrollIntoView({{block: 'center'}});
            const box = svg.getBoundingClientRect();
            return [box.left + box.width * .55, box.top + box.height * .5];
        }})()""")
        if not place:
            continue
        browser.mouse(*place)
        text = browser.value("document.querySelector('.tip')?.innerText ?? ''")
        demand(any(c.isdigit() for c in text) and "\n" in text, f"no values under the pointer in figure {i + 1}: {text!r}")
        if shots and i == 0:
            browser.shot(shots / "hover.png", whole=False)
        browser.mouse(1, 1)
        demand(browser.value("!document.querySelector('.tip')"), f"the values of figure {i + 1} stay when the pointer leaves")
    keyed = browser.value("""(() => {
        const svg = document.querySelector('.view:not([hidden]) svg[data-x]');
        if (!svg) return true;
        svg.focus();
        svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));
        const shown = !!document.querySelector('.tip');
        svg.blur();
        return shown && !document.querySelector('.tip');
    })()""")
    demand(keyed, "arrow keys show no values")

    looks = [(400, False, ""), (400, True, ""), (1400, False, ""), (1400, True, ""), (800, False, "print"), (800, True, "print")]
    for width, dark, media in looks:
        browser.look(width, dark, media)
        wide = browser.value("document.documentElement.scrollWidth")
        demand(wide <= width, f"at {width} pixels the page is {wide} wide")
        name = f"{width}-{'dark' if dark else 'light'}{'-print' if media else ''}"
        ground = browser.value("getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in ground[4:-1].split(",")[:3]) > 600
        demand(light == (not dark or media == "print"), f"{name}: the ground is {ground}")
        # Paper is white in the dark too: that look is checked, and its picture is the other's.
        if shots and not (dark and media):
            browser.shot(shots / f"{name}.png")

    for event in browser.events:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            faults.append(f"exception: {params['exceptionDetails'].get('exception', {}).get('description')}")
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            faults.append(f"console: {params['entry']['text']}")
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            faults.append(f"console: {params['args']}")
        elif event["method"] == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith("data:") and url != page.as_uri():
                faults.append(f"a request to {url}")
    print(f"{page.name}: {figures} figures, {charts} pictures, {boxes} series, {switches} switches", file=sys.stderr)
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--shots", type=pathlib.Path)
    parser.add_argument("--chromium")
    args = parser.parse_args()
    program = args.chromium or next(filter(None, map(shutil.which, NAMES)), None)
    if not program:
        print("no chromium: the page was not opened", file=sys.stderr)
        return 3
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            faults = check(browser, args.page.resolve(), args.shots)
        finally:
            browser.close()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
