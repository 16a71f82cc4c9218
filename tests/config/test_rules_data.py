"""Rules of the data, each with its whole message."""

import pytest
from test_rules import BASE

from megatune.config.load import load
from megatune.config.rules import DATA_RULES, check
from megatune.errors import ExitCode, MegatuneError

TWO = "dataset=a,b"
STREAMED = ["streaming=true", "max_steps=5"]


def messages(*overrides: str) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings)]


VALID = [
    [TWO, "mix_strategy=interleave_under"],
    [TWO, "mix_strategy=interleave_over", "interleave_probs=0.3,0.7"],
    ["dataset=a,b,c", "mix_strategy=interleave_once", "interleave_probs=0.333,0.333,0.333"],
    [TWO, "dataset_weights=2,0.5"],
    ["group_by_length=true"],
    ["group_by_length=true", "stage=pt", "packing=false"],
    ["disable_shuffling=true", "stage=pt"],
    [*STREAMED],
    [*STREAMED, "val_size=100", "eval_strategy=steps", "disable_shuffling=true"],
    [*STREAMED, "eval_dataset=e", "eval_strategy=steps", TWO, "mix_strategy=interleave_over", "interleave_probs=.5,.5"],
    ["tokenized_path=rows", "on_bad_row=quarantine", "template=null"],
    ["mask_history=true", "preserve_thinking=true", "truncation_strategy=left"],
    ["preserve_thinking=true"],
    [*STREAMED, "buffer_size=128"],
    ["stage=dpo"],
    ["stage=dpo", "packing=true", "preserve_thinking=true"],
    ["template=qwen", "tool_format=glm4"],
    ["stage=pt", "tool_format=glm4"],
    ["model_name=[小黄, Xiao Huang]", "model_author=us", 'columns={"q": "query"}', "dataset_shuffle=false"],
]


@pytest.mark.parametrize("overrides", VALID)
def test_what_is_valid_passes(overrides):
    assert messages(*overrides) == []


_STREAMING_WHY = "    why: the number of rows is not known while they are read\n"
_PAIR_WHY = "    why: only the answers are trained\n"

WRONG = [
    (
        ["early_stopping_steps=2"],
        "early_stopping_steps: 2 with eval_strategy: no\n"
        "    why: nothing is evaluated\n"
        "    fix: write eval_strategy: steps, or remove early_stopping_steps",
    ),
    (
        ["tool_format=qwen"],
        "tool_format: qwen with template: null\n"
        "    why: the tokenizer's chat template has its own tool format\n"
        "    fix: write a template by name, or remove tool_format",
    ),
    (
        ["tool_format=qwen", "template=mistral"],
        "tool_format: qwen with template: mistral\n"
        "    why: it writes tools into the last question, and ids to calls and results\n"
        "    fix: remove tool_format, or write template: FILE.yaml",
    ),
    (
        ["tool_format=qwen", "conversation_rules=ms_swift_4", "truncation_strategy=drop"],
        "tool_format: qwen with conversation_rules: ms_swift_4\n"
        "    why: ms-swift's rules use agent_template\n"
        "    fix: write agent_template",
    ),
    (
        ["conversation_rules=ms_swift_4"],
        "truncation_strategy: budget with conversation_rules: ms_swift_4\n"
        "    why: ms-swift drops long rows, or truncates them at one end\n"
        "    fix: write truncation_strategy: drop, left or right",
    ),
    (
        ["agent_template=hermes"],
        "agent_template: hermes with conversation_rules: megatune\n"
        "    why: the built-in rules do not use it\n"
        "    fix: write conversation_rules: ms_swift_4, or remove agent_template",
    ),
    (
        ["stage=pt", "truncation_strategy=split"],
        "truncation_strategy: split with conversation_rules: megatune\n"
        "    why: it is ms-swift's truncation\n"
        "    fix: remove truncation_strategy",
    ),
    (
        ["conversation_rules=ms_swift_3", "truncation_strategy=split"],
        "truncation_strategy: split with stage: sft\n    why: it splits texts of stage pt\n"
        "    fix: write truncation_strategy: drop, left or right",
    ),
    (
        ["conversation_rules=ms_swift_4", "truncation_strategy=drop", "template_date=27.11.2026"],
        "template_date: 27.11.2026 is not a date\n    fix: write it as year, month and day: 2026-11-27",
    ),
    (
        ["image_max_pixels=1000"],
        "image_min_pixels 1024 is above image_max_pixels 1000\n"
        "    why: no size is between them\n"
        "    fix: raise image_max_pixels, or lower image_min_pixels",
    ),
    (
        ["buffer_size=128"],
        "buffer_size: 128 without streaming\n    why: prepared rows are shuffled all together\n"
        "    fix: write streaming: true, or remove buffer_size",
    ),
    (
        [TWO, "mix_strategy=interleave_over", "interleave_probs=0.5"],
        "1 of interleave_probs for 2 data sets\n    fix: write as many numbers as data sets, in their order",
    ),
    (
        [TWO, "dataset_weights=1,2,3"],
        "3 of dataset_weights for 2 data sets\n    fix: write as many numbers as data sets, in their order",
    ),
    (
        [TWO, "mix_strategy=interleave_over", "interleave_probs=[]"],
        "0 of interleave_probs for 2 data sets\n    fix: write as many numbers as data sets, in their order",
    ),
    (
        [TWO, "mix_strategy=interleave_under", "interleave_probs=30,70"],
        "interleave_probs sum to 100, not to 1\n    fix: write interleave_probs: 0.3, 0.7",
    ),
    (
        [TWO, "mix_strategy=interleave_under", "interleave_probs=0,1"],
        "interleave_probs has 0\n"
        "    why: every number must be above 0\n"
        "    fix: remove the data sets that should not be used from dataset",
    ),
    (
        [TWO, "dataset_weights=1,-2"],
        "dataset_weights has -2\n"
        "    why: every number must be above 0\n"
        "    fix: remove the data sets that should not be used from dataset",
    ),
    (
        [TWO, "interleave_probs=0.5,0.5"],
        "interleave_probs: [0.5, 0.5] with mix_strategy: concat\n"
        "    why: concat takes every data set completely\n"
        "    fix: write mix_strategy: interleave_over, or remove interleave_probs",
    ),
    (
        [TWO, "mix_strategy=interleave_once", "dataset_weights=1,2"],
        "dataset_weights: [1.0, 2.0] with mix_strategy: interleave_once\n"
        "    why: both set how often each data set is used\n"
        "    fix: write interleave_probs instead of dataset_weights",
    ),
    (
        ["group_by_length=true", "disable_shuffling=true"],
        "group_by_length: true with disable_shuffling: true\n"
        "    why: one sorts rows, the other leaves them as they are\n"
        "    fix: remove group_by_length or disable_shuffling",
    ),
    *(
        (
            ["group_by_length=true", packs],
            "group_by_length: true with packing\n"
            "    why: packed rows have the same length\n"
            "    fix: write group_by_length: false",
        )
        for packs in ("packing=true", "neat_packing=true", "stage=pt")
    ),
    (
        ["streaming=true"],
        f"streaming: true with max_steps: -1\n{_STREAMING_WHY}    fix: write max_steps: N",
    ),
    (
        [*STREAMED, "val_size=0.1", "eval_strategy=steps"],
        f"streaming: true with val_size 0.1\n{_STREAMING_WHY}"
        "    fix: write val_size as a number of rows, or name an eval_dataset",
    ),
    (
        [*STREAMED, "group_by_length=true"],
        f"group_by_length: true with streaming: true\n{_STREAMING_WHY}    fix: remove group_by_length or streaming",
    ),
    (
        [*STREAMED, "tokenized_path=rows"],
        "tokenized_path: rows with streaming: true\n"
        "    why: rows are trained as they are read, and not stored\n"
        "    fix: remove tokenized_path or streaming",
    ),
    (
        [*STREAMED, TWO, "dataset_weights=1,2"],
        f"dataset_weights: [1.0, 2.0] with streaming: true\n{_STREAMING_WHY}"
        "    fix: write mix_strategy: interleave_over and interleave_probs, or remove streaming",
    ),
    (
        [*STREAMED, "eval_dataset=e", "eval_strategy=epoch"],
        "eval_strategy: epoch with streaming: true\n"
        "    why: the number of steps per epoch is not known while rows are read\n"
        "    fix: write eval_strategy: steps",
    ),
    (
        [*STREAMED, "save_strategy=epoch"],
        "save_strategy: epoch with streaming: true\n"
        "    why: the number of steps per epoch is not known while rows are read\n"
        "    fix: write save_strategy: steps",
    ),
    *(
        (["stage=dpo", f"{key}=true"], f"{key}: true with stage: dpo\n{_PAIR_WHY}    fix: remove {key}")
        for key in ("train_on_prompt", "mask_history")
    ),
    (
        ["model_name=[a, b, c]"],
        "model_name has 3 values\n    why: a list has the value of Chinese rows, then that of all others\n"
        "    fix: write one value, or two",
    ),
    (
        ["stage=kto", "mask_history=true"],
        "mask_history: true with stage: kto\n    why: only the answers are trained\n    fix: remove mask_history",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_what_is_wrong_is_told_with_its_fix(overrides, message):
    assert "\n".join(messages(*overrides)) == message


def test_verbs_that_only_read_the_data_ask_for_no_more_than_that():
    """No output_dir, and nothing that evaluates what is held out."""
    words = ["model_name_or_path=m", "dataset=d"]
    assert load(overrides=[*words, "val_size=0.1"]).require_valid(rules=DATA_RULES).data.val_size == 0.1
    with pytest.raises(MegatuneError) as caught:
        load(overrides=["val_size=10.5", "cutoff_len=0"]).require_valid(rules=DATA_RULES)
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert sorted(finding.what for finding in caught.value.findings) == [
        "cutoff_len is 0",
        "dataset is missing",
        "model_name_or_path is missing",
        "val_size 10.5 is neither a fraction below 1 nor a number of rows",
    ]


def test_rules_of_the_data_are_rules_of_a_run():
    assert check(load(overrides=["dataset=d"]).settings, rules=DATA_RULES) != []


def test_a_refused_number_is_not_judged_again():
    loaded = load(overrides=[*BASE, TWO, "mix_strategy=interleave_under", "interleave_probs=x,y"])
    assert [finding.what for finding in loaded.check()] == ["interleave_probs is 'x,y'"]
