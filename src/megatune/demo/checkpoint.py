"""Writes a small random checkpoint of a published family: Transformers' own model class, our own tokenizer."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.demo.family import DemoFamily, demo_family
from megatune.demo.sizes import ATTENTION_BIAS, ModelSizes, check_sizes
from megatune.demo.tokenizer import make_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


ROPE_STRETCH = 8.0  # how much longer the model reads than it was "pretrained" to, as in Llama 3.1


class CheckpointSummary(NamedTuple):
    """Elements of all tensors, a tied output layer once, rows of the word embedding, and bytes of the weight files."""

    num_parameters: int
    vocab_size: int
    num_bytes: int


def make_checkpoint(
    family: str, output: Path, *, seed: int = 0, max_shard_size: str = "5GB", overwrite: bool = False, **sizes: Any
) -> Path:
    """Write config.json, safetensors, tokenizer and generation config as one Hugging Face folder.

    The folder appears whole or not at all. The same arguments give the same bytes.

    Args:
        family: a key of `megatune.demo.family.FAMILIES`.
        output: the folder to make.
        max_shard_size: splits the weights into files of this size ("100KB"), with an index.
        overwrite: replace a checkpoint that is there.
        sizes: of `ModelSizes`.

    Returns:
        output.

    Raises:
        MegatuneError: (SETTINGS) an unknown family or numbers that make no model; (CANNOT_WRITE) output is in the
            way or cannot be written.
    """
    declared = demo_family(family)
    chosen = ModelSizes(**sizes).resolved(declared)
    check_sizes(declared, chosen, max_shard_size)
    output = Path(output)
    _check_output(output, overwrite)

    tokenizer = make_tokenizer(declared, chosen.vocab_size)
    model = _random_model(declared, chosen, tokenizer, seed)
    try:
        with _no_progress_bar():
            _write(output, model, tokenizer, declared.tokenizer_class, max_shard_size)
    except OSError as error:
        raise _cannot_write(output, str(error), "name a folder you can write to, on a disk with room") from None
    return output


def summarize_checkpoint(folder: Path) -> CheckpointSummary:
    """Count what is in a checkpoint, from the headers of its weight files."""
    from safetensors import safe_open
    from transformers import AutoConfig

    num_parameters = 0
    weight_files = sorted(Path(folder).glob("*.safetensors"))
    for weight_file in weight_files:
        with safe_open(weight_file, framework="pt") as tensors:
            names = tensors.keys()  # safe_open is no mapping
            num_parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    return CheckpointSummary(num_parameters, vocab_size, sum(file.stat().st_size for file in weight_files))


def _random_model(
    family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(family.model_type, **_config_arguments(family, sizes, tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norms start at one and biases at zero; left there, a test could not tell that they are used.
            for parameter in (parameter for parameter in model.parameters() if parameter.dim() == 1):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.1)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(family.stop_tokens)),
        pad_token_id=tokenizer.pad_token_id,
    )
    return model.to(getattr(torch, sizes.dtype))


def _config_arguments(family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return arguments of Transformers' configuration class."""
    arguments = {
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_query_groups,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "rope_parameters": _rope_parameters(family, sizes),
        "rms_norm_eps": family.norm_epsilon,
        # Wide enough that attention is far from uniform: a wrong rotary embedding must show in the logits.
        "initializer_range": sizes.hidden_size**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": sizes.dtype,
    }
    if family.model_type in ATTENTION_BIAS:
        arguments["attention_bias"] = sizes.attention_bias
    if family.model_type == "llama":
        arguments["mlp_bias"] = sizes.mlp_bias
    if family.has_latent_attention:
        # Latents that are no wider than they must be to differ from everything else.
        arguments |= {"q_lora_rank": sizes.hidden_size // 2 + 4, "kv_lora_rank": sizes.hidden_size // 2}
        arguments |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), sizes.head_dim)
    if family.has_experts:
        arguments |= _experts(family.model_type, sizes)
    return arguments


def _rope_parameters(family: DemoFamily, sizes: ModelSizes) -> dict[str, Any]:
    stretch = {
        "factor": ROPE_STRETCH,
        "original_max_position_embeddings": int(sizes.max_position_embeddings / ROPE_STRETCH),
    }
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": family.rope_theta}
    if family.llama3_rope_scaling:
        parameters |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **stretch}
    if family.has_latent_attention:
        parameters |= {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        parameters |= stretch
    return parameters


def _experts(model_type: str, sizes: ModelSizes) -> dict[str, Any]:
    # Families with experts have defaults.
    num_experts, topk, ffn = sizes.num_experts or 0, sizes.router_topk or 0, sizes.moe_ffn_hidden_size or 0
    match model_type:
        case "qwen2_moe":
            own = {"num_experts": num_experts, "shared_expert_intermediate_size": 2 * ffn}
        case "qwen3_moe":
            own = {"num_experts": num_experts, "norm_topk_prob": True}
        case "mixtral":
            return {"num_local_experts": num_experts, "num_experts_per_tok": topk, "intermediate_size": ffn}
        case _:
            # Four groups of two experts or more, of which two are chosen, where that leaves enough to choose from.
            grouped = num_experts % 4 == 0 and num_experts >= max(8, 2 * topk)
            own = {
                "n_routed_experts": num_experts,
                "n_shared_experts": 1,
                "n_group": 4 if grouped else 1,
                "topk_group": 2 if grouped else 1,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 0,
            }
    return {"num_experts_per_tok": topk, "moe_intermediate_size": ffn, **own}


def _write(
    output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokenizer_class: str, max_shard_size: str
) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.{os.getpid()}.part")
    replaced = output.with_name(f".{output.name}.{os.getpid()}.replaced")
    try:
        model.save_pretrained(beside, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(beside)
        _publish_tokenizer_config(beside, tokenizer_class)
        if output.exists():
            output.rename(replaced)
        beside.rename(output)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _publish_tokenizer_config(folder: Path, tokenizer_class: str) -> None:
    """Bring tokenizer_config.json to its published form: the family's class, and no token for the unknown.

    Left out, unk_token would be Qwen2Tokenizer's default, added above the vocabulary where a family lacks it.
    """
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": tokenizer_class, "unk_token": None}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise _cannot_write(output, "a file of this name is there", "name another folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise _cannot_write(output, "the folder is not empty", "name another folder, or add --overwrite")
    if not (output / "config.json").is_file():
        raise _cannot_write(output, "it holds something that is no checkpoint; --overwrite removes checkpoints only",
                            "name another folder")  # fmt: skip


def _cannot_write(output: Path, why: str, fix: str) -> MegatuneError:
    finding = Finding(what=f"cannot write {output}", where="--output", why=why, fix=fix)
    return MegatuneError(finding, ExitCode.CANNOT_WRITE)
