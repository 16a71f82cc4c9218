"""ms-swift's templates of the models that this program trains, by ms-swift's names, and how one is chosen.

ms-swift chooses a template by the name of the model's folder, and so does this; where the name is not a published
model's, the chat template of the tokenizer decides, so that a folder may have any name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from megatune.data.templates.agents import agent_template
from megatune.data.templates.swift import SwiftRules, SwiftTemplate
from megatune.data.templates.tools import LLAMA3_DATE
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUANTIZED = re.compile(r"-(gptq|awq|fp8|bf16|bnb|aqlm)[^/]*$")
_HELPFUL = "You are a helpful assistant."
_QWEN = "You are a helpful and harmless assistant. You are Qwen developed by Alibaba."
_CHATML = SwiftTemplate(
    name="chatml",
    prompt="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
    separator="<|im_end|>\n",
    suffix="<|im_end|>\n",
    system="<|im_start|>system\n{content}<|im_end|>\n",
    marks=("<|im_start|>",),
)
_QWEN3 = replace(_CHATML, stop_words=("<|endoftext|>",), agent="hermes")


def _qwen(name: str, system: str, models: str, *marks: str) -> SwiftTemplate:
    """A template with a default system message, which the chat template has, too, unless other marks are given."""
    marks = ("<|im_start|>", *(marks or (system,)))
    return replace(_QWEN3, name=name, default_system=system, marks=marks, models=models)


_DEEPSEEK = SwiftTemplate(
    name="deepseek_v2_5",
    prompt="<｜User｜>{content}<｜Assistant｜>",
    separator="<｜end▁of▁sentence｜>",
    suffix="<｜end▁of▁sentence｜>",
    prefix="<｜begin▁of▁sentence｜>",
    system="<｜begin▁of▁sentence｜>{content}",
    marks=("<｜User｜>",),
)

_LLAMA3 = SwiftTemplate(
    name="llama3",
    prompt=(
        "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    separator="<|eot_id|>",
    suffix="<|eot_id|>",
    prefix="<|begin_of_text|>",
    system="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
    agent="llama3",
    marks=("<|start_header_id|>",),
)
# ms-swift writes the day of the run; the published chat template has this date unless it is told another.
_LLAMA3_DATES = f"Cutting Knowledge Date: December 2023\nToday Date: {LLAMA3_DATE}\n\n"
_LLAMA3_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n" + _LLAMA3_DATES

_LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe. "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information."
)

# A model's template is the first whose name pattern fits the model's, or else whose marks its chat template has.
_SIZE = r"[\d.]+b"
_INSTRUCT = "(-instruct)?"
_ALL = (
    replace(
        _DEEPSEEK, name="deepseek_v3_1", agent="deepseek_v3_1", thinks=True, empty_thought="</think>",
        thought_start="<think>", after_question_only=True, history_prefix="</think>",
        marks=("<｜User｜>", "thinking is defined"), models=r"deepseek-v3\.1(-base|-terminus)?",
    ),
    replace(
        _DEEPSEEK, name="deepseek_r1", thinks=True, thought_start="<think>\n", marks=("<｜User｜>", "</think>"),
        models=rf"deepseek-r1(-zero|-0528(-qwen3-8b)?|-distill-(qwen|llama)-{_SIZE})?|qwenlong-l1-32b",
    ),
    replace(_DEEPSEEK, models=rf"deepseek-(v3(-0324|-base)?|prover-v2-{_SIZE})"),
    SwiftTemplate(
        name="deepseek", prompt="User: {content}\n\nAssistant:", separator="{eos}", suffix="{eos}", prefix="{bos}",
        system="{bos}{content}\n\n", marks=("User: ", "Assistant:"),
        models=rf"deepseek-(llm|math|coder)-{_SIZE}-(base|chat|instruct|rl)",
    ),
    replace(
        _QWEN3, name="qwen3_vl", thought_start="<think>\n", marks=("<|vision_start|>", "<tool_call>"),
        models=rf"qwen3-vl-{_SIZE}(-a{_SIZE})?-(instruct|thinking)",
    ),
    _qwen(
        "qvq", f"{_QWEN} Answer in the language of the question. You should think step-by-step.", r"qvq-72b-preview",
        "<|vision_start|>", "think step-by-step",
    ),
    _qwen("qwen2_vl", _HELPFUL, rf"qwen2-vl-{_SIZE}{_INSTRUCT}", "<|vision_start|>"),
    _qwen("qwen2_5_vl", _HELPFUL, rf"qwen2\.5-vl-{_SIZE}-instruct", "<|vision_start|>"),  # qwen2_vl's text
    replace(
        _QWEN3, name="qwen3_coder", agent="qwen3_coder", marks=("<|im_start|>", "<function="),
        models=rf"qwen3-coder-{_SIZE}-a{_SIZE}-instruct",
    ),
    replace(
        _QWEN3, name="qwen3", thinks=True, empty_thought="<think>\n\n</think>\n\n",
        marks=("<|im_start|>", "enable_thinking"), models=rf"qwen3-{_SIZE}(-a{_SIZE})?(-base)?",
    ),
    replace(
        _QWEN3, name="qwen3_thinking", thinks=True, thought_start="<think>\n",
        marks=("<|im_start|>assistant\\n<think>\\n",), models=rf"qwen3-{_SIZE}(-a{_SIZE})?-thinking-2507",
    ),
    replace(_QWEN3, name="qwq", thinks=True, thought_start="<think>\n", models="qwq-32b"),  # qwen3_thinking's text
    _qwen(
        "qwen2_5_math", "Please reason step by step, and put your final answer within \\boxed{}.",
        rf"qwen2\.5-math-{_SIZE}{_INSTRUCT}", "Please reason step by step",
    ),
    _qwen("qwq_preview", f"{_QWEN} You should think step-by-step.", "qwq-32b-preview"),
    _qwen(
        "qwen2_5", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        rf"qwen2\.5(-coder)?-{_SIZE}{_INSTRUCT}",
    ),
    _qwen(
        "qwen", _HELPFUL, rf"(code)?qwen1\.5-(moe-a)?{_SIZE}(-chat)?|qwen2(-math)?-{_SIZE}(-a{_SIZE})?{_INSTRUCT}"
        rf"|qwen2\.5-{_SIZE}-instruct-1m", "You are a helpful assistant",
    ),
    replace(
        _QWEN3, name="qwen3_nothinking", marks=("<|im_start|>", "<tool_call>"),
        models=rf"qwen3-{_SIZE}(-a{_SIZE})?-instruct-2507",
    ),
    replace(
        _LLAMA3, name="llama3_2", prefix=f"{_LLAMA3_SYSTEM}<|eot_id|>", system=f"{_LLAMA3_SYSTEM}{{content}}<|eot_id|>",
        marks=("<|start_header_id|>", "Cutting Knowledge Date"), models=rf"(meta-)?llama-3\.[123]-{_SIZE}{_INSTRUCT}",
    ),
    replace(_LLAMA3, models=rf"(meta-)?llama-3-{_SIZE}{_INSTRUCT}"),
    SwiftTemplate(
        name="llama", prompt="{content} [/INST]", separator="</s><s>[INST] ", suffix="</s>", prefix="<s>[INST] ",
        system="<s>[INST] <<SYS>>\n{content}\n<</SYS>>\n\n", default_system=_LLAMA2_SYSTEM, marks=("[INST]",),
        models=rf"llama-2-{_SIZE}.*|mi[sx]tral-(8x)?{_SIZE}{_INSTRUCT}-v0\.[123](-hf)?",
    ),
    SwiftTemplate(
        name="moonlight",
        prompt="<|im_user|>user<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>",
        separator="<|im_end|>", suffix="<|im_end|>", system="<|im_system|>system<|im_middle|>{content}<|im_end|>",
        default_system="You are a helpful assistant", marks=("<|im_middle|>",),
        models=r"moonlight-16b-a3b(-instruct)?|kimi-k2(-base|-instruct(-0905)?)",
    ),
    replace(_CHATML, adds_bos=True),
    SwiftTemplate(name="dummy", prompt="{content}", separator=None, suffix="{eos}", adds_bos=True),
)  # fmt: skip
SWIFT_TEMPLATES = {template.name: template for template in _ALL}

# Stage pt: a question and its answer, if there is a question, between the tokens that the tokenizer puts around a text.
_PLAIN = SwiftTemplate(name="plain text", prompt="{content}", separator=None, suffix="{eos}", prefix="{bos}")


def swift_template(
    name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    rules: SwiftRules,
    *,
    model: str = "",
    agent: str | None = None,
    default_system: str | None = None,
) -> SwiftTemplate:
    """Return a template of ms-swift for a model.

    Args:
        name: None chooses it by the model.
        model: the model's folder, or its name on a hub.
        agent: the name of an agent template; None is the template's own.
        default_system: for conversations without a system message; "" writes none, None keeps the template's own.

    Raises:
        MegatuneError: the name, of template or agent, is not known (exit code 64), or no template is the model's (66).
    """
    template = _of_model(model, tokenizer) if name is None else named_swift_template(name)
    eos = tokenizer.eos_token or ""
    stop_words = (*template.stop_words, eos)
    if not rules.has_template:
        bos, end = _around(tokenizer)
        plain = _bound(_PLAIN, bos, end or eos)
        template = replace(plain, thinks=template.thinks, empty_thought=template.empty_thought)
        stop_words = () if end else stop_words
    agent = agent or template.agent or ("react_en" if rules.version < 4 else None)
    written = replace(
        _bound(template, tokenizer.bos_token or "", eos),
        rules=rules,
        stop_words=stop_words,
        agent_template=None if agent is None else agent_template(agent, rules.version),
    )
    if template.adds_bos:
        bos, _ = _around(tokenizer)
        system = None if written.system is None else bos + written.system
        written = replace(written, prefix=bos + written.prefix, system=system)
    if default_system is None:
        return written
    if written.system is None:
        what = f"default_system: ms-swift's template {written.name} has no place for a system message"
        raise MegatuneError(Finding(what, fix="remove default_system"), ExitCode.SETTINGS)
    return replace(written, default_system=default_system)


def named_swift_template(name: str) -> SwiftTemplate:
    """Return the template of one of ms-swift's names.

    Raises:
        MegatuneError: it is not supported (exit code 64), with the nearest names.
    """
    if name in SWIFT_TEMPLATES:
        return SWIFT_TEMPLATES[name]
    fix = did_you_mean(name, SWIFT_TEMPLATES, f"one of {', '.join(SWIFT_TEMPLATES)}", count=3)
    raise MegatuneError(Finding(f"template: ms-swift's {name!r} is not supported", fix=fix), ExitCode.SETTINGS)


def _of_model(model: str, tokenizer: PreTrainedTokenizerBase) -> SwiftTemplate:
    """Return the template of a model, by its name as ms-swift does, or by its chat template."""
    name = _QUANTIZED.sub("", model.rstrip("/").rpartition("/")[2].lower())
    source = str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""
    for template in _ALL:
        if template.models and re.fullmatch(template.models, name):
            return template
    for template in _ALL:
        if template.marks and all(mark in source for mark in template.marks):
            return template
    why = "its tokenizer has no chat template" if not source else "its chat template is not of a known family"
    fix = f"name the template of the model: one of {', '.join(SWIFT_TEMPLATES)}"
    what = "template: ms-swift's template for this model is not known"
    raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what the tokenizer puts before a text, and after it."""
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    place = whole.index(letter)
    return tokenizer.decode(whole[:place]), tokenizer.decode(whole[place + 1 :])


def _bound(template: SwiftTemplate, bos: str, eos: str) -> SwiftTemplate:
    """Put a tokenizer's own tokens in the place of {bos} and {eos}."""

    def filled(text: str) -> str:
        return text.replace("{bos}", bos).replace("{eos}", eos)

    return replace(
        template,
        prefix=filled(template.prefix),
        system=None if template.system is None else filled(template.system),
        separator=None if template.separator is None else filled(template.separator),
        suffix=filled(template.suffix),
    )
