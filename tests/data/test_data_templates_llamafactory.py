"""Templates that follow LLaMA-Factory: token for token as recorded from its own code, with what is trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kit import deepseek_tokenizer, llama3_tokenizer, mistral_tokenizer, qwen_tokenizer
from transformers import PreTrainedTokenizerFast

from megatune.config.settings import all_settings
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.encode import Encoded, Encoder
from megatune.data.templates import Thinking, load_template
from megatune.data.templates.tools import LLAMA3_DATE

RECORDED = json.loads((Path(__file__).parent / "llamafactory_templates.json").read_text(encoding="utf-8"))
TOKENIZERS = {"llama3": llama3_tokenizer, "deepseek3": deepseek_tokenizer}
CASES: list[dict[str, Any]] = [case for case in RECORDED["cases"] if case["tool_format"] is None]
FORMATS: list[dict[str, Any]] = [case for case in RECORDED["cases"] if case["tool_format"] is not None]


def conversation(case: dict[str, Any]) -> Conversation:
    """The messages that the case was recorded with."""
    if texts := case.get("messages"):
        messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
        return Conversation(tuple(messages), system=case["system"])
    calls = tuple(ToolCall(name, arguments) for name, arguments in case["calls"])
    messages = [
        Message("user", "Warm in 京都?"), Message("assistant", "", calls), Message("tool", '{"degrees": 9}'),
        Message("assistant", "No, cold."), Message("user", "And 1 + 1?"), Message("assistant", "2"),
    ]  # fmt: skip
    return Conversation(tuple(messages), system=case["system"], tools=tuple(RECORDED["tools"]))


def expected(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Tokenise each text by itself, as LLaMA-Factory does; of every second turn all is trained."""
    ids: list[int] = []
    trained: list[bool] = []
    own = {"{eos}": case["eos"] or tokenizer.eos_token, "{bos}": tokenizer.bos_token}
    for number, turn in enumerate(case["turns"]):
        for text in turn:
            text = re.sub(r"(?<=Today Date: ).*", LLAMA3_DATE, text)  # there the day of the run
            tokens = tokenizer.encode(own.get(text, text), add_special_tokens=False)
            ids += tokens
            trained += [number % 2 == 1] * len(tokens)
    return ids, trained


def check(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast, **options: Any) -> None:
    encoder = Encoder(tokenizer, load_template(case["template"], tokenizer, **options), cutoff_len=10_000)
    (result,) = encoder.encode([conversation(case)])
    assert isinstance(result, Encoded), result
    ids, trained = expected(case, tokenizer)
    (document,) = result.documents
    assert tokenizer.decode(document.input_ids) == tokenizer.decode(ids)
    assert document.input_ids.tolist() == ids
    assert [label != -100 for label in document.labels] == trained


@pytest.mark.parametrize("make", [qwen_tokenizer, llama3_tokenizer, mistral_tokenizer, deepseek_tokenizer])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case['calls'])} calls, {case['system']}")
def test_default_is_llamafactorys_template(case: dict[str, Any], make: Any) -> None:
    """Not the chat template of the tokenizer, which is null."""
    check(case, make())


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: f"{case['template']}, {case['tool_format']}")
def test_tool_format_is_llamafactorys(case: dict[str, Any]) -> None:
    tokenizer = TOKENIZERS.get(case["template"], qwen_tokenizer)()
    if case["turns"] is not None:
        check(case, tokenizer, tool_format=case["tool_format"])
        return
    template = load_template(case["template"], tokenizer, tool_format=case["tool_format"])
    with pytest.raises(RowError, match="parallel tool calls"):  # refused there, too
        template.render(conversation(case), Thinking())


def test_all_of_its_formats_are_here_and_can_be_set() -> None:
    recorded = {case["tool_format"] for case in FORMATS}
    assert recorded == CHOICES


CHOICES = set(all_settings()["data.tool_format"].choices)
WRONG = [(name, {}) for name in sorted(CHOICES - {"seed_oss"})]
WRONG += [("default", {"name": "f", "parameters": 1}), ("gemma4", {"name": "f", "parameters": {"properties": 1}})]


@pytest.mark.parametrize(("tool_format", "tool"), WRONG)
def test_tools_that_a_format_cannot_describe_drop_the_row(tool_format: str, tool: dict[str, Any]) -> None:
    template = load_template("chatml", qwen_tokenizer(), tool_format=tool_format)
    with pytest.raises(RowError) as caught:
        template.render(Conversation((Message("user", "a"), Message("assistant", "b")), tools=(tool,)), Thinking())
    assert caught.value.code == "bad-tools"


@pytest.mark.parametrize("tool_format", ["glm4_moe", "lfm2", "minimax2", "qwen3_5", "seed_oss"])
def test_arguments_that_have_no_names_drop_the_row(tool_format: str) -> None:
    call = Message("assistant", "", (ToolCall("f", [1]),))
    template = load_template("chatml", qwen_tokenizer(), tool_format=tool_format)
    with pytest.raises(RowError, match="arguments are not a JSON object"):
        template.render(Conversation((Message("user", "a"), call), tools=({"name": "f"},)), Thinking())
