"""Reading a file, overrides and flags: values, places, and all that is wrong in one report."""

from pathlib import Path

import pytest

from megatune.config.load import load
from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Load the text of a file as run.yaml."""
    monkeypatch.chdir(tmp_path)

    def read_text(text: str, overrides=(), flags=()):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "run.yaml").write_bytes(data)
        return load("run.yaml", overrides, flags)

    return read_text


def report(loaded) -> str:
    return "\n".join(map(str, loaded.findings))


def test_nothing_given_is_all_defaults():
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.findings == []


def test_origins_and_precedence(read):
    loaded = read(
        "# a comment\nseed: 1\nlearning_rate: 1.0e-4\n\nmax_steps: 5\nbf16: true\n",
        ["max_steps=6", "learning_rate=2e-4", "learning_rate=3e-4"],
        ["--learning-rate", "4e-4"],
    )
    assert loaded.findings == []
    assert (loaded.settings.run.seed, loaded.origins["run.seed"]) == (1, "run.yaml:2")
    assert (loaded.settings.optimizer.max_steps, loaded.origins["optimizer.max_steps"]) == (6, "override")
    assert (loaded.settings.optimizer.learning_rate, loaded.origins["optimizer.learning_rate"]) == (4e-4, "flag")
    assert loaded.origins["precision.bf16"] == "run.yaml:6"
    assert loaded.origins["precision.fp16"] == "default"


VALUES = [
    ("learning_rate: 1e-5", "optimizer.learning_rate", 1e-5),
    ("learning_rate: '1e-5'", "optimizer.learning_rate", 1e-5),
    ("learning_rate: 1", "optimizer.learning_rate", 1.0),
    ("max_steps: 1e3", "optimizer.max_steps", 1000),
    ("ddp_timeout: 180_000_000", "run.ddp_timeout", 180_000_000),
    ("bf16: yes", "precision.bf16", True),
    ("bf16: 'true'", "precision.bf16", True),
    ("eval_strategy: no", "evaluation.eval_strategy", "no"),
    ("run_name: 2026-11-20", "run.run_name", "2026-11-20"),
    ("run_name: 007", "run.run_name", "007"),
    ("run_name: 1:30", "run.run_name", "1:30"),
    ("run_name: null", "run.run_name", None),
    ("run_name: 'null'", "run.run_name", "null"),
    ("dataset: a", "data.dataset", ["a"]),
    ("dataset: a, b,c", "data.dataset", ["a", "b", "c"]),
    ("dataset: [a, 'b, c', 3]", "data.dataset", ["a", "b, c", "3"]),
    ("dataset:\n  - a\n  - b", "data.dataset", ["a", "b"]),
    ("dataset: null", "data.dataset", []),
    ("cutoff_len:", "data.cutoff_len", 2048),
    ("enable_thinking: null", "data.enable_thinking", None),
    ("report_to: none", "logging.report_to", ["none"]),
    ("resume_from_checkpoint: false", "run.resume_from_checkpoint", False),
    ("resume_from_checkpoint: out/checkpoint-5", "run.resume_from_checkpoint", "out/checkpoint-5"),
    ("lr_scheduler_kwargs: {min_lr: 1e-6}", "optimizer.lr_scheduler_kwargs", {"min_lr": 1e-6}),
    ("lr_scheduler_kwargs: '{\"min_lr\": 1e-6}'", "optimizer.lr_scheduler_kwargs", {"min_lr": 1e-6}),
    ("lr_scheduler_kwargs:\n  num_decay_steps: 5", "optimizer.lr_scheduler_kwargs", {"num_decay_steps": 5}),
    ("evaluation_strategy: epoch", "evaluation.eval_strategy", "epoch"),
    ("interleave_probs: 0.3,0.7", "data.interleave_probs", [0.3, 0.7]),
    ("interleave_probs: [0.25, '0.5', 1e-1]", "data.interleave_probs", [0.25, 0.5, 0.1]),
    ("dataset_weights: [2, 1]", "data.dataset_weights", [2.0, 1.0]),
    ("dataset_weights: 2", "data.dataset_weights", [2.0]),
    ("dataset_weights: null", "data.dataset_weights", None),
    ("template: null", "data.template", None),
    ("packing: null", "data.packing", None),
    ("neat_packing: true", "data.packing", True),
    ("truncation_strategy: drop", "data.truncation_strategy", "drop"),
    ("group_by_length: true", "data.group_by_length", True),
    ("disable_shuffling: true", "data.disable_shuffling", True),
    ("mix_strategy: interleave_once", "data.mix_strategy", "interleave_once"),
    ("streaming: true", "data.streaming", True),
    ("buffer_size: 1_000", "data.buffer_size", 1000),
    ("on_bad_row: quarantine", "data.on_bad_row", "quarantine"),
    ("tokenized_path: rows", "data.tokenized_path", "rows"),
    ("preserve_thinking: true", "data.preserve_thinking", True),
    ("stage: dpo", "run.stage", "dpo"),
    ("default_system: |\n  You are\n  kind.", "data.default_system", "You are\nkind.\n"),
    ("model_name: 小明", "data.model_name", "小明"),
    ("model_name: [小黄, 12]", "data.model_name", ["小黄", "12"]),
    ("model_author: Tuna, Inc.", "data.model_author", "Tuna, Inc."),
]


@pytest.mark.parametrize(("line", "path", "expected"), VALUES)
def test_values_of_a_file(read, line, path, expected):
    loaded = read(line + "\n")
    group, _, name = path.partition(".")
    value = getattr(getattr(loaded.settings, group), name)
    assert report(loaded) == ""
    assert (value, type(value)) == (expected, type(expected))


COMMAND_LINE = [
    (["default_system=You: are {kind # yes"], [], "data.default_system", "You: are {kind # yes"),
    (["default_system='a b'"], [], "data.default_system", "a b"),
    (["dataset=[a,b]"], [], "data.dataset", ["a", "b"]),
    (["dataset=a,b"], [], "data.dataset", ["a", "b"]),
    (["run_name="], [], "run.run_name", None),
    (["interleave_probs=0.3,0.7"], [], "data.interleave_probs", [0.3, 0.7]),
    (["interleave_probs=[0.3,0.7]"], [], "data.interleave_probs", [0.3, 0.7]),
    ([], ["--interleave_probs", "0.3", "0.7"], "data.interleave_probs", [0.3, 0.7]),
    ([], ["--dataset_weights", "2,1"], "data.dataset_weights", [2.0, 1.0]),
    ([], ["--template", "null"], "data.template", None),
    ([], ["--bf16"], "precision.bf16", True),
    ([], ["--bf16", "True"], "precision.bf16", True),
    ([], ["--bf16=false"], "precision.bf16", False),
    ([], ["--max-steps", "-1"], "optimizer.max_steps", -1),
    ([], ["--dataset", "a", "b"], "data.dataset", ["a", "b"]),
    ([], ["--lr_scheduler_kwargs", '{"min_lr": 1e-6}'], "optimizer.lr_scheduler_kwargs", {"min_lr": 1e-6}),
    ([], ["--seed", "1", "--seed", "2"], "run.seed", 2),
]


@pytest.mark.parametrize(("overrides", "flags", "path", "expected"), COMMAND_LINE)
def test_values_of_a_command_line(overrides, flags, path, expected):
    loaded = load(overrides=overrides, flags=flags)
    group, _, name = path.partition(".")
    assert report(loaded) == ""
    assert getattr(getattr(loaded.settings, group), name) == expected


WRONG = [
    (
        "learning_rate: -1",
        "run.yaml:1: learning_rate is -1\n    why: expected a number, at least 0\n    fix: write learning_rate: 5e-05",
    ),
    (
        "cutoff_len: 0",
        "run.yaml:1: cutoff_len is 0\n    why: expected a whole number, at least 2\n    fix: write cutoff_len: 2048",
    ),
    ("lerning_rate: 1e-5", "run.yaml:1: unknown setting 'lerning_rate'\n    fix: did you mean learning_rate?"),
    ("steps: 3", "run.yaml:1: unknown setting 'steps'\n    fix: did you mean max_steps?"),
    ("ppo_epoch: 3", "run.yaml:1: unknown setting 'ppo_epoch'\n    fix: did you mean ppo_epochs?"),
    (  # ppo_epochs, which is not taken, is as near
        "epochs: 3",
        "run.yaml:1: unknown setting 'epochs'\n"
        "    fix: did you mean num_epochs, a key of Axolotl or Unsloth?; write num_train_epochs",
    ),
    ("tp: 2", "run.yaml:1: unknown setting 'tp'\n    fix: tp is a short name; write tensor_model_parallel_size"),
    (
        "zzz: 1",
        "run.yaml:1: unknown setting 'zzz'\n    fix: remove it; `megatune explain --all` lists every setting",
    ),
    (
        "seed: x",
        "run.yaml:1: seed is 'x'\n"
        "    why: expected a whole number, at least 0, below 4294967296\n"
        "    fix: write seed: 42, the default",
    ),
    (
        "tensor_model_parallel_size: 0",
        "run.yaml:1: tensor_model_parallel_size is 0\n"
        "    why: expected a whole number, at least 1\n"
        "    fix: write tensor_model_parallel_size: 1",
    ),
    (
        "virtual_pipeline_model_parallel_size: 1",
        "run.yaml:1: virtual_pipeline_model_parallel_size is 1\n"
        "    why: expected a whole number, at least 2, or null\n"
        "    fix: write virtual_pipeline_model_parallel_size: 2, or null",
    ),
    (
        "tensor_model_parallel_size: true",
        "run.yaml:1: tensor_model_parallel_size is true\n"
        "    why: expected a whole number, at least 1\n"
        "    fix: write tensor_model_parallel_size: 1, the default",
    ),
    (
        "lr_scheduler_type: cosin",
        "run.yaml:1: lr_scheduler_type is 'cosin'\n"
        "    why: expected one of: cosine, linear, constant, constant_with_warmup, inverse_sqrt, polynomial, "
        "cosine_with_restarts, cosine_with_min_lr, warmup_stable_decay\n"
        "    fix: write lr_scheduler_type: cosine",
    ),
    (
        "adam_beta2: 1.5",
        "run.yaml:1: adam_beta2 is 1.5\n"
        "    why: expected a number, at least 0, below 1\n"
        "    fix: write adam_beta2: 0.999, the default",
    ),
    (
        "warmup_ratio: 3",
        "run.yaml:1: warmup_ratio is 3\n"
        "    why: expected a number, at least 0, at most 1\n"
        "    fix: write warmup_ratio: 1",
    ),
    (
        "interleave_probs: [0.3, x, true]",
        "run.yaml:1: interleave_probs is [0.3, x, true]\n"
        "    why: expected a list of numbers, or numbers separated by commas, or null; 'x', true do not fit\n"
        "    fix: remove interleave_probs, or give it a list of numbers, or numbers separated by commas",
    ),
    (
        "dataset_weights: 1;2",
        "run.yaml:1: dataset_weights is '1;2'\n"
        "    why: expected a list of numbers, or numbers separated by commas, or null\n"
        "    fix: remove dataset_weights, or give it a list of numbers, or numbers separated by commas",
    ),
    (
        "report_to: tensorboard, wandB",
        "run.yaml:1: report_to is 'tensorboard, wandB'\n"
        "    why: expected a list of any of: tensorboard, wandb, swanlab, mlflow, none, all; 'wandB' does not fit\n"
        "    fix: write report_to: [tensorboard, wandb]",
    ),
    (
        "pref_loss: [sigmoid, SimP0]",
        "run.yaml:1: pref_loss is [sigmoid, SimP0]\n"
        "    why: expected a list of any of: sigmoid, hinge, ipo, robust, simpo, orpo, cpo, apo_zero, apo_down,"
        " bco_pair, sppo_hard, nca_pair, exo_pair, discopop; 'SimP0' does not fit\n"
        "    fix: write pref_loss: [sigmoid, simpo]",
    ),
    (
        "pref_loss: [sigmoid, kto_pair]",
        "run.yaml:1: pref_loss: [sigmoid, kto_pair] is not supported\n"
        "    why: losses over all pairs of a batch are not supported\n"
        "    fix: write pref_loss: sigmoid, which LLaMA-Factory computes for kto_pair; stage: kto trains on"
        " single answers",
    ),
    (
        "output_dir: [a]",
        "run.yaml:1: output_dir is [a]\n    why: expected text, or null\n    fix: remove output_dir, or give it text",
    ),
    (
        "seed: 1\nbf16: true\nseed: 2",
        "run.yaml:3: seed is written twice, first at run.yaml:1\n    fix: keep one of the two lines",
    ),
    (
        "eval_strategy: no\nevaluation_strategy: epoch",
        "run.yaml:2: evaluation_strategy sets the same setting as eval_strategy at run.yaml:1\n"
        "    fix: keep one of the two lines, preferably eval_strategy",
    ),
    ("seed: 1\n\tbf16: true", "run.yaml:2: a tab where YAML allows only spaces\n    fix: indent with spaces"),
    (
        "default_system: *x",
        "run.yaml:1: not readable as YAML\n    why: found undefined alias 'x'\n"
        "    fix: quote text that starts with *, or write its anchor, &NAME, in an earlier line",
    ),
    ("- seed\n- bf16", "run.yaml:1: the file contains a list, not settings\n    fix: write one `key: value` per line"),
    ("seed", "run.yaml:1: the file contains one value, not settings\n    fix: write one `key: value` per line"),
    (
        "seed: 1\n---\nseed: 2",
        "run.yaml:2: a second document starts here\n    fix: remove the line `---`, or split the file",
    ),
    ("[a]: 1", "run.yaml:1: a key must be text\n    fix: write `key: value`"),
    (
        "output_dir: " + "a" * 300,
        f"run.yaml:1: output_dir is '{'a' * 100}...'\n"
        "    why: file systems allow at most 255 bytes per name and 4095 per path\n"
        "    fix: write a shorter one",
    ),
    (
        'default_system: "\\0"',
        "run.yaml:1: not readable as YAML\n    why: '\\x00' is in a text\n    fix: remove '\\x00'",
    ),
    (
        "seed: " + "9" * 301,
        f"run.yaml:1: not readable as YAML\n    why: cannot read '{'9' * 100}...' as int\n"
        "    fix: write a shorter number, or quote it as text",
    ),
    ("seed: !!int x", "run.yaml:1: not readable as YAML\n    why: cannot read 'x' as int\n    fix: remove the tag"),
    (
        "lr_scheduler_kwargs: {a: 1, a: 2}",
        "run.yaml:1: not readable as YAML\n    why: 'a' is written twice\n    fix: keep one of the two",
    ),
    (b"run_name: \xff", "run.yaml: not UTF-8 text (byte 10)\n    fix: save the file as UTF-8"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_in_a_file_is_told_with_its_line_and_fix(read, text, message):
    assert report(read(text)) == message


HOSTILE = [
    "a: b: c", "a: [1, 2", "a: 'open", "seed: !!int x", "seed: !!python/object:os.system {}",
    "lr_scheduler_kwargs: &a [*a]",
    "lr_scheduler_kwargs: {a: 1, a: 2}", "run_name: \x07", "learning_rate: .nan", "learning_rate: .inf", "seed: 1e400",
    "learning_rate: " + "9" * 400, "seed: " + "9" * 5000, "? {a: 1}\n: 2", "*a : 1", "a: *b",
    "%YAML 9", 'run_name: "\\ud800"', 'lr_scheduler_kwargs: {"a\\0": 1}', "dataset: [a, " + "/b" * 2100 + "]",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_file_causes_a_traceback(read, text):
    loaded = read(text)
    assert loaded.findings
    assert all(finding.where.startswith("run.yaml") for finding in loaded.findings)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\ufeffseed: 42\n"])
def test_files_with_nothing_to_say(read, text):
    loaded = read(text)
    assert loaded.findings == []
    assert loaded.settings == Settings()


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(read):
    loaded = read(
        "lr_scheduler_type: cosin\nbf16: true\nfp16: true\nlerning_rate: 1\npure_bf16: true\ncutoff_len: 0\n"
        "model_name_or_path: m\noutput_dir: o\n",
        ["seed=x"],
    )
    assert [finding.where for finding in loaded.check()] == [
        "run.yaml:1", "run.yaml:3", "run.yaml:4", "run.yaml:5", "run.yaml:6", "seed=x", ""
    ]  # fmt: skip
    with pytest.raises(MegatuneError, match="dataset is missing") as caught:
        loaded.require_valid()
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert len(caught.value.findings) == 7
    assert loaded.settings.precision.bf16  # what is valid is kept, for the rules


def test_a_refused_setting_is_not_judged_again_by_rules(read):
    loaded = read("dataset: {a: b}\nmodel_name_or_path: m\noutput_dir: o\n")
    assert [finding.what for finding in loaded.check()] == ["dataset is {a: b}"]
    unreadable = read("seed: 1\n\tbf16: true\n")
    assert len(unreadable.check()) == 1


WRONG_COMMAND_LINE = [
    (
        ["seed=a:²"],
        [],
        "seed=a:²: seed is 'a:²'\n    why: expected a whole number, at least 0, below 4294967296\n"
        "    fix: write seed=42, the default",
    ),
    (
        ["packing=[" + 5000 * "9" + "]"],
        [],
        f"packing=[{191 * '9'}...: packing is '[{99 * '9'}...'\n    why: expected true or false, or null\n"
        "    fix: remove packing, or give it true or false",
    ),
    (["seed"], [], "'seed' is not an override\n    fix: write key=value, without spaces around ="),
    (["=1"], [], "'=1' is not an override\n    fix: write key=value, without spaces around ="),
    (["sed=1"], [], "sed=1: unknown setting 'sed'\n    fix: did you mean seed?"),
    ([], ["seed", "1"], "'seed' is not a flag\n    fix: write --key value, or --key=value"),
    ([], ["--"], "'--' is not a flag\n    fix: write --key value, or --key=value"),
    ([], ["--sed", "1"], "--sed: unknown setting 'sed'\n    fix: did you mean seed?"),
    (
        [],
        ["--output_dir", "--bf16"],
        "--output_dir: output_dir is true\n"
        "    why: expected text, or null\n"
        "    fix: remove --output_dir, or give it text",
    ),
    (  # a byte that is not UTF-8, as Python reads it; paths may have it
        ["dataset=half-\udcff.json", "default_system=caf\udce9"],
        [],
        "default_system=caf\udce9: default_system is 'caf\\udce9'\n"
        "    why: only names and paths may have bytes that are not UTF-8\n"
        "    fix: write it as UTF-8",
    ),
]


@pytest.mark.parametrize(("overrides", "flags", "message"), WRONG_COMMAND_LINE)
def test_what_is_wrong_on_a_command_line(overrides, flags, message):
    assert report(load(overrides=overrides, flags=flags)) == message


def test_a_missing_file_ends_with_its_own_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MegatuneError) as caught:
        load("no.yaml")
    assert caught.value.exit_code == ExitCode.INPUT
    assert str(caught.value) == (
        "there is no settings file no.yaml\n    fix: check the path; it is relative to the working directory"
    )
    with pytest.raises(MegatuneError, match="is a folder") as caught:
        load(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT


def test_a_key_between_training_and_evaluation_is_the_one_of_training() -> None:
    (finding,) = load(overrides=["per_device_batch_size=2"]).findings
    assert finding.fix == "did you mean per_device_train_batch_size?"


@pytest.mark.parametrize("line", ["max_steps:2", "max_steps 2"])
def test_a_colon_without_a_space_is_named_in_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: m\n{line}\nstage: sft\n")
    (finding,) = load(tmp_path / "run.yaml").findings
    assert finding.where.endswith("run.yaml:2")
    assert "put a space after the colon" in finding.fix


def test_a_misspelt_setting_is_not_said_to_be_missing_as_well(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\ndatset: d\nouput_dir: out\n")
    assert [finding.what for finding in load(path).check()] == [
        "unknown setting 'datset'",
        "unknown setting 'ouput_dir'",
    ]
