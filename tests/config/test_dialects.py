"""A dialect that does more than rename, from its keys to settings, messages and run.yaml."""

from __future__ import annotations

import pytest

from megatune.config.dialects.dialect import Dialect, Row, read_part, table
from megatune.config.load import Loaded, dump, load
from megatune.config.settings import setting_paths
from megatune.errors import Finding
from megatune.references import assign, remove

# Some of Megatron-SWIFT's flags, old names and new ones.
SWIFT = Dialect(
    name="Megatron-SWIFT",
    rows={
        "lr": Row(target="optimizer.learning_rate"),
        "output_dir": Row(target="run.output_dir"),
        "save": Row(target="run.output_dir"),
        "model": Row(target="model.model_name_or_path"),
        "micro_batch_size": Row(target=["batch.per_device_train_batch_size", "batch.per_device_eval_batch_size"]),
        "global_batch_size": Row(global_batch=True),
        "recompute_granularity": Row(target="recompute.recompute_granularity", values={"none": None}),
        "lr_decay_style": Row(target="optimizer.lr_scheduler_type", values={"inverse-square-root": "inverse_sqrt"}),
        "no_rope_fusion": Row(target="performance.apply_rope_fusion", values={True: False, False: True}),
        "distributed_timeout_minutes": Row(target="run.ddp_timeout", factor=60),
        "torch_dtype": Row(
            choices={
                "bfloat16": {"precision.bf16": True},
                "float16": {"precision.fp16": True},
                "float32": {"precision.bf16": False},
            }
        ),
        "tp_comm_overlap": Row(unsupported="it needs Transformer Engine", passes=[False]),
    },
    prefix="--",
    separator=" ",
)
REQUIRED = ["--model", "m", "--dataset", "d", "--save", "o"]


def read(*flags: str) -> Loaded:
    return load(flags=[*REQUIRED, *flags], dialect=SWIFT)


def report(*flags: str, world_size: int | None = None) -> str:
    return "\n".join(map(str, read(*flags).check(world_size=world_size)))


VALUES = [
    (["--lr", "1e-5"], "optimizer.learning_rate", 1e-5),
    (["--lr_decay_style", "inverse-square-root"], "optimizer.lr_scheduler_type", "inverse_sqrt"),
    (["--lr_decay_style", "linear"], "optimizer.lr_scheduler_type", "linear"),
    (["--recompute_granularity", "none"], "recompute.recompute_granularity", None),
    (["--recompute_granularity", "full"], "recompute.recompute_granularity", "full"),
    (["--no_rope_fusion", "false"], "performance.apply_rope_fusion", True),
    (["--no_rope_fusion", "1e5", "--no-rope-fusion"], "performance.apply_rope_fusion", False),
    (["--distributed_timeout_minutes", "2"], "run.ddp_timeout", 120),
    (["--distributed_timeout_minutes", "1.5"], "run.ddp_timeout", 90),
    (["--distributed_timeout_minutes", "null"], "run.ddp_timeout", 1800),
    (["--no_rope_fusion", "null"], "performance.apply_rope_fusion", False),
    (["--micro_batch_size", "4"], "batch.per_device_train_batch_size", 4),
    (["--micro_batch_size", "4"], "batch.per_device_eval_batch_size", 4),
    (["--micro_batch_size", "4", "--per_device_eval_batch_size", "2"], "batch.per_device_eval_batch_size", 2),
    (["--torch_dtype", "bfloat16"], "precision.bf16", True),
    (["--torch_dtype", "bfloat16", "--torch_dtype", "float16"], "precision.bf16", False),
    (["--torch_dtype", "bfloat16", "--torch_dtype", "null"], "precision.bf16", False),
    (["--tp_comm_overlap", "false"], "parallel.tensor_model_parallel_size", 1),
    # Our own names beside the dialect's.
    (["--learning_rate", "1e-5"], "optimizer.learning_rate", 1e-5),
    (["--ddp_timeout", "90"], "run.ddp_timeout", 90),
]


@pytest.mark.parametrize(("flags", "path", "value"), VALUES)
def test_what_keys_set(flags, path, value):
    loaded = read(*flags)
    group, _, name = path.partition(".")
    assert loaded.check() == []
    assert getattr(getattr(loaded.settings, group), name) == value


def test_a_global_batch_waits_for_the_world():
    loaded = read("--global_batch_size", "16", "--micro_batch_size", "2", "--tensor_model_parallel_size", "2",
                  "--sequence_parallel")  # fmt: skip
    assert loaded.check() == []
    assert loaded.settings.batch.gradient_accumulation_steps == 1
    assert loaded.for_world(4).settings.batch.gradient_accumulation_steps == 4
    assert loaded.for_world(8).settings.batch.gradient_accumulation_steps == 2
    assert loaded.require_valid(world_size=16).batch.gradient_accumulation_steps == 1
    assert (
        read("--global_batch_size", "8", "--micro_batch_size", "1", "--num_processes", "4").require_valid()
        == read("--gradient_accumulation_steps", "2", "--micro_batch_size", "1", "--num_processes", "4").require_valid()
    )
    # What is written last wins, whichever of the two it is.
    later = read("--global_batch_size", "16", "--gradient_accumulation_steps", "3")
    assert later.require_valid(world_size=4).batch.gradient_accumulation_steps == 3


MESSAGES = [
    # single values
    (
        ["--lr_decay_style", "inverse-sqrt"],
        "--lr_decay_style: lr_decay_style is 'inverse-sqrt'\n"
        "    why: expected one of: cosine, linear, constant, constant_with_warmup, inverse-square-root, "
        "polynomial, cosine_with_restarts, cosine_with_min_lr, warmup_stable_decay\n"
        "    fix: write --lr_decay_style inverse-square-root",
    ),
    (
        ["--recompute_granularity", "nome"],
        "--recompute_granularity: recompute_granularity is 'nome'\n"
        "    why: expected one of: full, selective, none\n"
        "    fix: write --recompute_granularity none",
    ),
    (
        ["--no_rope_fusion", "maybe"],
        "--no_rope_fusion: no_rope_fusion is 'maybe'\n"
        "    why: expected true or false\n"
        "    fix: write --no_rope_fusion true, the default",
    ),
    (
        ["--distributed_timeout_minutes", "soon"],
        "--distributed_timeout_minutes: distributed_timeout_minutes is 'soon'\n"
        "    why: expected a whole number, above 0\n"
        "    fix: write --distributed_timeout_minutes 30, the default",
    ),
    (
        ["--micro_batch_size", "0"],
        "--micro_batch_size: micro_batch_size is 0\n"
        "    why: expected a whole number, at least 1\n"
        "    fix: write --micro_batch_size 1",
    ),
    (
        ["--torch_dtype", "bfloat"],
        "--torch_dtype: torch_dtype is 'bfloat'\n"
        "    why: expected one of: bfloat16, float16, float32\n"
        "    fix: write --torch_dtype bfloat16",
    ),
    (
        ["--global_batch_size", "many"],
        "--global_batch_size: global_batch_size is 'many'\n"
        "    why: expected a whole number, at least 1\n"
        "    fix: remove --global_batch_size, or give it a whole number, at least 1",
    ),
    (
        ["--tp_comm_overlap"],
        "--tp_comm_overlap: tp_comm_overlap: true is not supported\n"
        "    why: it needs Transformer Engine\n"
        "    fix: remove --tp_comm_overlap, or write --tp_comm_overlap false",
    ),
    (
        ["--lr_decay_stile", "x"],
        "--lr_decay_stile: unknown setting 'lr_decay_stile'\n    fix: did you mean lr_decay_style?",
    ),
    # rules
    (
        ["--sequence_parallel"],
        "--sequence_parallel: --sequence_parallel true with --tensor_model_parallel_size 1\n"
        "    why: it splits the sequence over the tensor-parallel processes; there is one\n"
        "    fix: write --tensor_model_parallel_size 2, or remove --sequence_parallel",
    ),
    (
        ["--recompute_granularity", "none", "--recompute_num_layers", "2"],
        "--recompute_num_layers: --recompute_num_layers 2 with --recompute_granularity none\n"
        "    why: it sets how whole layers are recomputed\n"
        "    fix: write --recompute_granularity full, or remove --recompute_num_layers",
    ),
    (
        ["--torch_dtype", "bfloat16", "--fp16"],
        "--fp16: --fp16 true with --torch_dtype bfloat16\n"
        "    why: the model computes in one of them\n"
        "    fix: remove --fp16: bf16 needs no loss scaling",
    ),
]


@pytest.mark.parametrize(("flags", "message"), MESSAGES)
def test_messages_are_in_the_words_of_the_dialect(flags, message):
    assert report(*flags) == message


def test_a_fix_of_what_follows_from_a_global_batch_names_it():
    flags = ["--micro_batch_size", "2", "--pipeline_model_parallel_size", "4",
             "--virtual_pipeline_model_parallel_size", "2"]  # fmt: skip
    # 24 rows are 6 micro-batches of 2 rows on 2 replicas.
    assert report(*flags, "--global_batch_size", "24", world_size=8) == (
        "--global_batch_size: gradient_accumulation_steps 6 (from --global_batch_size) is not a multiple of "
        "--pipeline_model_parallel_size 4\n"
        "    why: with virtual stages, micro-batches go through the pipeline in rounds of one for each stage\n"
        "    fix: write --global_batch_size 16 or 32"
    )
    assert report(*flags, "--gradient_accumulation_steps", "6", world_size=8).endswith(
        "fix: write --gradient_accumulation_steps 4 or 8"
    )
    assert report(*flags, "--global_batch_size", "18", world_size=8) == (
        "--global_batch_size: global_batch_size 18 is not a multiple of 4\n"
        "    why: every data-parallel process computes as many micro-batches, of --micro_batch_size rows each\n"
        "    fix: write --global_batch_size 16 or 20"
    )


def test_advice_is_phrased_too():
    changes = f"{assign('per_device_train_batch_size', 1)}, {assign('gradient_accumulation_steps', 8)}"
    fix = f"one of: {changes}; {remove('dataset')}; `megatune plan`"
    advice = Finding("x", fix=fix)
    found = read("--micro_batch_size", "2").for_world(4).phrased(advice)
    assert found.fix == "one of: --micro_batch_size 1, --global_batch_size 64; remove --dataset; `megatune plan`"


def test_a_file_may_not_say_two_things(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("no_rope_fusion: true\napply_rope_fusion: true\nlr: 1e-5\nlearning_rate: 1e-5\n")
    loaded = load(path, dialect=SWIFT)
    assert [finding.what for finding in loaded.findings] == [
        f"apply_rope_fusion sets the same setting as no_rope_fusion at {path}:1"
    ]


def test_run_yaml_is_in_our_own_keys_and_is_read_again(tmp_path):
    loaded = read("--lr", "1e-5", "--global_batch_size", "16", "--micro_batch_size", "2", "--no_rope_fusion", "false",
                  "--torch_dtype", "bfloat16", "--recompute_granularity", "none")  # fmt: skip
    loaded = loaded.for_world(4)
    text = dump(loaded.settings, loaded.origins)
    lines = {line.split(":")[0]: line.split() for line in text.splitlines() if ":" in line}
    assert lines["learning_rate"][1:] == ["1e-05", "#", "flag"]
    assert lines["gradient_accumulation_steps"][1:] == ["2", "#", "flag"]
    assert lines["apply_rope_fusion"][1:] == ["true", "#", "flag"]
    assert lines["bf16"][1:] == ["true", "#", "flag"]
    assert not lines.keys() & set(SWIFT.rows) - {"output_dir", "recompute_granularity"}
    path = tmp_path / "run.yaml"
    path.write_text(text)
    for again in (load(path, dialect=SWIFT), load(path)):
        assert again.require_valid(world_size=4) == loaded.settings


def test_checks_name_flags_and_facts_that_there_are() -> None:
    """A misspelt flag in a condition would never be written, and its check never apply."""
    facts = {"version", "verb", "stage", "on_cpu", "has_shared_experts", "epochs"}
    facts |= {"is_megatron", "has_rows", "evaluates", "drops"}  # of the functions that check
    known = {*table("swift"), *(each.renamed_to for each in table("swift").values()), *setting_paths()}
    parts = {each.of for each in table("swift").values()}
    for rows in read_part("swift", "checks").values():
        for row in rows:
            flags = [row["flag"]] if isinstance(row.get("flag"), str) else row.get("flag", [])
            named = {*flags, *row.get("sets", ()), *(key.removeprefix("given ") for key in row.get("if", {}))}
            assert named - facts <= known, row
            assert {*row.get("of", ())} <= parts, row
            assert len({"ignored", "unsupported", "becomes", "default", "sets", "what"} & row.keys()) == 1, row
            assert ("fix" in row) == bool({"unsupported", "what"} & row.keys()), row


def test_checks_of_roll_say_what_is_wrong_and_what_helps() -> None:
    for rows in read_part("roll", "checks").values():
        for row in rows:
            assert len({"ignored", "what", "line"} & row.keys()) == 1, row
            assert ("fix" in row) == ("what" in row), row
            assert row.keys() <= {"if", "at", "what", "why", "fix", "ignored", "line"}, row
