"""What the page's server answers, and whom: tokens, names, bad input, and paths that lead elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from ui_kit import write_run

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.training.storage.files import OutputLock, json_line
from megatune.ui.app import App

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first", settings={"seed": 7})
    return tmp_path / "runs"


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(App(root).asgi(), base_url="http://localhost") as client:
        yield client


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    imports = json.loads(re.search(r'<script type="importmap">(.*?)</script>', page.text)[1])["imports"]
    files = [*imports.values(), *re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text)]
    assert {"/static/app.js", "/static/vendor/uPlot.iife.min.js", "/static/style.css"} <= {*files}
    assert {client.get(file).status_code for file in files} == {200}
    assert "http:" not in page.text.replace("http://www.w3.org", "")
    assert "https:" not in page.text


def test_what_a_run_left_behind(client: TestClient, root: Path) -> None:
    def ask(question: str, **asked: str) -> object:
        answer = client.get(f"/api/{question}", params={"run": "first", **asked})
        assert answer.status_code == 200, answer.text
        return answer.json()

    settings = {each["key"]: each for each in ask("settings")}
    assert settings["seed"] == {"group": "run", "key": "seed", "value": "7", "origin": "override"}
    assert settings["lora_rank"]["origin"] == "default"
    assert ask("series", keys="loss")["curves"]["loss"][1][-1] == 20
    (checkpoint,) = ask("checkpoints")
    assert (checkpoint["name"], checkpoint["step"], checkpoint["problem"]) == ("checkpoint-20", 20, "")
    assert "launch/logs/rank-0.log" in [each["name"] for each in ask("logs")]
    log = ask("log", name="launch/logs/rank-0.log")
    assert log["text"] == "first line\nlast line\n"
    with (root / "first" / "launch/logs/rank-0.log").open("a") as file:
        file.write("new\n")
    assert ask("log", name="launch/logs/rank-0.log", start=str(log["end"]))["text"] == "new\n"
    assert "it has no plan" in ask("plan")["said"][0]
    assert len(client.get("/api/machine").json()["cpus"]) > 0


def test_gpus_as_the_driver_lists_them(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"  # what that of an H100 prints
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 87, 60000, 81559, 61, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (gpu,) = client.get("/api/machine").json()["gpus"]
    assert gpu.pop("name") == "NVIDIA H100 80GB HBM3"
    assert gpu == {"index": "0", "use": 87, "used": 60000, "total": 81559, "heat": 61, "power": None}


def test_a_checkpoint_is_verified(client: TestClient, root: Path) -> None:
    def verify() -> list[str]:
        return client.post("/api/verify", json={"run": "first", "checkpoint": "checkpoint-20"}).json()["problems"]

    assert verify() == []
    weights = root / "first" / "checkpoint-20" / "model.safetensors"
    weights.write_bytes(b"Weights" + weights.read_bytes()[7:])
    assert verify() == ["model.safetensors is damaged: its digest does not match"]


def test_samples_of_reinforcement_learning(client: TestClient, root: Path) -> None:
    run = root / "rl"
    (run / "launch").mkdir(parents=True)
    (run / "dumps").mkdir()
    (run / "run.yaml").write_text(
        "pretrain: tiny  # a.yaml:1\nrollout_dump_dir: dumps  # a.yaml:2\nactor:\n  lr: 1  # flag\n"
    )
    for step in (1, 2):
        sample = {"step": step, "prompt": "1+1", "response": str(step), "score": 1.0, "reward/format": 0.5}
        (run / "dumps" / f"step-{step:06d}.jsonl").write_text(json.dumps(sample) + "\n")
    last = client.get("/api/samples", params={"run": "rl"}).json()
    assert (last["steps"], last["step"], last["samples"][0]["response"]) == ([1, 2], 2, "2")
    assert client.get("/api/samples", params={"run": "rl", "step": "1"}).json()["samples"][0]["response"] == "1"
    keys = {each["key"]: each["origin"] for each in client.get("/api/settings", params={"run": "rl"}).json()}
    assert keys["actor.lr"] == "flag"


def test_answers_that_were_written_during_training(client: TestClient, root: Path) -> None:
    run = write_run(root / "answers")
    answers = [{"step": step, "id": number, "prompt": "1+1", "response": f"{step}.{number}", "label": None,
                "score": None} for step in (10, 20) for number in (0, 1)]  # fmt: skip
    whole = "".join(map(json_line, answers))
    (run / "generations.jsonl").write_text(whole + '{"step": 30, "id": 0, "prompt')
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json_line({"step": 20, "eval_loss": None, "eval_exact_match": 0.5, "eval_seconds": 1.0}))
    last = client.get("/api/samples", params={"run": "answers"}).json()
    assert (last["steps"], [each["response"] for each in last["samples"]]) == ([10, 20], ["20.0", "20.1"])
    first = client.get("/api/samples", params={"run": "answers", "step": "10"}).json()
    assert [each["response"] for each in first["samples"]] == ["10.0", "10.1"]
    (entry,) = [each for each in client.get("/api/runs").json()["runs"] if each["id"] == "answers"]
    assert entry["eval_loss"] == 1.5


@pytest.mark.parametrize(
    ("question", "status", "said"),
    [
        ("/api/nothing?run=first", 404, "'nothing'"),
        ("/api/settings", 400, "run is missing"),
        ("/api/settings?run=second", 404, "'second'"),
        ("/api/settings?run=../..", 404, "'../..'"),
        ("/api/settings?run=/etc", 404, "'/etc'"),
        ("/api/log?run=first&name=../../secret.log", 404, "secret.log"),
        ("/api/log?run=first&name=run.yaml", 404, "run.yaml"),
        ("/api/series?run=first&first=x", 400, "first: expected a whole number, got 'x'"),
        ("/static/../app.py", 404, "Not Found"),
        ("/static/..%2fapp.py", 404, "Not Found"),
    ],
)
def test_bad_questions(client: TestClient, root: Path, question: str, status: int, said: str) -> None:
    (root.parent / "secret.log").write_text("secret")
    answer = client.get(question)
    assert answer.status_code == status
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("stop", {"run": "first"}, 409, "first is not running"),
        ("verify", {"run": "first", "checkpoint": "../first/checkpoint-20"}, 404, "checkpoint-20"),
        ("start", {"file": "../other.yaml"}, 422, "cannot be started"),
        ("start", {"file": "/etc/passwd"}, 422, "cannot be started"),
        ("start", {"file": "missing.yaml"}, 422, "missing.yaml"),
        ("start", {"file": "a.yaml", "overrides": ["--config=x"]}, 400, "expected key=value"),
        ("start", {"file": 1}, 400, "expected a string"),
        ("delete", {"run": "first"}, 404, "'delete'"),
    ],
)
def test_bad_requests(client: TestClient, name: str, body: dict, status: int, said: str) -> None:
    answer = client.post(f"/api/{name}", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]


def test_bodies(client: TestClient, root: Path) -> None:
    # Web pages of others may send forms and texts, but no JSON.
    assert client.post("/api/stop", content='{"run": "first"}').status_code == 415
    assert client.post("/api/stop", content="{", headers=JSON).status_code == 400
    assert client.post("/api/stop", content="[]", headers=JSON).status_code == 400
    assert client.post("/api/stop", content=b" " * 2_000_000, headers=JSON).status_code == 413
    with TestClient(App(root, read_only=True).asgi(), base_url="http://localhost") as reader:
        assert reader.post("/api/verify", json={"run": "first", "checkpoint": "checkpoint-20"}).status_code == 403
        assert '"read_only": true' in reader.get("/").text


def test_findings_before_a_run_starts(client: TestClient, root: Path) -> None:
    (root.parent / "wrong.yaml").write_text("stage: sft\nlearning_rat: 1e-5\nlora_rank: -1\n")
    answer = client.post("/api/start", json={"file": "wrong.yaml", "overrides": []}).json()
    assert answer["number"] is None
    places = {each["where"]: each for each in answer["findings"]}
    assert "learning_rate" in places["wrong.yaml:2"]["fix"]
    assert "wrong.yaml:3" in places
    assert client.get("/api/started").json() == []


def test_a_form_is_told_what_is_wrong_by_its_fields(client: TestClient, root: Path) -> None:
    make_checkpoint("qwen3", root.parent / "model")
    (root.parent / "my.csv").write_text("instruction,output\nWho are you?,I am Ada.\n" * 2)
    offers = client.get("/api/offers").json()
    assert (offers["models"], offers["data"]) == (["model"], ["my.csv"])
    assert "h100-80g" in offers["gpus"]

    def wrong(**asked: object) -> dict[str, str]:
        answer = client.post("/api/draft", json={"model": "model", "data": "my.csv", **asked}).json()
        assert answer["run"] is None
        return {name: findings[0]["what"] for name, findings in answer["wrong"].items()}

    assert wrong(model="", data="") == {"model": "which model?", "data": "which data?"}
    assert wrong(output="../new.yaml").keys() == {"output"}
    (root.parent / "there.yaml").write_text("")
    several = wrong(model="modle", data="yours.csv", gpus="8", gpu="h1000", output="there.yaml")
    assert several.keys() == {"model", "data", "gpu", "output"}
    assert "no device 'h1000'" in several["gpu"]
    assert wrong(goal="dpo").keys() == {"goal"}
    assert wrong(gpus="many", gpu="h100-80g").keys() == {"gpus"}
    assert "does not fit" in wrong(model="Qwen3-30B-A3B", goal="full", gpus=1, gpu="rtx-4090")["gpu"]


def test_a_form_writes_what_was_planned(client: TestClient, root: Path) -> None:
    make_checkpoint("qwen3", root.parent / "model")
    sums = {"prompt": "2 + 3 =", "ground_truth": "5"}
    (root.parent / "sums.jsonl").write_text(json.dumps(sums))
    asked = {"model": "model", "data": "sums.jsonl", "gpus": 8, "gpu": "h100-80g"}
    run = client.post("/api/draft", json=asked).json()["run"]
    assert (run["goal"], run["here"]) == ("rl", False)
    assert "--gpus 8 --gpu h100-80g" in run["command"]
    (row,) = client.post("/api/first_rows", json=asked).json()["rows"]
    assert "ground_truth" in row["parts"][0]["texts"][0][0]
    assert client.post("/api/write", json={"file": "../no.yaml", "text": run["text"]}).status_code == 422
    broken = client.post("/api/write", json={"file": run["file"], "text": run["text"] + "max_step: 3\n"}).json()
    assert "max_steps" in broken["findings"][0]["fix"]
    assert not (root.parent / run["file"]).exists()
    written = client.post("/api/write", json={"file": run["file"], "text": run["text"]}).json()
    assert written == {"findings": [], "number": None, "run": "model-rl"}
    assert (root.parent / run["file"]).read_text() == run["text"]
    assert client.get("/api/started").json() == []


def test_a_run_is_asked_to_stop(client: TestClient, root: Path) -> None:
    with OutputLock(root / "first"):
        assert client.post("/api/resume", json={"run": "first"}).status_code == 409
        assert client.post("/api/stop", json={"run": "first"}).json() == {"asked": True}
        assert (root / "first" / "STOP").exists()


def test_who_may_ask(root: Path) -> None:
    with TestClient(App(root).asgi(), base_url="http://elsewhere.example") as client:
        assert client.get("/api/runs").status_code == 403  # a page of that name led the browser here
    with TestClient(App(root, "a token").asgi(), base_url="http://elsewhere.example", follow_redirects=False) as client:
        assert client.get("/").status_code == 401
        assert client.get("/?token=another").status_code == 401
        assert client.post("/api/stop", json={"run": "first"}).status_code == 401
        assert client.get("/api/runs", headers={"Authorization": "Bearer a token"}).status_code == 200
        come = client.get("/?token=a+token")
        assert (come.status_code, come.headers["location"]) == (303, "/")
        assert "HttpOnly" in come.headers["set-cookie"]
        assert "SameSite=strict" in come.headers["set-cookie"]
        assert client.get("/api/runs").status_code == 200  # by the cookie


def test_the_server_as_a_process(root: Path) -> None:
    command = [sys.executable, "-m", "megatune", "ui", str(root), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        assert re.search(r"http://0\.0\.0\.0:\d+/\?token=[\w-]{30,}$", line.strip()), line
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == ExitCode.DONE
    finally:
        process.kill()
        process.stderr.close()


def test_the_command_line_refuses(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "missing"]) == ExitCode.INPUT
    assert main(["ui", str(root), "--token", ""]) == ExitCode.SETTINGS
    assert main(["ui", str(root), "--prot", "1"]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "missing is not a folder" in said
    assert "--port" in said
    assert "Traceback" not in said


def test_a_report(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root / "second", settings={"seed": 8, "run_name": "</script><b>"})
    output = root / "out" / "report.html"
    assert main(["report", str(root / "first"), str(root / "second"), "-o", str(output)]) == ExitCode.DONE
    text = output.read_text(encoding="utf-8")
    given = json.loads(re.search(r'<script id="given" type="application/json">(.*?)</script>', text, re.DOTALL)[1])
    answers = given["answers"]
    assert [run["id"] for run in answers["runs"]["runs"]] == ["first", "second"]
    assert answers["series?run=second"]["curves"]["loss"][1][-1] == 20
    assert {each["key"]: each["value"] for each in answers["settings?run=second"]}["run_name"] == "</script><b>"
    assert answers["log?run=first&name=launch%2Flogs%2Frank-0.log"]["text"].endswith("last line\n")
    assert not re.findall(r'(?:src|href)="(?!data:)', text)  # everything is in it
    assert "Leon Sorokin" in text  # and the licences, too


def test_a_report_refuses(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(root), "nowhere"]) == ExitCode.INPUT
    assert main(["report", str(root / "first"), "-o", "report.pdf"]) == ExitCode.SETTINGS
    assert main(["report"]) == ExitCode.SETTINGS
    (root / "file").write_text("")
    assert main(["report", str(root / "first"), "-o", str(root / "file" / "report.html")]) == ExitCode.CANNOT_WRITE
    said = capsys.readouterr().err
    assert "nowhere is not the folder of a run" in said
    assert "no run is given" in said
    assert "Traceback" not in said
