"""No flag of Megatron-SWIFT is dropped in silence: each is translated, ignored with its reason, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.cli.swift import command_of
from megatune.config.dialects.dialect import table
from megatune.config.dialects.swift import SwiftRun, read_swift, swift_lines
from megatune.config.settings import all_settings, setting_value
from megatune.config.values import parse, to_value


class Flag(NamedTuple):
    name: str
    versions: str
    kind: str
    default: str
    sample: str
    fate: str
    beside: tuple[str, ...]


def _flags() -> list[Flag]:
    lines = Path(__file__).with_name("swift_flags.txt").read_text().splitlines()
    return [Flag(*words[:6], tuple(words[6:])) for words in map(str.split, lines) if words[0] != "#"]


FLAGS = _flags()
REQUIRED = {"model": "m", "dataset": "d", "output_dir": "o", "train_iters": "5"}
STANDS_FOR = {"save": "output_dir", "num_train_epochs": "train_iters", "max_epochs": "train_iters"}


def read(*flags: Flag) -> SwiftRun:
    verb, values = "sft", dict(REQUIRED)
    for flag in flags:
        for word in flag.beside:
            name, equals, value = word.partition("=")
            verb = verb if equals else name
            values |= {name: value} if equals else {}
        values.pop(STANDS_FOR.get(flag.name, ""), None)
    values |= {flag.name: flag.sample for flag in flags}
    words = [word for name, value in values.items() for word in (f"--{name}", value)]
    return read_swift(verb, words, env={}, config={"num_hidden_layers": 4}, on_cpu=True)


def fate(run: SwiftRun, flag: Flag) -> str:
    """What a user is told of a flag."""
    where = f"--{flag.name}"
    if any(finding.where == where for finding in run.loaded.findings):
        return "refused"
    # A line of its own, in a column of its own: swift      --lr 1e-5   learning_rate: 1e-05
    said = [line for line in swift_lines(run, run.loaded) if line.split()[1] == where]
    if said:
        return "ignored" if "  ignored: " in said[0] else "translated"
    set_here = [path for path, entry in run.loaded.entries.items() if entry.where == where]
    same = any(path.partition(".")[2] == flag.name for path in set_here)
    return "translated" if same else "dropped"


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_becomes_what_the_table_says(flag):
    assert fate(read(flag), flag) == flag.fate


def test_flags_of_version_3_alone_tell_the_version():
    both = {"no_masked_softmax_fusion", "no_bias_dropout_fusion", "no_gradient_accumulation_fusion"}  # --no_X of 4
    assert {flag.name for flag in FLAGS if flag.versions == "3"} - both == {
        name for name, row in table("swift").items() if row.version == 3
    }


def test_what_is_refused_passes_at_the_value_that_it_has_there():
    kept = [flag for flag in FLAGS if flag.fate == "refused" and flag.default not in ("null", "[]") and not flag.beside]
    assert len(kept) > 80
    for flag in kept:
        run = read(flag._replace(sample=flag.default))
        assert fate(run, flag) != "refused", flag.name


def test_every_default_that_differs_is_applied_or_kept_with_a_reason():
    rows, missing = table("swift"), []
    for flag in FLAGS:
        row = rows.get(flag.name)
        if flag.fate != "translated" or row is None or not row.paths:
            continue
        theirs = row.read(parse("null" if flag.default == "null" else flag.default))
        now = rows[row.renamed_to] if row.renamed_to else row
        applied = now.default_in(int(flag.versions[0]))
        differs = any(all_settings()[path].default != value for path, value in theirs.items())
        if differs and (applied is ... or (not now.kept and row.read(to_value(applied)) != theirs)):
            missing.append(flag.name)
    assert missing == []


@pytest.mark.parametrize(("flags", "merges"), [("", False), ("--merge_lora true", True)])
def test_adapters_are_written_in_one_form(flags, merges):
    """Megatron-SWIFT's documents train adapters so, and then merge them with `megatron export --mcore_adapter`."""
    words = f"--model m --dataset d --output_dir o --train_iters 5 --tuner_type lora --save_safetensors false {flags}"
    run = read_swift("sft", words.split(), env={}, on_cpu=True)
    assert run.loaded.check(world_size=1) == []
    checkpoint = run.loaded.settings.checkpoint
    assert (checkpoint.save_format, checkpoint.merge_lora) == ("hf", merges)
    assert any("peft's form" in line for line in swift_lines(run, run.loaded) if "--save_safetensors" in line)
    export = command_of("megatron", "export").read(["--model", "m", "--mcore_adapter", "o/checkpoint-5"])
    assert export.options.adapters == ["o/checkpoint-5"]


OF_SWIFT = [
    ("--lr -1", "write --lr 1e-05"),
    ("--weight_decay -1", "write --weight_decay 0.1"),
    ("--adam_beta2 2", "write --adam_beta2 0.95, the default"),
    ("--lr_decay_style foo", "write --lr_decay_style cosine, the default"),
    ("--recompute_granularity foo", "write --recompute_granularity selective, the default"),
    ("--lora_dropout 2 --tuner_type lora", "write --lora_dropout 0.05, the default"),
    ("--num_train_epochs 0", "remove --num_train_epochs, or give it a number, above 0"),
    ("--max_epochs 0", "remove --max_epochs, or give it a number, above 0"),
    ("--attention_backend foo", "write --attention_backend auto, the default"),  # ours is kept
]


@pytest.mark.parametrize(("flags", "fix"), OF_SWIFT)
def test_the_default_that_a_fix_names_is_the_one_that_counts_without_the_flag(flags, fix):
    words = f"--model m --dataset d --output_dir o {flags}".split()
    words += [] if "epochs" in flags else ["--train_iters", "5"]
    assert [each.fix for each in read_swift("sft", words, env={}, on_cpu=True).loaded.findings] == [fix]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FLAGS), min_size=2, max_size=6, unique_by=lambda flag: flag.name))
def test_no_combination_hides_a_flag(flags):
    run = read(*flags)
    assert [flag.name for flag in flags if fate(run, flag) == "dropped"] == []


_JUNK = st.sampled_from([[], [""], ["abc"], ["-1"], ["1e999"], ["["], ["{a: b"], ["null"], ["a", "b"], ["true"], ["'"]])
_CONFIGS = st.sampled_from(
    [
        {},
        {"num_hidden_layers": 4, "dtype": "float16", "max_position_embeddings": 9, "num_experts": 4},
        {"vision_config": {}, "model_type": "qwen3_vl", "text_config": {"num_hidden_layers": "x"}},
    ]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FLAGS), _JUNK), min_size=1, max_size=5), _CONFIGS)
def test_what_makes_no_sense_is_a_finding(flags, config):
    words = [word for flag, values in flags for word in (f"--{flag.name}", *values)]
    for verb in ("sft", "pt", "rlhf"):
        run = read_swift(verb, words, env={}, config=config, on_cpu=True)
        loaded = run.loaded.for_world(1)
        loaded.check(world_size=1)
        assert swift_lines(run, loaded)


IGNORED = [
    ("sft", "--data_seed 42", "seed also orders the rows"),
    ("sft", "--seed 7 --data_seed 7", "seed also orders the rows"),
    ("sft", "--lora_rank 4", "it belongs to tuner_type lora"),
    ("sft", "--beta 1", "it belongs to rlhf"),
    ("sft", "--val_dataset v --eval_iters 0", "eval_iters is 0"),
    ("sft", "--eval_steps 5", "there are no rows for evaluation"),
    ("sft", "--add_version false", "output_dir is used as written"),
    ("sft", "--save_safetensors true", "checkpoints are Hugging Face models"),
    ("sft", "--num_train_epochs 2 --save_safetensors true", "num_train_epochs decides, since version 3.12"),
    ("sft", "--lr_decay_iters 5", "it is train_iters"),
    ("sft", "--train_dataloader_shuffle true", "rows are shuffled by dataset_shuffle"),
    ("sft", "--train_dataloader_shuffle false", "dataset_shuffle is still on"),
    ("sft", "--finetune true", "a run loads only the weights, and starts at step 0"),
    ("sft", "--finetune false", "a Hugging Face model has weights only"),
    ("pt", "--log_interval 1 --loss_scale default", "version 3 trains on every token of a text"),
    ("rlhf", "--rlhf_type grpo --rpo_alpha 1", "it belongs to the preference stages"),
]


@pytest.mark.parametrize(("verb", "flags", "why"), IGNORED)
def test_what_changes_nothing_beside_others_is_said_with_its_reason(verb: str, flags: str, why: str) -> None:
    run = read_swift(verb, f"--model m --dataset d --train_iters 5 {flags}".split(), env={})
    assert run.loaded.check() == []
    assert why in run.command.ignored.values()


@pytest.mark.parametrize(
    ("flags", "path", "expected"),
    [
        ("--finetuning_type lora --lora_rank 4", "finetuning.lora_rank", 4),
        ("--finetuning_type lora", "optimizer.learning_rate", 1e-4),
        ("--eval_dataset v", "evaluation.eval_strategy", "steps"),
        ("--interleave_probs 0.5,0.5", "data.mix_strategy", "interleave_under"),
        ("--cutoff_len 100", "run.memory_check", "error"),
    ],
)
def test_a_name_of_ours_says_what_its_flag_says(flags: str, path: str, expected: object) -> None:
    """Other flags depend on it."""
    config = {"max_position_embeddings": 4096}
    run = read_swift("sft", f"--model m --dataset d e --train_iters 5 {flags}".split(), env={}, config=config)
    assert run.loaded.check() == []
    assert setting_value(run.loaded.settings, path) == expected


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        ("--report_to wandbb", "report_to is [wandbb]", "write --report_to wandb"),
        ("--recompute_modules core_atn mlp", "recompute_modules is", "write --recompute_modules core_attn mlp"),
        ("--loss_type sigmod", "loss_type is [sigmod]", "write --loss_type sigmoid"),
        ("--rlhf_type kto --loss_type kt", "loss_type is 'kt'", "write --loss_type kto"),
    ],
)
def test_what_is_written_as_the_fix_says_is_right(flags: str, what: str, fix: str) -> None:
    """In the words of a command line, whose lists have no brackets."""
    words = f"--model m --dataset d --train_iters 5 {flags}".split()
    (finding,) = read_swift("rlhf", words, env={}).loaded.findings
    assert finding.what.startswith(what)
    assert finding.fix == fix
    assert read_swift("rlhf", [*words, *fix.removeprefix("write ").split()], env={}).loaded.findings == []


@pytest.mark.parametrize("flag", ["loss_type", "pref_loss"])
def test_rules_name_the_flag_that_was_written(flag: str) -> None:
    words = f"--model m --dataset d --train_iters 5 --{flag} simpo --ref_model r".split()
    (finding,) = read_swift("rlhf", words, env={}).loaded.check()
    assert finding.what == f"--ref_model r with --{flag} simpo"


def test_a_variable_of_a_file_has_a_name(tmp_path):
    (path := tmp_path / "flags.yaml").write_text("model: m\ndataset: [d]\nENV: {'A=B': 1}\n", encoding="utf-8")
    run = read_swift("sft", [str(path)], env={})
    assert any("ENV: 'A=B' is not a valid name of a variable" in finding for finding in map(str, run.loaded.findings))
    assert "A=B" not in run.command.variables


def test_a_system_message_of_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "system.txt").write_bytes(b"\xff")
    words = ["--model", "m", "--dataset", "d", "--output_dir", "o", "--train_iters", "5", "--system"]
    runs = [read_swift("sft", [*words, f"{name}.txt"], env={}) for name in ("system", "none")]
    text, missing = (run.loaded.findings[0] for run in runs)
    assert (text.what, text.why) == ("system: system.txt cannot be read", "it is not UTF-8 text")
    assert (missing.what, missing.why) == ("system: none.txt cannot be read", "No such file or directory")
