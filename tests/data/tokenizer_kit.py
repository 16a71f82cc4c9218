"""Small real tokenizers for tests: byte-level BPE trained in-process, with the special tokens and chat templates of the
families. The chat templates are written for these tests to render as the published ones do."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the weather in Paris today? It is sunny and warm.",
    "You are a helpful assistant. user system assistant tool think answer question\n\n",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "今天天气怎么样？我是一个人工智能助手。",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
]

# How Qwen and Llama 3 split text before merging: words with their space, single digits, runs of newlines.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_MARKERS = re.compile(r"\{%-\s*(end)?generation\s*-%\}")


def chat_template(name: str, marked: bool = False) -> str:
    """One of tests/data/chat_templates, without its extension.

    Args:
        marked: with {% generation %} around what the assistant writes, which published templates do not have.
    """
    source = (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return source if marked or name == "marked" else _MARKERS.sub("", source)


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{part}▁{edge}｜>" for part in ("calls", "call", "outputs", "output") for edge in ("begin", "end")
)
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_MISTRAL_SMALL = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def _tokenizer(special: tuple[str, ...], tags: tuple[str, ...] = (), **options: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def qwen_tokenizer(template: str = "qwen2") -> PreTrainedTokenizerFast:
    """ChatML's tokens; with the chat template "qwen2", "qwen2_vl", "qwen3", "chatml" or "marked"."""
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _tokenizer(_QWEN, _QWEN_TAGS, chat_template=chat_template(template), **tokens)


def llama3_tokenizer(template: str = "llama3") -> PreTrainedTokenizerFast:
    """Llama 3's tokens; with the chat template "llama3" or "llama31". Puts bos before any text, as the real."""
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    tokenizer = _tokenizer(_LLAMA3, chat_template=chat_template(template), **tokens)
    bos = ("<|begin_of_text|>", tokenizer.convert_tokens_to_ids("<|begin_of_text|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]} $B", special_tokens=[bos]
    )
    return tokenizer


def deepseek_tokenizer(template: str = "deepseek3") -> PreTrainedTokenizerFast:
    """DeepSeek's tokens; with the chat template "deepseek", "deepseek3" or "deepseekr1"."""
    tokens = {"bos_token": _DEEPSEEK[0], "eos_token": _DEEPSEEK[1]}
    tags = ("<think>", "</think>", "<｜tool▁sep｜>", *_DEEPSEEK_TOOLS)
    return _tokenizer(_DEEPSEEK, tags, chat_template=chat_template(template), **tokens)


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral's tokens and chat template."""
    return _tokenizer(_MISTRAL, chat_template=chat_template("mistral"), bos_token="<s>", eos_token="</s>")


def mistral_small_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral Small's tokens and chat template."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return _tokenizer(_MISTRAL_SMALL, chat_template=chat_template("mistral_small"), **tokens)


def gemma_tokenizer(template: str = "gemma") -> PreTrainedTokenizerFast:
    """Gemma's tokens and chat template; turns end with another token than eos_token."""
    return _tokenizer(_GEMMA, chat_template=chat_template(template), bos_token="<bos>", eos_token="<eos>")


def gpt_oss_tokenizer() -> PreTrainedTokenizerFast:
    """gpt-oss's tokens and chat template; a conversation ends with another token than its earlier answers."""
    tokens = ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>")
    return _tokenizer(tokens, chat_template=chat_template("gpt_oss"), eos_token="<|return|>")


def kimi_tokenizer() -> PreTrainedTokenizerFast:
    """Kimi-K2's tokens and chat template."""
    tokens = ("[BOS]", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
    return _tokenizer(tokens, chat_template=chat_template("kimi_k2"), bos_token="[BOS]", eos_token="<|im_end|>")


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """No chat tokens and no chat template, as of a base model."""
    return _tokenizer(("<|endoftext|>",), eos_token="<|endoftext|>")
