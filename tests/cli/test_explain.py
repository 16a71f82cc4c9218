"""`megatune explain` as it is typed."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from megatune.cli.main import main
from megatune.errors import ExitCode


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: Qwen3-8B\ndataset: identity\noutput_dir: out\nbf16: true\n"
        "per_device_train_batch_size: 1\ntensor_model_parallel_size: 2\nsequence_parallel: true\n"
    )
    return str(path)


def test_key_in_both_languages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "recompute_granularity"]) == ExitCode.DONE
    assert "  cost " in capsys.readouterr().out
    assert main(["explain", "recompute_granularity", "--language", "zh"]) == ExitCode.DONE
    chinese = capsys.readouterr().out
    assert "重计算" in chinese
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert main(["explain", "recompute_granularity"]) == ExitCode.DONE
    assert capsys.readouterr().out == chinese


def test_key_in_a_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "sequence_parallel", file, "--gpus", "16", "--gpu", "a100-80g", "gradient_accumulation_steps=4"]
    assert main(words) == ExitCode.DONE
    output = capsys.readouterr().out
    assert "for Qwen3-8B on 16 × a100-80g, tp2 dp8, 32 rows" in " ".join(output.split())


def test_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", file, "learning_rate=1e-5", "--gpus", "8", "--gpu", "h100-80g"]) == ExitCode.DONE
    output = capsys.readouterr().out
    assert "learning_rate: 1e-05 (override; default 5e-05)" in output
    assert "None: nothing is wrong" in output
    assert main(["explain", file, "tensor_model_parallel_size=3"]) == ExitCode.SETTINGS
    output = capsys.readouterr().out
    assert "not planned" in output
    assert "write tensor_model_parallel_size: 2" in output


def test_a_file_that_cannot_be_read_is_not_said_to_set_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, sets_nothing in (("a: [1\nb", False), ("", True)):
        (tmp_path / "odd.yaml").write_text(text)
        assert main(["explain", str(tmp_path / "odd.yaml")]) == ExitCode.SETTINGS
        assert ("It sets nothing" in capsys.readouterr().out) == sets_nothing


def test_what_adapters_leave_of_memory(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "recompute_granularity", file, "--gpus", "8", "--gpu", "h100-80g"]
    assert main(words) == ExitCode.DONE
    full = capsys.readouterr().out
    assert main([*words, "finetuning_type=lora"]) == ExitCode.DONE
    lora = capsys.readouterr().out
    held = [float(re.findall(r"null: ([\d.]+) of", text)[0]) for text in (full, lora)]
    assert held[1] < held[0] / 2
    assert main(["explain", file, "lora_rank=16"]) == ExitCode.SETTINGS
    assert "lora_rank: 16 with finetuning_type: full" in capsys.readouterr().out


def test_a_run_that_nothing_was_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("stage: sft\n")
    assert main(["explain", str(tmp_path)]) == ExitCode.INPUT
    assert "it has no plan" in capsys.readouterr().err
    (tmp_path / "checkpoint-3").mkdir()
    assert main(["explain", str(tmp_path / "checkpoint-3")]) == ExitCode.INPUT
    assert f"megatune explain {tmp_path}: that is the run's" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{}")
    assert main(["explain", str(tmp_path / "plan.json")]) == ExitCode.INPUT  # of the run, and not a settings file
    assert "its plan.json cannot be read" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "nowhere")]) == ExitCode.INPUT
    assert "there is no folder or file" in capsys.readouterr().err


def test_all_is_the_page_of_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).parents[2] / "docs"
    for language, name in (("en", "settings.md"), ("zh", "settings.zh.md")):
        assert main(["explain", "--all", "--language", language]) == ExitCode.DONE
        assert capsys.readouterr().out == (docs / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], ExitCode.SETTINGS, "nothing to explain"),
        (["lerning_rate"], ExitCode.SETTINGS, "did you mean learning_rate?"),
        (["cutoff_len", "--language", "fr"], ExitCode.SETTINGS, "language is 'fr'"),
        (["cutoff_len", "--gpus", "0"], ExitCode.SETTINGS, "--gpus: gpus is 0"),
        (["cutoff_len", "--gpu", "z100"], ExitCode.INPUT, "no device 'z100'"),
        (["cutoff_len", "--model", "nobody"], ExitCode.INPUT, "nobody"),
        (["cutoff_len", "nowhere.yaml"], ExitCode.INPUT, "there is no settings file nowhere.yaml"),
        (["nowhere.yaml"], ExitCode.INPUT, "there is no settings file nowhere.yaml"),
        (["."], ExitCode.INPUT, "is not the folder of a run"),
        (["cutoff_len", "--gpuz", "4"], ExitCode.SETTINGS, "--gpuz"),
    ],
)
def test_refusals(
    words: list[str],
    code: ExitCode,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *words]) == code
    output = capsys.readouterr()
    assert says in output.err
    assert output.out == ""


def test_a_terminal_without_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["explain", "seed", "--language", "zh"]) == ExitCode.DONE
    shown.flush()
    assert b"seed" in shown.buffer.getvalue()  # type: ignore[attr-defined]
