"""`megatune new`: from a folder with a model and a table to a running training, in at most five answers."""

from __future__ import annotations

import csv
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
from pool_launch import CommandLine

from megatune.cli.main import main
from megatune.config.dialects.roll import read_roll
from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.training.new_run import Answers, NewRun, draft, write_settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model and a table."""
    make_checkpoint("qwen3", tmp_path / "model")
    table(tmp_path / "my.csv", ("instruction", "output"), [("Who are you?", "I am Ada."), ("Hi", "Hello!")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def table(path: Path, names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.name


def settings_of(found: NewRun) -> dict[str, object]:
    """The settings that the text writes, checked with their model and world."""
    write_settings(found.file, found.text)
    loaded = load(found.file)
    assert loaded.findings == []
    settings = loaded.require_valid(world_size=loaded.settings.run.num_processes)
    return {name: value for group in settings.model_dump().values() if isinstance(group, dict)
            for name, value in group.items()}  # fmt: skip


def test_five_answers_start_a_training(
    folder: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, keyboard = pty.openpty()
    os.write(terminal, b"\n" * 5)
    with os.fdopen(keyboard) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        done = command_line("new")
    os.close(terminal)
    assert done.returncode == 0, done.stderr
    for said in ("Model: a folder", "Data: a file", "Machine: ", "Goal: ", "Start it now [yes]"):
        assert said in done.stdout
    assert "I am Ada." in done.stdout  # the first rows
    assert (folder / "out/model-full/model.safetensors").is_file()
    assert len((folder / "out/model-full/metrics.jsonl").read_text().splitlines()) == 6
    text = (folder / "model-full.yaml").read_text()
    assert len(text.splitlines()) < 40
    assert "megatune train model-full.yaml" in text
    assert "\nsave_total_limit: 2" in text


def test_a_number_alone_is_not_a_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["", "", "16"]  # the machine is asked for again

    def answer(question: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["new"]) == ExitCode.INTERRUPTED
    assert typed == []


def test_without_a_terminal_the_flags_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--goal", "lora"]) == ExitCode.SETTINGS
    assert "fix: megatune new --goal lora --yes" in capsys.readouterr().err
    (folder / "my.csv").unlink()
    make_checkpoint("llama", folder / "other")
    assert main(["new"]) == ExitCode.SETTINGS
    assert "fix: megatune new --model MODEL --data DATA --yes" in capsys.readouterr().err
    assert main(["new", "--yes"]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "no model is given\n    why: this folder has several: model, other" in said
    assert "no data is given\n    why: this folder has none" in said


def test_a_file_for_other_machines_says_what_it_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["new", "--goal", "lora", "--gpus", "2", "--gpu", "h100-80g", "--output", "gpu.yaml", "--yes"]
    assert main(words) == ExitCode.DONE
    said = capsys.readouterr()
    assert "GPU hours" in said.out
    assert "6 steps" not in said.out  # of a batch of two
    assert "3 steps, 3 epochs of 2 rows" in said.out
    assert "megatune plan gpu.yaml --gpus 2 --gpu h100-80g --launch slurm" in said.out
    assert load("gpu.yaml").settings.run.num_processes == 2
    assert main(words) == ExitCode.CANNOT_WRITE
    assert "gpu.yaml: cannot write the settings file" in capsys.readouterr().err


def test_the_rows_say_what_is_trained(folder: Path) -> None:
    pairs = lines(folder / "pairs.jsonl", [{"prompt": "Hi", "chosen": "Hello!", "rejected": "Go."}] * 300)
    found = draft(Answers(model="model", data=pairs))
    assert found.goal == "dpo"
    settings = settings_of(found)
    assert (settings["stage"], settings["per_device_train_batch_size"]) != ("sft", 1)
    assert settings["learning_rate"] == 5e-7
    texts = lines(folder / "texts.jsonl", [{"text": "Once upon a time."}])
    assert settings_of(draft(Answers(model="model", data=texts, goal="lora")))["stage"] == "pt"
    with pytest.raises(MegatuneError, match="not preference pairs") as refused:
        draft(Answers(model="model", data="my.csv", goal="dpo"))
    assert refused.value.exit_code == ExitCode.SETTINGS


def test_columns_of_other_names_are_guessed_and_said(folder: Path) -> None:
    table(folder / "fragen.csv", ("Frage", "Antwort"), [("Wer bist du?", "Ich bin Ada.")])
    found = draft(Answers(model="model", data="fragen.csv"))
    assert "columns: {Frage: query, Antwort: response}  # a guess" in found.text
    assert settings_of(found)["columns"] == {"Frage": "query", "Antwort": "response"}


def test_cutoff_len_is_that_of_the_longest_row(folder: Path) -> None:
    lines(folder / "long.jsonl", [{"instruction": "Say it.", "output": "word " * count} for count in (5, 900)])
    short, long = (draft(Answers(model="model", data=name)) for name in ("my.csv", "long.jsonl"))
    assert "cutoff_len: 128 " in short.text
    assert 900 < int(str(settings_of(long)["cutoff_len"])) <= 4096


@pytest.mark.parametrize(
    ("model", "machine"),
    [("model", {}), ("model", {"gpus": 4, "gpu": "a100-80g"}), ("Qwen3-30B-A3B", {"gpus": 16, "gpu": "h100-80g"})],
)
def test_problems_with_answers_are_for_reinforcement_learning(
    folder: Path, model: str, machine: dict[str, Any]
) -> None:
    problems = lines(folder / "sums.jsonl", [{"prompt": "2 + 3 =", "ground_truth": "5"}])
    found = draft(Answers(model=model, data=problems, **machine))
    assert (found.goal, found.verb) == ("rl", "rl")
    write_settings(found.file, found.text)
    read = read_roll(str(found.file), [], lambda settings, stage: None)
    assert read.findings == ()
    assert read.settings is not None
    # Sampling and training are timed together, for the steps that the file has.
    (time,) = (line for line in found.lines if line.startswith("time "))
    assert time.endswith(" for 100 steps")
    costs = [line for line in found.lines if line.startswith("cost ")]
    assert len(costs) == ("gpu" in machine)
    assert all(float(line.split()[1].replace(",", "")) > 0 for line in costs)
    parallel = read.settings.actor_train.settings.parallel
    assert parallel.expert_model_parallel_size == 1 or parallel.expert_tensor_parallel_size == 1
    with pytest.raises(MegatuneError, match=r"my\.csv has no column messages and no column ground_truth"):
        draft(Answers(model="model", data="my.csv", goal="rl"))


def test_a_model_that_does_not_fit_is_refused_with_machines_that_hold_it(folder: Path) -> None:
    with pytest.raises(MegatuneError, match="does not fit 1 × rtx-4090") as refused:
        draft(Answers(model="Qwen3-30B-A3B", data="my.csv", goal="full", gpus=1, gpu="rtx-4090"))
    assert refused.value.exit_code == ExitCode.OUT_OF_MEMORY
    # Without a goal the adapters are tried, too.
    assert draft(Answers(model="Qwen3-30B-A3B", data="my.csv", gpus=8, gpu="rtx-4090")).goal == "lora"
