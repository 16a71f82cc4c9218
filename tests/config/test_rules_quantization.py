"""Rules of a base in few bits, with their whole messages."""

import pytest
from test_rules import QWEN
from test_rules_finetuning import messages

from megatune.config.load import load

LORA, BITS = "finetuning_type=lora", "quantization_bit=4"


@pytest.mark.parametrize(
    "overrides",
    [
        [LORA, BITS],
        [LORA, "quantization_bit=8", "quantization_method=bnb"],
        [LORA, BITS, "quantization_type=fp4", "double_quantization=false", "use_dora=true"],
        # A file may say what is so anyway.
        ["quantization_bit=null", "quantization_type=nf4", "double_quantization=true"],
    ],
)
def test_what_is_valid_passes(overrides):
    assert messages(QWEN, *overrides) == []


# overrides -> the one message they cause
WRONG = [
    (
        ["bf16=true", "fp8=rowwise", "finetuning_type=lora", "quantization_bit=8"],
        "fp8: rowwise with quantization_bit: 8\n"
        "    why: quantized matrices are multiplied in bf16\n"
        "    fix: remove fp8 or quantization_bit",
    ),
    (
        [BITS],
        "quantization_bit: 4 with finetuning_type: full\n"
        "    why: quantized weights cannot be trained: updates are smaller than their resolution\n"
        "    fix: write finetuning_type: lora, or remove quantization_bit",
    ),
    (
        [LORA, "quantization_type=fp4"],
        "quantization_type: fp4 without quantization_bit\n"
        "    why: it sets how 4-bit values are quantized\n"
        "    fix: write quantization_bit: 4, or remove quantization_type",
    ),
    (
        [LORA, "quantization_bit=8", "double_quantization=false"],
        "double_quantization: false with quantization_bit: 8\n"
        "    why: it sets how 4-bit values are quantized\n"
        "    fix: write quantization_bit: 4, or remove double_quantization",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_message_says_what_why_and_the_nearest_fix(overrides, message):
    assert messages(None, *overrides) == [message]


@pytest.mark.parametrize("method", ["gptq", "awq", "aqlm", "eetq", "hqq"])
def test_other_ways_are_refused_by_name(method):
    (finding,) = load(overrides=[LORA, BITS, f"quantization_method={method}"]).findings
    assert f"quantization_method: {method} is not supported" in str(finding)
    assert "write quantization_method: bnb" in str(finding)
