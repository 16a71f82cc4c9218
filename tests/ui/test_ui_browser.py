"""The page in a real browser: a run started, followed, stopped and resumed; comparisons, pictures, pairs, a report.

MEGATUNE_WRITE_SCREENSHOTS=1 writes the pictures of docs/ui.md anew.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from ui_kit import evaluation, record, write_run

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.training.storage.files import json_line

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
SECONDS = 180  # for anything to appear on the page, on a machine that is busy
BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with chromedriver is installed")

LIVE = """\
stage: sft
model_name_or_path: model
dataset_dir: data
dataset: identity
template: qwen3_nothink
model_name: Tuna
model_author: the megatune team
cutoff_len: 128
num_processes: 1
use_cpu: true
per_device_train_batch_size: 4
max_steps: 600
learning_rate: 3.0e-3
val_size: 8
eval_strategy: steps
eval_steps: 40
logging_steps: 1
save_strategy: "no"
report_to: none
output_dir: runs/live
"""


_FIND = "return [...document.querySelectorAll(arguments[0])].find((each) => each.textContent.includes(arguments[1]))"


class Page:
    """The page of one server, as somebody sees it."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, hash_: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#{hash_}")

    def find(self, css: str, text: str = "", seconds: float = SECONDS) -> WebElement:
        """Wait until the page shows an element with a text."""

        def found(driver: webdriver.Chrome) -> WebElement | bool:
            # One look in the page: an element may be replaced between two questions about it.
            return driver.execute_script(_FIND, css, text) or False

        try:
            return WebDriverWait(self.driver, seconds, poll_frequency=0.2).until(found)
        except Exception as error:
            seen = self.driver.find_element(By.TAG_NAME, "body").text
            raise AssertionError(f"no {css} with {text!r} on the page:\n{seen}") from error

    def click(self, css: str) -> None:
        self.driver.execute_script("arguments[0].click()", self.find(css))

    def write(self, css: str, text: str) -> None:
        element = self.find(css)
        element.clear()
        element.send_keys(text)

    def steps(self) -> int:
        return int(self.find(".facts b", " / ").text.split(" / ")[0].replace(",", ""))

    def wait(self, is_so: Callable[[], bool]) -> None:
        WebDriverWait(self.driver, SECONDS, poll_frequency=0.2).until(lambda _: is_so())

    def errors(self) -> list[str]:
        return [each["message"] for each in self.driver.get_log("browser") if each["level"] == "SEVERE"]

    def shoot(self, name: str) -> None:
        """Take a picture of the page; keep it in the documents where that is asked for."""
        picture = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        assert len(picture.getcolors(1 << 24) or ()) > 20, "an empty page"
        if os.environ.get("MEGATUNE_WRITE_SCREENSHOTS") == "1":
            picture.quantize(96, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    profile = tmp_path_factory.mktemp("profile")
    switches = ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "lang=en-US", "hide-scrollbars")
    for switch in (
        *switches,
        "window-size=1360,960",
        f"user-data-dir={profile}",
        "blink-settings=preferredColorScheme=1",
    ):
        options.add_argument(f"--{switch}")
    options.binary_location = str(BROWSER)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(SECONDS)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server works: models, data, a settings file, and runs that have ended."""
    folder = tmp_path_factory.mktemp("ui")
    make_checkpoint("qwen3", folder / "model")
    make_checkpoint("qwen3_vl", folder / "vl-model")
    shutil.copytree(ROOT / "examples/demo", folder / "data")
    shapes = [sys.executable, str(ROOT / "examples/vision/shapes.py"), str(folder / "shapes")]
    subprocess.run(shapes, check=True, timeout=60, capture_output=True)
    (folder / "live.yaml").write_text(LIVE)
    pair = {"conversations": [{"from": "human", "value": "Name a prime."}],
            "chosen": {"from": "gpt", "value": "Seven."}, "rejected": {"from": "gpt", "value": "Eight."}}  # fmt: skip
    (folder / "pairs.json").write_text(json.dumps([pair]))
    names = {"pairs": {"file_name": "pairs.json", "formatting": "sharegpt", "ranking": True, "columns":
             {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}}}  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(names))
    vision = {"model_name_or_path": "vl-model", "template": "qwen3_vl_nothink", "dataset": "shapes"}
    pairs = {"stage": "dpo", "model_name_or_path": "model", "template": "qwen3_nothink", "dataset": "pairs"}
    write_run(folder / "runs" / "shapes", settings={**vision, "dataset_dir": "shapes"})
    write_run(folder / "runs" / "pairs", settings={**pairs, "dataset_dir": "."})
    write_run(folder / "runs" / "lr-1e-4", steps=600, settings={"learning_rate": 1e-4, "model_name_or_path": "model"})
    write_run(folder / "runs" / "lr-3e-4", steps=600, settings={"learning_rate": 3e-4, "model_name_or_path": "model"})
    evaluations = [evaluation(300, 1.7), evaluation(600, 1.4)]
    faster = [record(step, 600, loss=record(2 * step)["loss"] - 0.1, learning_rate=3e-4) for step in range(1, 601)]
    (folder / "runs" / "lr-3e-4" / "metrics.jsonl").write_text("".join(map(json_line, [*faster, *evaluations])))
    return folder


@pytest.fixture(scope="module")
def page(driver: webdriver.Chrome, folder: Path) -> Iterator[Page]:
    command = [sys.executable, "-m", "megatune", "ui", "runs", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        address = re.search(r"http://\S+", process.stderr.readline())
        assert address
        yield Page(driver, address[0])
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


def test_a_run_is_started_followed_stopped_and_resumed(page: Page, folder: Path) -> None:
    page.open("tab=start")
    page.write("#file", "live.yaml")
    page.write("#changes", "learning_rat=1")
    page.click("#start")
    page.find("[role=alert]", "did you mean learning_rate")  # before anything has started
    assert not (folder / "runs" / "live").exists()
    page.find("#changes").clear()
    page.write("#changes", "seed=3")
    page.click("#start")
    page.find(".good", "These settings are valid")
    page.find("[data-run=live]", "running")
    page.click("[data-run=live]")
    page.find("[data-chart=loss] canvas")
    before = page.steps()
    page.wait(lambda: page.steps() > before + 5)  # it is followed
    page.shoot("ui-run.png")
    page.click("#stop")
    page.driver.switch_to.alert.accept()
    page.find(".head .state", "stopped")
    stopped = page.steps()
    assert stopped < 600
    page.click("#tab-checkpoints")
    page.find("tr", f"checkpoint-{stopped}")
    page.click(".verify")
    page.find("td .good", "complete: every digest matches")
    page.click("#tab-settings")
    page.find("tr", "override")
    page.click("#resume")
    page.find(".head .state", "running")
    page.click("#tab-curves")
    page.find(".head .state", "finished")
    assert page.steps() == 600
    page.find("[data-chart=evaluation] canvas")
    page.click("#tab-plan")
    page.find(".compared .line", "measured")
    page.click("#tab-logs")
    page.find("pre.log")
    assert page.errors() == []


def test_a_new_run_is_planned_mended_and_started(page: Page, folder: Path) -> None:
    (folder / "who.csv").write_text("instruction,output\n" + '"Who are you?","I am Ada."\nHi,Hello!\n' * 20)
    page.open("tab=start")
    page.write("[name=model]", "modle")
    page.write("[name=data]", "whoo.csv")
    page.find("[data-field=data].invalid [role=alert]", "no such file or folder: whoo.csv")
    page.find("[data-field=model].invalid [role=alert]", "modle")
    page.write("[name=model]", "model")
    page.write("[name=data]", "who.csv")
    page.find("#plan", "full fine-tuning")
    page.find(".new .trained", "I am Ada.")  # the first rows
    assert not page.driver.find_elements(By.CSS_SELECTOR, ".new [role=alert]")
    page.shoot("ui-new.png")
    yaml = page.find("#yaml")
    yaml.send_keys("learning_rat: 1\n")
    page.click("#begin")
    page.find(".new [role=alert]", "did you mean learning_rate")  # of what was edited, at its line
    assert not (folder / "model-full.yaml").exists()
    yaml.send_keys(Keys.BACKSPACE * len("learning_rat: 1\n") + "max_steps: 3\n")
    page.click("#begin")
    page.find(".head h2", "model-full")  # the page of the run
    page.find(".head .state", "finished")
    assert page.steps() == 3
    assert (folder / "runs/model-full/model.safetensors").is_file()
    assert page.errors() == []


def test_a_page_that_is_left_open_does_not_grow(page: Page, folder: Path) -> None:
    from megatune.training.storage.files import OutputLock

    run = write_run(folder / "runs" / "open", steps=200)
    with OutputLock(run), (run / "metrics.jsonl").open("a") as file:
        page.open("run=open&tab=curves")
        page.find("[data-chart=loss] canvas")
        counts = []
        for polls in range(4):
            step = 200 + 5000 * (polls + 1)
            file.writelines(json_line(record(each, 30000)) for each in range(step - 4999, step + 1))
            file.flush()
            page.wait(lambda step=step: page.steps() == step)
            counts.append(page.driver.execute_script("return document.querySelectorAll('*').length"))
    assert len(set(counts[1:])) == 1, counts
    assert page.errors() == []


def test_a_comparison(page: Page) -> None:
    page.open("run=lr-1e-4&tab=curves")
    page.find("[data-chart=loss] canvas")
    page.click("[data-run='lr-3e-4'] input")
    page.find("[data-chart=loss] .u-legend", "lr-3e-4")
    page.find("[data-chart=loss] .u-legend", "lr-1e-4")
    page.click("#theme")
    page.shoot("ui-compare.png")
    page.click("#theme")
    page.click("#tab-settings")
    row = page.find("tbody tr", "learning_rate")
    assert [cell.text for cell in row.find_elements(By.TAG_NAME, "td")] == ["learning_rate", "0.0001", "0.0003"]
    assert page.errors() == []


def test_a_row_with_a_picture_and_a_row_of_a_pair(page: Page) -> None:
    page.open("run=shapes&tab=rows")
    image = page.find(".picture img")
    page.wait(lambda: page.driver.execute_script("return arguments[0].naturalWidth", image) > 0)
    page.find("pre.row .trained")
    page.find("pre.row .special", "<|image_pad|> ×")
    page.shoot("ui-picture.png")
    page.open("run=pairs&tab=rows")
    assert "Seven" in page.find(".pair .chosen .trained", "Seven").text
    assert "Seven" not in page.find(".pair .rejected", "Eight").text
    page.find(".part.prompt", "Name a prime.")
    assert page.errors() == []


def test_the_page_in_chinese(page: Page) -> None:
    page.open("run=lr-1e-4&tab=curves")
    page.click("#language")
    page.find("#tab-checkpoints", "检查点")
    page.find(".head .state", "已完成")
    page.click("#tab-machine")
    page.find(".line", "处理器")
    page.click("#language")
    page.find("#tab-machine", "Machine")


def test_a_report_needs_no_server(driver: webdriver.Chrome, folder: Path, tmp_path: Path) -> None:
    runs = [str(folder / "runs" / name) for name in ("lr-1e-4", "lr-3e-4")]
    answer = {"step": 600, "id": 0, "where": "row 1", "prompt": "Who?", "response": "me", "label": "Tuna", "score": 0.0,
              "tokens": 2, "finish": "stop"}  # fmt: skip
    (folder / "runs" / "lr-1e-4" / "generations.jsonl").write_text(json.dumps(answer) + "\n")
    assert main(["report", *runs, "-o", str(tmp_path / "report.html")]) == ExitCode.DONE
    report = Page(driver, (tmp_path / "report.html").as_uri())
    report.errors()
    report.open()
    report.find("[data-chart=loss] .u-legend", "lr-3e-4")
    report.click("#tab-settings")
    report.find("tbody tr", "0.0003")
    for tab in ("plan", "checkpoints", "logs", "samples"):
        report.click(f"#tab-{tab}")
    report.find(".sample .row", "Tuna")
    report.click("#tab-checkpoints")
    report.find("td", "checkpoint-600")
    assert not driver.find_elements(By.CSS_SELECTOR, ".verify, #tab-start, #tab-machine")
    assert report.errors() == []
