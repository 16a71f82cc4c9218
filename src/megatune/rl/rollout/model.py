"""The model of the built-in engine: how it is loaded, and what is asked of it before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from megatune.bridge.auto import register_types
from megatune.config.rl.settings import InferRole
from megatune.data.encode import load_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.rope import context_length
from megatune.generation.inputs import find_model, has_tokenizer
from megatune.rl.rollout.engine import INSTRUCTION_TOKENS
from megatune.rl.rollout.kv_cache import ATTENTION, KVCache, Prompts

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(role: InferRole, context: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load the model of a role's folder onto this machine's device, and its tokenizer if it has one.

    Raises:
        MegatuneError: INPUT, what is missing or can't be read; a model whose context is too short, or whose attention
            the engine does not compute.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = find_model(Path(role.model_name_or_path))
    register_types()
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _check_context(config, context, folder, role)
    is_text = config.get_text_config() is config
    kind = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = kind.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=_DTYPES[role.dtype],
        attn_implementation=ATTENTION if is_text else {"text_config": ATTENTION, "vision_config": "sdpa"},
        experts_implementation="eager",
    )
    _check_attention(model, context, folder, role)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    return model.to(device), tokenizer


def never_sampled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Return ids that are no text: padding, placeholders of pictures, and rows of the embedding that the tokenizer does
    not know."""
    config = model.config.get_text_config()
    size = config.vocab_size
    stops = model.generation_config.eos_token_id
    stops = {stops} if isinstance(stops, int) else set(stops or ())
    ids = set() if tokenizer is None else set(range(min(len(tokenizer), size), size))
    padding = tokenizer.pad_token_id if tokenizer is not None else None
    places = [getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video")]
    for each in (padding, config.pad_token_id, *places):
        if each is not None and 0 <= each < size and each not in stops:
            ids.add(each)
    return torch.tensor(sorted(ids), dtype=torch.int64)


def bytes_of_a_token(model: PreTrainedModel) -> int:
    """Return the bytes of a token in the cache, in all layers, after a pass over one token: keys and values, or what a
    model with latent attention hands over in their place."""
    cache = KVCache()
    cache.plan = plan = Prompts(torch.tensor([0]))
    cache.reserve(1, 1, 1)
    one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model.base_model(input_ids=one, position_ids=one, past_key_values=cache, use_cache=True, slots=plan)
    return cache.bytes_of_a_token


def room_of_cache(device: torch.device) -> int:
    """Return bytes that the cache may have: half of what a device has free, a quarter of what a machine has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.5)
    import psutil

    return psutil.virtual_memory().available // 4


def _check_attention(model: PreTrainedModel, context: int, folder: Path, role: InferRole) -> None:
    """Refuse attention that the engine's own has no part of."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    if has_sinks or (window is not None and window < context):
        what = "attention sinks" if has_sinks else f"a window of {window} tokens, and rows of {context}"
        finding = Finding(
            "the built-in engine cannot sample from it", str(folder), f"{model.config.model_type} has {what}",
            f"take a model without, or `strategy_name: vllm` for {role.name}",
        )  # fmt: skip
        raise MegatuneError(finding, ExitCode.INPUT)


def _check_context(config: Any, context: int, folder: Path, role: InferRole) -> None:
    most = context_length(config.to_dict())
    if most is None or context <= most:
        return
    what, more = f"prompts and responses of {context} tokens do not fit the model", ""
    if role.name != "actor_infer":  # a judge also reads what it is asked, and writes an answer
        reserved = INSTRUCTION_TOKENS + role.generating_args.max_tokens
        what += f" of {role.name}"
        more = f", a smaller max_new_tokens of {role.name}, or a model with a longer context"
        most -= reserved
    fix = f"prompt_length and response_length of {most} together at most{more}" if most > 0 else more[2:]
    why = f"its context is {context_length(config.to_dict())} tokens"
    raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)
