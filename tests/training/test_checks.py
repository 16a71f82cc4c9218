"""What is wrong with data, template, weights and folders is said before a process starts, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.hub.digests import FileDigest
from megatune.launch import devices
from megatune.training import start as training_start
from megatune.training.checks import DiskSpace, check_files
from megatune.training.start import Launch, start
from megatune.training.storage.manifest import Manifest, write_manifest

ROWS = [{"instruction": f"Say {i}.", "output": f"{i}.", "system": "Be brief.", "id": i} for i in range(3)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run's settings, with a model of which only the files are there."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    (tmp_path / "data").mkdir()
    model.mkdir()
    (model / "model.safetensors").touch()
    added = [{"id": 0, "content": "<|im_start|>"}, {"id": 1, "content": "<|im_end|>"}]
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "data" / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return {"model_name_or_path": "model", "dataset": "rows", "output_dir": "out", "template": "qwen"}


def said(run: dict[str, Any], **changes: Any) -> str:
    """The one error, as a user reads it."""
    overrides = [f"{key}={value}" for key, value in (run | changes).items()]
    (error,) = check_files(load(overrides=overrides).settings).errors
    return str(error)


def found(run: dict[str, Any], **changes: Any) -> tuple[list[str], list[int], list[str]]:
    """What is wrong, the exit codes, and the lines for the user."""
    loaded = load(overrides=[f"{key}={value}" for key, value in (run | changes).items() if value is not None])
    assert not loaded.findings
    checked = check_files(loaded.settings, loaded.invalid)
    findings = [finding for error in checked.errors for finding in error.findings]
    return [finding.what for finding in findings], [int(error.exit_code) for error in checked.errors], checked.lines


@pytest.mark.parametrize("key", ["dataset", "eval_dataset", "eval_generate_prompts"])
def test_what_is_not_there_is_said_of_its_setting(run: dict[str, Any], key: str) -> None:
    more = (
        {"eval_strategy": "epoch"} if key == "eval_dataset" else {"eval_generate_steps": 2} if "prompts" in key else {}
    )
    assert said(run, **more, **{key: "none.txt"}) == (
        f"{key}: no such file or folder: none.txt\n"
        "    fix: correct the path, which is relative to the working directory or to dataset_dir"
    )


def test_nothing_is_wrong_and_unused_fields_are_named(run: dict[str, Any]) -> None:
    assert found(run) == ([], [], ["data       rows: fields that are not used: system, id"])
    entry = {"file_name": "rows.json", "columns": {"prompt": "instruction", "response": "output", "system": "system"}}
    Path("data/dataset_info.json").write_text(json.dumps({"rows": entry}))
    assert found(run)[2] == ["data       rows: fields that are not used: id"]
    assert found(run, dataset="data/rows.json")[:2] == ([], [])  # a file of a known form


def test_everything_is_said_at_once(run: dict[str, Any]) -> None:
    Path("model/model.safetensors").unlink()
    Path("file").touch()
    whats, codes, _ = found(
        run, dataset="row", eval_dataset="none.jsonl", template="qwn", output_dir="file/out",
        resume_from_checkpoint="nowhere",
    )  # fmt: skip
    assert whats == [
        "template: 'qwn' is unknown",
        "'row' is neither in data/dataset_info.json nor a path",
        "no such file or folder: none.jsonl",
        f"cannot write {Path('file/out').absolute()}",
        "resume_from_checkpoint: no folder 'nowhere'",
        "there is no model.safetensors",
    ]
    assert codes == [64, 64, 66, 73, 66, 66]


def test_columns_that_no_row_has(run: dict[str, Any]) -> None:
    entry = {"file_name": "rows.json", "columns": {"prompt": "question", "response": "output"}}
    Path("data/dataset_info.json").write_text(json.dumps({"rows": entry}))
    (error,) = check_files(load(overrides=[f"{key}={value}" for key, value in run.items()]).settings).errors
    assert error.exit_code == ExitCode.DATA
    assert "rows: none of its first 3 rows can be trained on" in str(error)
    assert "columns: {prompt: instruction, response: output}" in str(error)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", "a.json: there are no rows\n    fix: write rows into its files, or remove it from the data"),
        ("a.csv", "instruction,output\n", "a.csv: there are no rows"),
        (
            "a.csv",
            "instruction;input;output\na;;b\n",
            "a.csv:1: the header has one column, 'instruction;input;output'\n"
            "    why: columns seem to be separated by ';'\n    fix: separate the columns by commas",
        ),
        (
            "a.json",
            json.dumps([{"conversations": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]}]),
            "a.json:row 1: a.json: none of its first 1 rows can be trained on\n"
            '    why: unknown role (message 2 has role "bot", '
            "expected one of system, human, gpt, observation, function_call)\n"
            "    fix: correct the roles, or name your own as tags in the data set's entry of dataset_info.json",
        ),
        (
            "a.json",
            json.dumps([{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}]),
            "roles out of order (message 1 is 'assistant', expected 'user')\n"
            "    fix: begin with the user's message and let the assistant answer it, or correct the entry's tags",
        ),
        ("a.json", "", "a.json: the file is empty\n    fix: write rows into it, or remove it from the data"),
        ("a.json", '[{"a": 1},]', "a.json:1: invalid JSON in row 1"),
    ],
)
def test_rows_that_are_all_wrong_are_refused_before_a_process_starts(
    run: dict[str, Any], name: str, content: str, message: str
) -> None:
    Path(name).write_text(content)
    assert message in said(run, dataset=name)


def test_columns_that_a_user_may_have_meant(run: dict[str, Any]) -> None:
    """The answer is suggested by its usual name, wherever it stands."""
    rows = [{"instruction": "Say a.", "input": "", "output": "a"}]
    Path("data/rows.json").write_text(json.dumps(rows))
    entry = {"file_name": "rows.json", "columns": {"prompt": "question", "response": "answer"}}
    Path("data/dataset_info.json").write_text(json.dumps({"rows": entry}))
    assert "columns: {prompt: instruction, response: output}" in said(run)


def test_what_is_not_there_is_said_with_a_fix(run: dict[str, Any]) -> None:
    fix = "correct the path, which is relative to the working directory or to dataset_dir"
    assert said(run, dataset="gone.jsonl") == f"dataset: no such file or folder: gone.jsonl\n    fix: {fix}"
    Path("data/dataset_info.json").write_text(json.dumps({"rows": {"file_name": "gone.json"}}))
    assert "fix: correct its path, which is relative to the folder of dataset_info.json" in said(run)
    Path("data/dataset_info.json").write_text('{"rows": {"file_name": "rows.json"},}')
    broken = said(run)
    assert broken.startswith("data/dataset_info.json:1: not valid JSON: expected property name")
    assert broken.endswith("fix: correct it there; JSON has no comments and no comma before a closing bracket")


def test_an_output_dir_that_is_a_file(run: dict[str, Any]) -> None:
    Path("out").touch()
    assert said(run).endswith("out is a file\n    fix: choose another output_dir")


def test_a_model_that_is_a_file(run: dict[str, Any]) -> None:
    Path("model.json").touch()
    with pytest.raises(MegatuneError, match="'model\\.json' is a file"):
        load_architecture("model.json")


@pytest.mark.parametrize(
    ("template", "stage", "what"),
    [
        ("llama3", "sft", "template: llama3 does not fit this model's tokenizer"),
        (None, "sft", None),
        ("none.yaml", "sft", "template: there is no file none.yaml"),
        ("llama3", "pt", None),  # which has no template
    ],
)
def test_templates(run: dict[str, Any], template: str, stage: str, what: str | None) -> None:
    assert found(run, template=template, stage=stage)[0] == ([] if what is None else [what])


def test_a_tokenizer_without_what_a_template_needs(run: dict[str, Any]) -> None:
    Path("model/tokenizer_config.json").write_text("{}")
    assert found(run, template=None)[0] == ["template: null does not fit this model's tokenizer"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("model", name).unlink()
    assert found(run)[0] == ["the tokenizer cannot be loaded"]


def test_files_of_weights_that_are_missing(run: dict[str, Any]) -> None:
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    Path("model", files["a"]).touch()
    assert found(run)[0] == [f"1 of 2 weight files are missing: {files['b']}"]


def test_checkpoints_that_cannot_be_resumed_from(run: dict[str, Any]) -> None:
    assert said(run, resume_from_checkpoint="true") == (
        "resume_from_checkpoint: there is no checkpoint in out\n"
        "    fix: remove resume_from_checkpoint to start a new run, or name the output_dir of the run to continue"
    )
    assert "name a checkpoint-N folder, or remove resume_from_checkpoint" in said(run, resume_from_checkpoint="gone")
    Path("old").mkdir()
    whats, codes, _ = found(run, resume_from_checkpoint="old")
    assert len(whats) == 1
    assert codes == [ExitCode.INPUT]


def checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint with training state, as far as it is looked at before a run starts."""
    path = folder / f"checkpoint-{step}"
    (path / "training").mkdir(parents=True)
    (path / "training/state.json").write_text(json.dumps({"step": step, "global_batch_size": 8, "seed": 42}))
    write_manifest(path, Manifest(step, (FileDigest("training/state.json", 0, ""),), {}))
    return path


@pytest.mark.parametrize(
    ("changes", "world_size", "whats", "codes"),
    [
        ({"per_device_train_batch_size": 8}, 1, [], []),
        ({"per_device_train_batch_size": 2}, 4, [], []),
        ({"per_device_train_batch_size": 2}, 1, ["rows per step", "seed was 42, and is 7"], [64]),
        ({"per_device_train_batch_size": 2}, None, [], []),  # nobody knows the batch
        ({"resume_from_checkpoint": "false"}, 1, ["out holds checkpoint-4, checkpoint-6 of an earlier run"], [73]),
        ({"resume_from_checkpoint": "out/checkpoint-4", "per_device_train_batch_size": 8}, 1, ["out holds"], [73]),
        ({"overwrite_output_dir": "true"}, 1, [], []),
    ],
)
def test_what_an_earlier_run_of_the_folder_does_not_allow(
    changes: dict[str, Any], world_size: int | None, whats: list[str], codes: list[int], run: dict[str, Any]
) -> None:
    for step in (4, 6):
        checkpoint(Path("out"), step)
    words = {**run, **changes, **({"seed": 7} if len(whats) == 2 else {})}
    settings = load(overrides=[f"{key}={value}" for key, value in words.items()]).settings
    errors = check_files(settings, world_size=world_size).errors
    findings = [finding.what for error in errors for finding in error.findings]
    assert [int(error.exit_code) for error in errors] == codes
    assert len(findings) == len(whats)
    assert all(what in finding for what, finding in zip(whats, findings, strict=True))


def test_a_disk_without_room_for_the_first_checkpoint(run: dict[str, Any], tmp_path: Path) -> None:
    """The command refuses before it starts a process, what `megatune doctor FILE` finds, too."""
    model = make_checkpoint("qwen3", tmp_path / "demo")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 2**31 - 1, "hidden_size": 2**20}))
    words = {**run, "model_name_or_path": model, "template": "null", "memory_check": "off", "max_steps": 2}
    with pytest.raises(MegatuneError) as refused:
        start(load(overrides=[f"{key}={value}" for key, value in words.items()]))
    assert refused.value.exit_code == ExitCode.CANNOT_WRITE
    assert " of 27021.6 TB with training state in out: " in str(refused.value)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"max_steps": 20, "save_steps": 5}, 4),
        ({"max_steps": 20, "save_steps": 5, "save_total_limit": 2}, 3),
        ({"max_steps": 20, "save_steps": 50, "save_total_limit": 2}, 1),
        ({"num_train_epochs": 3, "save_steps": 5}, 2),
        ({"num_train_epochs": 3, "save_strategy": "epoch"}, 3),
        ({"max_steps": 20, "save_strategy": '"no"'}, 1),
    ],
)
def test_how_many_checkpoints_need_room(settings: dict[str, Any], copies: int, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model")
    words = [f"{key}={value}" for key, value in {**settings, "output_dir": tmp_path / "out"}.items()]
    asked, architecture = load(overrides=words).settings, load_architecture(model)
    assert DiskSpace.of(asked, architecture).copies == copies
    checkpoint(tmp_path / "out", 1)
    assert DiskSpace.of(asked, architecture).copies == max(1, copies - 1)


def test_other_machines_may_have_no_output_dir(run: dict[str, Any]) -> None:
    Path("file").touch()
    changes = {"output_dir": "file/out", "resume_from_checkpoint": "nowhere"}
    settings = load(overrides=[f"{key}={value}" for key, value in (run | changes).items()]).settings
    assert len(check_files(settings).errors) == 2
    assert check_files(settings, first=False).errors == []


def test_data_sets_on_a_hub_are_left_to_the_run(run: dict[str, Any]) -> None:
    assert found(run, dataset="owner/name,hf::owner/other:part", eval_dataset="ms::a/b")[:2] == ([], [])
    assert found(run, dataset="owner/name", dataset_dir="ONLINE")[:2] == ([], [])


def test_a_command_says_it_without_starting_a_process_or_importing_torch(run: dict[str, Any]) -> None:
    Path("run.yaml").write_text("dataset: row\nlearning_rat: 1\n")
    del run["dataset"]
    words = ["run.yaml", *(f"{key}={value}" for key, value in (run | {"template": "qwn"}).items())]
    script = (
        "import sys\n"
        "from megatune.cli.main import main\n"
        "code = main(['train', *sys.argv[1:]])\n"
        "print(code, [name for name in ('torch', 'transformers', 'megatron', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "64 []"
    assert "unknown setting 'learning_rat'" in done.stderr
    assert "run.yaml:1: dataset: 'row' is neither in data/dataset_info.json nor a path" in done.stderr
    assert "\ntemplate=qwn: 'qwn' is unknown" in done.stderr


def test_use_cpu_hides_the_gpus_of_the_machine(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From what decides the world, and from the ranks, which inherit the environment."""
    monkeypatch.setattr(devices, "nvidia_smi", lambda *arguments: "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    seen: list[int] = []

    def look(launch: Launch) -> None:
        seen.append(launch.num_gpus)
        raise MegatuneError(Finding("seen"), ExitCode.SETTINGS)

    monkeypatch.setattr(training_start, "check_all", look)
    for changes in ({}, {"use_cpu": True}):
        with pytest.raises(MegatuneError, match="seen"):
            start(load(None, [f"{key}={json.dumps(value)}" for key, value in {**run, **changes}.items()]))
    assert seen == [2, 0]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_gpus_decide_what_is_not_written(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the catalogue has, and one whose compute capability alone is known, in the environment given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [f"{key}={json.dumps(value)}" for key, value in run.items()]
    for name, capability, bf16 in (
        ("NVIDIA H100 80GB HBM3", "9.0", True), ("Tesla V100-SXM2-32GB", "7.0", False),
        ("NVIDIA Z1", "11.0", True), ("NVIDIA Z0", "7.5", False), ("NVIDIA Z2", "[N/A]", False),
    ):  # fmt: skip
        smi = {"-L": f"GPU 0: {name}\n", "--query-gpu=compute_cap": f"{capability}\n"}
        smi["--query-gpu=index,uuid,name,memory.total"] = f"0, GPU-a, {name}, 81559\n"
        monkeypatch.setattr(devices, "nvidia_smi", lambda query, *arguments, smi=smi: smi[query])
        launch = Launch.of(load(None, words), env={})
        assert launch.loaded.settings.precision.bf16 is bf16
        assert launch.loaded.settings.performance.apply_rope_fusion
        assert launch.model.settings == launch.loaded.settings
        assert all(name in line for line in launch.lines)


def test_the_allocator_grows_its_segments_unless_a_user_chose() -> None:
    for given, found in (
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
    ):
        env = dict(given)
        training_start.prepare_devices(env, use_cpu=False)
        assert env == found
