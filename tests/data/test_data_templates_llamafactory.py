"""Templates that follow LLaMA-Factory: token for token as recorded from its own code, with what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kit import deepseek_tokenizer, llama3_tokenizer, mistral_tokenizer, qwen_tokenizer
from transformers import PreTrainedTokenizerFast

from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.encode import Encoded, Encoder
from megatune.data.templates import load_template

RECORDED = json.loads((Path(__file__).parent / "llamafactory_templates.json").read_text(encoding="utf-8"))
TOKENIZERS = {"llama3": llama3_tokenizer, "deepseek3": deepseek_tokenizer}
CASES: list[dict[str, Any]] = [case for case in RECORDED["cases"] if case["tool_format"] is None]


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
