"""The templates we have by name: LLaMA-Factory's names, and the text of each model's own chat template.

A template is true to the chat template that its model is published, and asked, with; where LLaMA-Factory's text is
another, ours is the model's. Only the offer of tools follows LLaMA-Factory where a published chat template has none.
"""

from __future__ import annotations

from dataclasses import replace

from megatune.data.templates.named import NamedTemplate
from megatune.data.templates.tools import tool_format

_CHATML = NamedTemplate(
    name="chatml",
    user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
    assistant="{content}<|im_end|>\n",
    system="<|im_start|>system\n{content}<|im_end|>\n",
    observation="<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n",
    tool_format=tool_format("plain"),
    special_tokens=("<|im_start|>", "<|im_end|>"),
)

_QWEN3_NOTHINK = replace(
    _CHATML,
    name="qwen3_nothink",
    observation="<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    observation_separator="\n</tool_response>\n<tool_response>\n",
    tool_format=tool_format("qwen"),
)

# Qwen3.5's and 3.6's. LLaMA-Factory's text has the tools behind the system message, and trims nothing.
_QWEN3_5 = replace(
    _QWEN3_NOTHINK,
    name="qwen3_5",
    tool_format=tool_format("qwen3_5_published"),
    trims=("system", "user", "assistant", "tool"),
    thinks=True,
    fills_thoughts=True,
)

# Llama 3's; 3.1 and later also state two dates in every system message, which null writes. Tools and their answers
# are written as LLaMA-Factory does: Llama 3's own chat template has none.
_LLAMA3 = NamedTemplate(
    name="llama3",
    prefix="{bos}",
    user=(
        "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    assistant="{content}<|eot_id|>",
    system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
    observation=(
        "<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    tool_format=tool_format("llama3"),
    special_tokens=("{bos}", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    trims=("system", "user", "assistant", "tool"),
)

# Mistral-7B-Instruct-v0.3's. It writes the system message and the tools at the last message of the user, where the
# model reads them when it answers; LLaMA-Factory's text has both at the first, and calls without their ids. A system
# message is written in training as in use: the chat template itself drops it where the last message is an answer.
_MISTRAL = NamedTemplate(
    name="mistral",
    prefix="{bos}",
    user="[INST] {content}[/INST]",
    assistant=" {content}{eos}",
    system="{content}\n\n",
    calls="{content}{eos}",
    observation="[TOOL_RESULTS] {content}[/TOOL_RESULTS]",
    observation_separator="[/TOOL_RESULTS][TOOL_RESULTS] ",
    tool_format=tool_format("mistral_published"),
    special_tokens=("{bos}", "{eos}", "[INST]", "[/INST]"),
    system_in_question="last",
    trims=("assistant",),
)

# Mistral Small 3.1's and later. Their chat templates write a system message of their own, some with the day of the run,
# where there is none. LLaMA-Factory's ministral3 writes a system message into the question. Calls are the chat
# template's alone.
_MISTRAL_SMALL = NamedTemplate(
    name="mistral_small",
    prefix="{bos}",
    user="[INST]{content}[/INST]",
    assistant="{content}{eos}",
    system="[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]",
    observation="[TOOL_RESULTS]{content}[/TOOL_RESULTS]",
    observation_separator="[/TOOL_RESULTS][TOOL_RESULTS]",
    special_tokens=("{bos}", "{eos}", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)

# DeepSeek LLM's and V2's. LLaMA-Factory's text has no space before an answer; the chat template has one.
_DEEPSEEK = NamedTemplate(
    name="deepseek",
    prefix="{bos}",
    user="User: {content}\n\nAssistant:",
    assistant=" {content}{eos}",
    system="{content}\n\n",
    observation="User: {content}\n\nAssistant:",
    tool_format=tool_format("plain"),
    special_tokens=("{bos}", "{eos}"),
)

# DeepSeek-V3's. Its chat template offers no tools; they are offered, called and answered as LLaMA-Factory does.
_DEEPSEEK3 = replace(
    _DEEPSEEK,
    name="deepseek3",
    user="<｜User｜>{content}<｜Assistant｜>",
    assistant="{content}{eos}",
    system="{content}",
    observation="<｜User｜>{content}<｜Assistant｜>",
    special_tokens=("{bos}", "{eos}", "<｜User｜>", "<｜Assistant｜>"),
)

# Gemma 3's. LLaMA-Factory's text trims nothing. Its chat template offers no tools.
_GEMMA = NamedTemplate(
    name="gemma",
    prefix="{bos}",
    user="<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",
    assistant="{content}<end_of_turn>\n",
    system="{content}\n\n",
    special_tokens=("{bos}", "<start_of_turn>", "<end_of_turn>"),
    system_in_question="first",
    trims=("user", "assistant"),
)

# gpt-oss's, without the day of the run, reasoning and tools, which null writes. LLaMA-Factory's text has only the first
# line before the question.
_GPT_OSS = NamedTemplate(
    name="gpt_oss",
    prefix=(
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    ),
    user="<|start|>user<|message|>{content}<|end|><|start|>assistant",
    assistant="<|channel|>final<|message|>{content}<|return|>",
    followed="<|channel|>final<|message|>{content}<|end|>",
    system="<|start|>developer<|message|># Instructions\n\n{content}\n\n<|end|>",
    special_tokens=("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
)

# Moonlight's; its architecture is DeepSeek-V3's. Kimi-K2's differs in the default system message.
_MOONLIGHT = NamedTemplate(
    name="moonlight",
    user="<|im_user|>user<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>",
    assistant="{content}<|im_end|>",
    system="<|im_system|>system<|im_middle|>{content}<|im_end|>",
    default_system="You are a helpful assistant",
    special_tokens=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
)

# LLaMA-Factory's template of this name, which is no model's.
_DEFAULT = NamedTemplate(
    name="default",
    user="Human: {content}{eos}\nAssistant:",
    assistant="{content}{eos}\n",
    system="System: {content}{eos}\n",
    observation="Human: {content}{eos}\nAssistant:",
    tool_format=tool_format("plain"),
    special_tokens=("{eos}",),
    is_apart=True,
)

NAMED_TEMPLATES: dict[str, NamedTemplate] = {
    template.name: template
    for template in (
        replace(
            _QWEN3_NOTHINK,
            name="qwen",
            default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        ),
        replace(_QWEN3_NOTHINK, name="qwen2_vl", default_system="You are a helpful assistant."),
        replace(_QWEN3_NOTHINK, name="qwen3", thinks=True),
        _QWEN3_NOTHINK,
        replace(_QWEN3_NOTHINK, name="qwen3_vl", thinks=True),
        replace(_QWEN3_NOTHINK, name="qwen3_vl_nothink"),
        # LLaMA-Factory's text has a default system message, which the chat template has not.
        replace(_QWEN3_NOTHINK, name="intern_vl"),
        _QWEN3_5,
        replace(_QWEN3_5, name="qwen3_5_nothink", thinks=False),
        _LLAMA3,
        _MISTRAL,
        _MISTRAL_SMALL,
        replace(_MISTRAL_SMALL, name="ministral3"),
        _DEEPSEEK,
        _DEEPSEEK3,
        # DeepSeek-R1's own chat template takes the reasoning out of every answer, so this is the way to train it.
        replace(_DEEPSEEK3, name="deepseekr1", thinks=True, thinks_until_question=False),
        _GPT_OSS,
        replace(_GPT_OSS, name="gpt"),
        _MOONLIGHT,
        replace(_MOONLIGHT, name="kimi_k2", default_system="You are Kimi, an AI assistant created by Moonshot AI."),
        _GEMMA,
        replace(_GEMMA, name="gemma3"),
        _CHATML,
        _DEFAULT,
    )
}
