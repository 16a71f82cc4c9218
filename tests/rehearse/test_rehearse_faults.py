"""Planted faults: each is found by the first act, named, and told with its fix; nothing is started."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatune.cli.main import main
from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.doctor.check import Verdict
from megatune.pages import as_text
from megatune.rehearse import stages
from megatune.rehearse.file_checks import DATA, DISK, SETTINGS, TEMPLATE
from megatune.rehearse.outcome import Outcome, exit_code, pages
from megatune.rehearse.run import Rehearsal

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(8)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2_vl", tmp_path_factory.mktemp("models") / "qwen2_vl")


def look(
    model: object,
    folder: Path,
    rows: list[Any] = ROWS,
    gpus: int = 1,
    later: Mapping[str, stages.Stage] | None = None,
    **changes: Any,
) -> dict[str, Outcome]:
    """The first stage of a file that names a model and rows, by name; `later` has others."""
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    values: dict[str, Any] = {
        "model_name_or_path": model, "dataset": data, "template": "qwen3_nothink", "output_dir": folder / "out",
        "media_dir": folder, **changes,
    }  # fmt: skip
    loaded = load(None, [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()])
    (folder / "rehearsal").mkdir()
    rehearsal = Rehearsal(loaded.for_world(gpus), gpus, None, folder / "rehearsal", lambda line: None)
    rehearsal.run(later or {})
    *_, last = map(as_text, pages(rehearsal.outcomes))
    assert last.endswith(f"exit code {int(exit_code(rehearsal.outcomes))}")
    return {one.stage: one for one in rehearsal.outcomes}


def told(outcome: Outcome) -> str:
    assert outcome.verdict is Verdict.FAIL
    return "\n".join(map(str, outcome.findings))


def test_a_file_without_faults_passes(model: Path, tmp_path: Path) -> None:
    found = look(model, tmp_path)
    assert [one.verdict for one in found.values()] == [Verdict.PASS] * 4
    assert "8 rows read (all)" in found[DATA].found


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"messages": [', ("rows.jsonl:9", "JSON")),
        ({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}]},
         ("rows.jsonl:9", "null")),
        ({"messages": [ROWS[0]["messages"][0], {"role": "assistant", "content": "x", "loss": False}]},
         ("rows.jsonl:9", "nothing to train on")),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_on(model: Path, tmp_path: Path, row: Any, words: tuple[str, ...]) -> None:
    found = look(model, tmp_path, [*ROWS, row])
    text = told(found[DATA])
    assert all(word in text for word in words)
    assert "1 row cannot be trained on" in text
    assert "fix: correct them, or write on_bad_row: skip" in text
    assert exit_code(list(found.values())) == 65


def test_rows_that_the_user_leaves_out_pass(model: Path, tmp_path: Path) -> None:
    found = look(model, tmp_path, [*ROWS, "{"], on_bad_row="skip")
    assert found[DATA].verdict is Verdict.PASS
    assert "1 row dropped by on_bad_row: skip" in found[DATA].found


def test_an_image_that_is_missing(seeing: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
    row = {"messages": turns, "images": ["gone.png"]}
    found = look(seeing, tmp_path, [row, *({**each, "images": []} for each in ROWS)], template="qwen2_vl")
    assert "rows.jsonl:1: image: there is no such file" in told(found[DATA])
    assert "gone.png" in told(found[DATA])


def test_a_data_set_that_is_not_there(model: Path, tmp_path: Path) -> None:
    found = look(model, tmp_path, dataset="identiti", dataset_dir=str(tmp_path))
    assert "'identiti' is neither in" in told(found[DATA])


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", None])
def test_a_template_of_another_model(model: Path, tmp_path: Path, name: str | None) -> None:
    """Of the folder's own tokenizer, and of the family's where there is no folder."""
    found = look(name or model, tmp_path, template="llama3")
    text = told(found[TEMPLATE])
    assert "template: llama3 does not fit" in text
    assert "<|eot_id|>" in text
    assert "fix: templates that fit it: null, qwen" in text
    assert found[DATA].verdict is Verdict.SKIP
    assert exit_code(list(found.values())) == 66


def test_a_template_that_is_none(model: Path, tmp_path: Path) -> None:
    found = look(model, tmp_path, template="qwen3_nothnk")
    assert "did you mean qwen3_nothink" in told(found[TEMPLATE])
    assert exit_code(list(found.values())) == 64


@pytest.mark.parametrize(
    ("changes", "gpus", "words"),
    [
        ({"tensor_model_parallel_size": 3}, 3, ("32 attention heads", "write tensor_model_parallel_size: ")),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 3}, 6,
         ("does not divide the model's 128 experts", "write expert_model_parallel_size: ")),
        ({"pipeline_model_parallel_size": 16, "virtual_pipeline_model_parallel_size": 4}, 16,
         ("48 layers", "virtual_pipeline_model_parallel_size: 3")),
        ({"pipeline_model_parallel_size": 4}, 6, ("6 processes are not a multiple", "start 4 or 8 processes")),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_split_the_model(
    tmp_path: Path, changes: dict[str, Any], gpus: int, words: tuple[str, ...]
) -> None:
    found = look("Qwen/Qwen3-30B-A3B", tmp_path, gpus=gpus, **changes)
    text = told(found[SETTINGS])
    assert all(word in text for word in words), text
    assert found[DATA].found == f"stage {SETTINGS} has to pass first"
    assert exit_code(list(found.values())) == 64


def test_settings_are_told_with_a_model_that_is_not_there(tmp_path: Path) -> None:
    found = look(str(tmp_path / "gone"), tmp_path, lerning_rate=1, bf16=True, fp16=True)
    text = told(found[SETTINGS])
    assert "unknown setting 'lerning_rate'" in text
    assert "fp16: true with bf16: true" in text
    assert "no folder" in text


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    changes = {"template": "llama3", "tensor_model_parallel_size": 3, "output_dir": tmp_path / "file" / "out"}
    found = look("Qwen/Qwen3-8B", tmp_path, gpus=3, **changes)
    assert "tensor_model_parallel_size 3 does not split" in told(found[SETTINGS])
    assert f"{tmp_path / 'file'} is a file" in told(found[DISK])


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = look(model, tmp_path, output_dir=tmp_path / "file" / "out")
    assert "choose another output_dir" in told(found[DISK])
    assert found[DATA].verdict is Verdict.PASS
    assert exit_code(list(found.values())) == 73


def test_a_disk_without_room_for_the_checkpoints(tmp_path: Path) -> None:
    found = look("deepseek-ai/DeepSeek-V3", tmp_path, template="deepseek3", save_total_limit=1000)
    text = told(found[DISK])
    assert "1 checkpoint of" in text
    assert "save_total_limit" in text
    assert exit_code(list(found.values())) == 73


def test_a_machine_that_is_too_small(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatune.rehearse.run.free_memory", lambda: 10**9)
    found = look(model, tmp_path, gpus=4, tensor_model_parallel_size=2, later=stages.STAGES)
    assert found[DATA].verdict is Verdict.PASS
    assert {found[name].verdict for name in stages.STAGES} == {Verdict.SKIP}
    assert found[stages.TRAIN].found == "4 processes need about 1.9 GB of memory, and 0.8 GB are free"
    assert exit_code(list(found.values())) == 0


def test_a_layout_of_too_many_processes(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 8}
    found = look("meta-llama/Llama-3.1-70B", tmp_path, gpus=64, template="llama3", later=stages.STAGES, **sizes)
    assert found[SETTINGS].verdict is Verdict.PASS
    assert found[stages.TRAIN].found == "one replica needs 64 processes, and a rehearsal starts 32 at most"


def test_the_command_ends_with_the_first_failure(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind but the report that it was asked for."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model}\ndataset: nothing.jsonl\ntemplate: llama3\noutput_dir: {tmp_path / 'out'}\n"
    )
    assert main(["rehearse", str(tmp_path / "run.yaml"), "--json", str(tmp_path / "report.json")]) == 66
    printed = " ".join(capsys.readouterr().out.split())
    assert "template: llama3 does not fit this model's tokenizer" in printed
    assert "exit code 66" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 66
    assert [act["verdict"] for act in report["acts"]].count("not rehearsable") == 6
    assert not list((tmp_path / "temporary").iterdir())


def test_reinforcement_learning_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rl.yaml").write_text("actor_train:\n  model_args: {}\nactor_infer: {}\n")
    assert main(["rehearse", str(tmp_path / "rl.yaml")]) == 64
    said = capsys.readouterr().err
    assert "describes reinforcement learning: it cannot be rehearsed" in said
    assert "share devices through Ray" in said


@pytest.mark.parametrize(("tp", "code", "said"), [("3", 64, "--tensor_model_parallel_size 3 does not split"),
                                                  ("2", 66, "no such file or folder: gone.jsonl")])  # fmt: skip
def test_a_command_line_of_megatron_swift(
    tp: str, code: int, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--dataset", "gone.jsonl", "--tensor_model_parallel_size", tp, "--train_iters", "9"]
    assert main(["rehearse", "--gpus", tp, "megatron", "sft", *words, "--save", str(tmp_path / "out")]) == code
    assert said in " ".join(capsys.readouterr().out.split())
