"""How soon `megatune ui` shows 200 runs with 100,000 logged steps each in a real browser, and what polls cost."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reporting import add_output_flag, finish
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from megatune.config.load import dump, load

MEGATUNE = [sys.executable, "-m", "megatune"]
LIMIT = 120.0  # seconds that anything here may take
_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_LISTED = "return document.querySelectorAll('.run').length === arguments[0] ? performance.now() : 0"
_CURVE = "return document.querySelector('[data-chart=loss] canvas') ? performance.now() : 0"
_SIZES = "return [document.querySelectorAll('*').length, performance.memory.usedJSHeapSize]"


def write_metrics(path: Path, steps: int) -> None:
    """Write a metrics.jsonl of a line a step, with the keys that a run writes."""
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            record = {
                "load_balancing_loss": None, "z_loss": None, "step": step, "total_steps": steps, "epoch": step / 1000,
                "loss": 1 + 5 * math.exp(-step / 9000) + 0.1 * math.sin(step), "learning_rate": 1e-5,
                "grad_norm": 1 + 0.2 * math.cos(step), "num_tokens": 81920, "num_input_tokens": 131072, "seconds": 1.5,
                "data_seconds": 0.01, "unreadable_pictures": 0, "tokens_per_second": 87381.3, "model_tflops": 400.1,
                "mfu": 0.4, "memory_gib": 61.2, "num_steps": 1, "num_skipped": 0, "elapsed_seconds": step * 1.5,
                "eta_seconds": (steps - step) * 1.5,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def write_runs(folder: Path, runs: int, steps: int) -> int:
    """Write runs below a folder; their logs are links to one file, so that it needs little disk. Return its bytes."""
    source = folder / "metrics.jsonl"
    write_metrics(source, steps)
    loaded = load(None, ["learning_rate=1e-5", "model_name_or_path=Qwen3-8B"])
    run_yaml = dump(loaded.settings, loaded.origins)
    for number in range(runs):
        run = folder / "runs" / f"run-{number:03d}"
        (run / "launch").mkdir(parents=True)
        (run / "run.yaml").write_text(run_yaml, encoding="utf-8")
        os.link(source, run / "metrics.jsonl")
    return source.stat().st_size


def open_browser() -> webdriver.Chrome:
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not (browser and driver):
        sys.exit("chromium and chromedriver are needed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    switches = ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "enable-precise-memory-info")
    for switch in (*switches, "js-flags=--expose-gc"):
        options.add_argument(f"--{switch}")
    return webdriver.Chrome(options=options, service=Service(driver))


def measure(folder: Path, driver: webdriver.Chrome, runs: int, seconds: float) -> dict[str, float]:
    """Start a server, open its page, and leave it open for a while; times in milliseconds."""
    process = subprocess.Popen([*MEGATUNE, "ui", "runs", "--port", "0"], cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = re.search(r"http://\S+", process.stderr.readline())
        assert address is not None
        driver.get(address[0])
        wait = WebDriverWait(driver, LIMIT, poll_frequency=0.02)
        found = {"list": wait.until(lambda _: driver.execute_script(_LISTED, runs))}
        found["paint"] = driver.execute_script(_PAINT)
        found["curve"] = wait.until(lambda _: driver.execute_script(_CURVE))
        for moment in ("before", "after"):
            time.sleep(1.0 if moment == "before" else seconds)
            driver.execute_script("gc()")
            found[f"nodes {moment}"], found[f"heap {moment}"] = driver.execute_script(_SIZES)
        return found
    finally:
        process.terminate()
        process.wait(LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times that a page is opened (5)")
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="runs in the list (200)")
    parser.add_argument("--steps", type=int, default=100_000, metavar="N", help="logged steps of each (100,000)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for which a page is left open (20)")
    add_output_flag(parser)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        size = write_runs(Path(name), arguments.runs, arguments.steps)
        driver = open_browser()
        try:
            found = [measure(Path(name), driver, arguments.runs, arguments.seconds) for _ in range(arguments.rounds)]
        finally:
            driver.quit()

    def row(what: str, key: str, unit: str, scale: float = 1.0) -> tuple[str, str, str]:
        values = [each[key] / scale for each in found]
        return what, f"{statistics.median(values):,.1f} {unit}", f"{min(values):,.1f} to {max(values):,.1f}"

    rows = [
        row("first paint", "paint", "ms"),
        row("the whole list", "list", "ms"),
        row("the curves of a run", "curve", "ms"),
        row("elements of the page, 1 s later", "nodes before", ""),
        row(f"after {arguments.seconds:g} s more of polls", "nodes after", ""),
        row("memory of the page, 1 s later", "heap before", "MiB", 2**20),
        row(f"after {arguments.seconds:g} s more of polls", "heap after", "MiB", 2**20),
    ]
    note = (
        f"{arguments.runs} runs of {arguments.steps:,} logged steps, {size / 2**20:.0f} MiB each: links to one file, "
        f"which the system has in its cache. Medians of {arguments.rounds} rounds, each with a new server; times are "
        "from the request for the page, in headless Chromium."
    )
    finish("ui-first-paint", "First paint of the web page", ("what", "median", "range"), rows, note, arguments.output)


if __name__ == "__main__":
    main()
