"""Sweeps: what is varied, that all of it is checked first, and that finished trials stay.

Trials are real processes; but for one test, what they run is a short program in place of a training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pool_launch import CommandLine

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.sweep import Range, Sweep, Values, grid, name_of, read_space

# Logs a loss that is least at a learning rate of 1e-3, and stops on its first start where it is told to.
PROGRAM = """
import json, math, pathlib, sys
folder, rate, stops = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "stops"
(folder / "launch").mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write("x")
stopped = stops and (folder / "starts").read_text() == "x"
loss = abs(math.log10(rate) + 3)
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\\n")
(folder / "launch/report.json").write_text(json.dumps({"outcome": "stopped" if stopped else "done"}))
sys.exit(75 if stopped else 0)
"""


class ShortTrials(Sweep):
    """Runs the short program."""

    stops: str = ""

    def command(self, values: Values) -> list[str]:
        name = name_of(values)
        stops = "stops" if name == self.stops else "ends"
        return [sys.executable, "-c", PROGRAM, str(self.output / name), values["learning_rate"], stops]


def starts(folder: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text()) for path in folder.glob("*/starts")}


def test_values_and_ranges_are_read() -> None:
    findings: list[Finding] = []
    texts = ["learning_rate=1e-5..1e-3:log", "lora_rank=8,32", "max_steps=2..9", "lora_target=[q_proj, k_proj],all"]
    space = read_space(texts, findings, ranges=True)
    assert findings == []
    assert space["learning_rate"] == Range(1e-5, 1e-3, log=True, whole=False)
    assert space["max_steps"] == Range(2, 9, log=False, whole=True)
    assert space["lora_target"] == ("[q_proj, k_proj]", "all")
    assert len(grid(space)) == 16
    assert name_of(grid(space)[0]) == "learning_rate-1e-05_lora_rank-8_max_steps-2_lora_target--q_proj-k_proj-"
    wrong = ["lr_rate=1", "lora_rank=8,8", "seed=", "max_steps=9..2", "weight_decay=0..1:log", "seed=1..2"]
    read_space(wrong[:-1], findings, ranges=True)
    read_space(wrong[-1:], findings, ranges=False)
    assert [finding.where for finding in findings] == [f"--set {text}" for text in wrong]


def test_a_stopped_trial_resumes_and_finished_ones_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"learning_rate": ("1e-5", "1e-3", "1e-2")}
    sweep = ShortTrials("run.yaml", [], space, tmp_path, parallel=2)
    sweep.stops = "learning_rate-1e-3"
    assert sweep.run() == ExitCode.STOPPED
    again = ShortTrials("run.yaml", [], space, tmp_path)
    again.stops = sweep.stops
    assert again.run() == ExitCode.DONE
    assert starts(tmp_path) == {"learning_rate-1e-5": 1, "learning_rate-1e-3": 2, "learning_rate-1e-2": 1}
    assert "learning_rate-1e-5: finished before, 2" in capsys.readouterr().out
    table = again.table()
    assert [line.split()[0] for line in table[1:4]] == ["1e-3", "1e-2", "1e-5"]
    assert [row["value"] for row in json.loads((tmp_path / "sweep.json").read_text())] == [0.0, 1.0, 2.0]
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def test_trials_are_compared_by_the_metric_that_is_asked_for(tmp_path: Path) -> None:
    space = {"learning_rate": ("1e-5", "1e-3", "1e-2")}
    assert ShortTrials("run.yaml", [], space, tmp_path, metric="step", maximize=True).run() == ExitCode.DONE
    most = ShortTrials("run.yaml", [], space, tmp_path, metric="loss", maximize=True)
    assert most.run() == ExitCode.DONE
    assert [line.split()[:2] for line in most.table()[1:4]] == [["1e-5", "2"], ["1e-2", "1"], ["1e-3", "0"]]
    missing = ShortTrials("run.yaml", [], space, tmp_path, metric="accuracy")
    assert missing.run() == ExitCode.DONE
    assert "no accuracy was logged" in missing.table()[1]
    assert {row["value"] for row in json.loads((tmp_path / "sweep.json").read_text())} == {None}


def test_a_search_comes_nearer_and_repeats_itself(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"learning_rate": Range(1e-6, 1.0, log=True, whole=False)}
    for _ in range(2):
        sweep = ShortTrials("run.yaml", [], space, tmp_path, trials=14)
        assert sweep.run() == ExitCode.DONE
        sweep.table()
    assert set(starts(tmp_path).values()) == {1}  # the second one found all trials finished
    values = [row["value"] for row in json.loads((tmp_path / "sweep.json").read_text())]
    assert len(values) == 14
    assert values[0] < 0.3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "Hi", "output": "Hello!"}\n', encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset: rows.jsonl\nmax_steps: 2\nsave_strategy: 'no'\noutput_dir: out\n"
        "overwrite_output_dir: true\ncutoff_len: 64\nlogging_steps: 1\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_all_trials_are_checked_before_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "run.yaml", "--set", "learning_rate=1e-5,-1"]
    assert main([*words, "--set", "cutoff_len=64,99999"]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "learning_rate is -1" in said
    assert "cutoff_len" in said
    assert "2 problems" in said
    assert not (folder / "out").exists()
    assert main(["sweep", "run.yaml", "--set", "seed=1..9", "--trials", "3"]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "a grid takes values" in said
    assert "--trials" in said
    with pytest.raises(MegatuneError, match="two trials have the folder dataset-a-b"):
        Sweep("run.yaml", [], {"dataset": ("a/b", "a b")}, Path("out")).check()
    with pytest.raises(MegatuneError, match="learning_rate is -1") as refused:
        Sweep("run.yaml", [], {"learning_rate": ("1", "-1"), "seed": ("1", "2")}, Path("out")).check()
    assert len(refused.value.findings) == 1


def test_the_command_of_a_trial_is_a_run(
    folder: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the next test shows in processes of its own: here the command runs in this one, and the verb starts another
    program."""
    values = {"learning_rate": "1e-3"}
    words = Sweep("run.yaml", [], {"learning_rate": ("1e-3",)}, Path("tried")).command(values)
    assert words[:3] == [sys.executable, "-m", "megatune"]
    ended = command_line(*words[3:])
    assert ended.returncode == ExitCode.DONE, ended
    trial = folder / "tried" / name_of(values)
    assert (trial / "model.safetensors").is_file()
    assert "learning_rate: 0.001" in (trial / "run.yaml").read_text(encoding="utf-8")
    monkeypatch.setattr(Sweep, "command", ShortTrials.command)
    monkeypatch.setattr(Sweep, "stops", "", raising=False)
    assert main(["sweep", "run.yaml", "--set", "learning_rate=1e-3,1e-2", "--output", "more"]) == ExitCode.DONE
    assert starts(folder / "more") == {"learning_rate-1e-3": 1, "learning_rate-1e-2": 1}
    assert "plot: more/sweep.png" in capsys.readouterr().out


@pytest.mark.extended
def test_trials_are_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "run.yaml", "--set", "learning_rate=1e-3", "--output", "tried"]) == ExitCode.DONE
    trial = folder / "tried" / "learning_rate-1e-3"
    assert (trial / "model.safetensors").is_file()
    assert "learning_rate: 0.001" in (trial / "run.yaml").read_text(encoding="utf-8")
    assert "plot: tried/sweep.png" in capsys.readouterr().out
