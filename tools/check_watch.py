#!/usr/bin/env python3
"""Trains a small run, opens the page of `taper watch` in headless Chromium and uses it as a person would.

    python tools/check_watch.py target/release/taper [--shots FOLDER] [--chromium PATH]

Fails on console errors, on any request to elsewhere, on curves that do not grow while the run trains, on switches and ticks that do
not do their work or do not last, on a stop button that does not leave a checkpoint, on a page wider than a phone, and on an answer
to a request without the token. --shots keeps screenshots. Needs Python's standard library and a Chromium.
"""
import argparse
import http.client
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse

sys.dont_write_bytecode = True
from check_report import NAMES, PATIENCE, Browser

RECIPE = """
name: watched
data: {name: mnist, batch_size: 64}
model: {name: mlp, hidden: [64]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 500, log_every: 50, probe: true, checkpoint: {every_epochs: 100}}
"""


def until(what, holds):
    """Waits until something holds."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.2)
    print(f"error: in {PATIENCE} seconds not seen: {what}", file=sys.stderr)
    return False


def status(url, **headers):
    """The status and the length of the answer to a bare request."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.request("GET", parts.path, headers=headers)
    answer = connection.getresponse()
    return answer.status, len(answer.read())


def check(browser, taper, folder, url, shots):
    """What is wrong, one line each."""
    faults = []
    demand = lambda holds, fault: holds or faults.append(fault)
    base = url.split("/?")[0]
    for path in ["/", "/list", "/view", "/style.css", "/script.js", "/nothing"]:
        demand(status(base + path) == (403, 0), f"{path} without the token is answered")
    wrong = {"Cookie": "taper-watch-" + base.rsplit(":", 1)[1] + "=" + "0" * 32}
    demand(status(base + "/", **wrong) == (403, 0), "a wrong token is answered")

    browser.open(url)
    browser.look(1400)
    points = "Math.max(0, ...[...document.querySelectorAll('[data-id=figures1] .view:not([hidden]) script')]" \
             ".flatMap(s => JSON.parse(s.textContent).series.map(l => l.x.length ? l.x[l.x.length - 1] : 0)))"
    demand(until("curves by step", lambda: browser.value(points) > 0), "there are no curves")
    demand(browser.value("location.search") == "", "the token stays in the address")
    first = browser.value(points)
    demand(until("curves that grow", lambda: browser.value(points) > first), "the curves do not grow")
    demand(until("an epoch", lambda: browser.value("document.querySelectorAll('[data-id=figures0] .panel').length") > 1),
           "there is no learning curve")
    demand("running" in browser.value("document.querySelector('.workers').innerText"), "the run is not said to run")
    demand("load" in browser.value("document.getElementById('machine').innerText"), "the machine's load is not said")

    # A switch lasts while the figure is drawn anew.
    browser.value("document.querySelector('[data-id=figures1] [data-switch=log]').click()")
    first = browser.value(points)
    until("a new drawing", lambda: browser.value(points) > first)
    demand(browser.value("document.querySelector('[data-id=figures1] [data-switch=log]').checked && "
                         "document.querySelector('[data-id=figures1] .view[data-log=\"1\"]:not([hidden])') !== null"),
           "the log axis is lost when the figure is drawn anew")
    # Another run beside it, and without it again; a filter.
    boxes = "document.querySelectorAll('#runs input').length"
    demand(browser.value(boxes) == 2, "not both runs are listed")
    browser.value("[...document.querySelectorAll('#runs li')].find(l => !l.innerText.startsWith('watched')).querySelector('input').click()")
    demand(until("both runs", lambda: browser.value("document.querySelectorAll('.workers tbody tr').length") == 2),
           "a run that is ticked is not shown")
    demand(until("their grid", lambda: browser.value("document.querySelector('.grid') !== null")), "there is no grid")
    browser.value("(() => { const f = document.getElementById('filter'); f.value = 'finished'; f.dispatchEvent(new Event('input')); })()")
    demand(browser.value(boxes) == 1, "the filter does not filter")
    browser.value("(() => { const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input')); })()")

    for width, dark in [(400, False), (400, True), (1400, False), (1400, True)]:
        browser.look(width, dark)
        time.sleep(1.5)
        wide = browser.value("document.documentElement.scrollWidth")
        demand(wide <= width, f"at {width} pixels the page is {wide} wide")
        if shots:
            browser.shot(shots / f"watch-{width}-{'dark' if dark else 'light'}.png")
    browser.look(1400)

    # The button is Ctrl-C: a checkpoint, and the page says so.
    run = next(folder.glob("runs/watched-*"))
    until("the button", lambda: browser.value("document.querySelector('[data-stop]') !== null"))
    browser.value("document.querySelector('[data-stop]').click()")
    demand(until("the run's end", lambda: (run / "summary.json").exists()), "the run was not stopped")
    demand(json.loads((run / "summary.json").read_text())["status"] == "interrupted", "it was not an interruption")
    demand(any((run / "checkpoints").iterdir()), "it left no checkpoint")
    demand(until("the word", lambda: "stopped" in browser.value("document.querySelector('.workers').innerText")),
           "the page does not say that the run stopped")
    demand("asked to stop" in browser.value("document.getElementById('said').innerText"), "the click is not answered")

    # A folder that goes away while it is watched.
    shutil.rmtree(run)
    demand(until("that it is gone", lambda: "is gone" in browser.value("document.getElementById('sections').innerText")),
           "the page does not say that a folder is gone")
    demand(browser.value("document.getElementById('connection').hidden"), "the page lost its server")

    for event in browser.events:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            faults.append(f"exception: {params['exceptionDetails'].get('exception', {}).get('description')}")
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            faults.append(f"console: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            faults.append(f"console: {params['args']}")
        elif event["method"] == "Network.requestWillBeSent":
            to = params["request"]["url"]
            if not to.startswith("data:") and not to.startswith(base + "/"):
                faults.append(f"a request to {to}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("taper", type=pathlib.Path)
    parser.add_argument("--shots", type=pathlib.Path)
    parser.add_argument("--chromium")
    args = parser.parse_args()
    program = args.chromium or next(filter(None, map(shutil.which, NAMES)), None)
    if not program:
        print("no chromium: the page was not opened", file=sys.stderr)
        return 3
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    taper = args.taper.resolve()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = pathlib.Path(place)
        (folder / "watched.yaml").write_text(RECIPE)
        train = [taper, "train", "watched.yaml", "--offline", "--quiet"]
        sets = ["name=before", "train.epochs=2", "optimizer.lr=0.003"]
        subprocess.run([*train, *[word for pair in sets for word in ("--set", pair)]], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)
        training = subprocess.Popen(train, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        watching = subprocess.Popen([taper, "watch", "runs", "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True,
                                    stderr=subprocess.DEVNULL)
        browser = Browser(program, str(folder / "profile"))
        try:
            faults = check(browser, taper, folder, watching.stdout.readline().strip(), args.shots)
        finally:
            browser.close()
            for process in (training, watching):
                process.kill()
                process.wait()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print("the page of watch: " + ("with faults" if faults else "as it should be"), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
