"""Small random checkpoints of published families, with Transformers' model classes and our own tokenizer."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.demo.family import DemoFamily, demo_family
from megatune.demo.sizes import ModelSizes, check_sizes, config_arguments
from megatune.demo.tokenizer import make_tokenizer
from megatune.demo.vision import write_processors
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


class CheckpointSummary(NamedTuple):
    """The number of parameters, with tied ones counted once, the vocabulary size, and the bytes of the weight files."""

    num_parameters: int
    vocab_size: int
    num_bytes: int


def make_checkpoint(
    family: str, output: Path, *, seed: int = 0, max_shard_size: str = "5GB", overwrite: bool = False, **sizes: Any
) -> Path:
    """Write config.json, safetensors, tokenizer and generation config to a Hugging Face folder.

    The folder is created atomically. The same arguments give the same bytes.

    Args:
        family: a key of `megatune.demo.family.FAMILIES`.
        output: the folder to create.
        max_shard_size: splits the weights into files of this size ("100KB"), with an index.
        overwrite: replace an existing checkpoint.
        sizes: fields of `ModelSizes`.

    Returns:
        output.

    Raises:
        MegatuneError: SETTINGS for an unknown family or invalid sizes; CANNOT_WRITE if output exists or cannot be
            written.
    """
    declared = demo_family(family)
    chosen = ModelSizes(**sizes).resolved(declared)
    check_sizes(declared, chosen, max_shard_size)
    output = Path(output)
    _check_output(output, overwrite)

    tokenizer = make_tokenizer(declared, chosen.vocab_size)
    model = _random_model(declared, chosen, tokenizer, seed)
    try:
        with no_progress_bar():
            _write(output, model, tokenizer, declared, max_shard_size)
    except OSError as error:
        raise _cannot_write(
            output, str(error), "name a folder that you can write to, on a disk with free space"
        ) from None
    return output


def summarize_checkpoint(folder: Path) -> CheckpointSummary:
    """Summarize a checkpoint from the headers of its weight files."""
    from safetensors import safe_open

    num_parameters = 0
    weight_files = sorted(Path(folder).glob("*.safetensors"))
    for weight_file in weight_files:
        with safe_open(weight_file, framework="pt") as tensors:
            names = tensors.keys()  # safe_open is not a mapping
            num_parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    vocab_size = load_architecture(folder).vocab_size
    return CheckpointSummary(num_parameters, vocab_size, sum(file.stat().st_size for file in weight_files))


def _random_model(
    family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, GenerationConfig

    model_type = FAMILIES[family.model_type].computed_as or family.model_type
    config = AutoConfig.for_model(model_type, **config_arguments(family, sizes, tokenizer))
    model = random_model(config, seed, has_vision=family.vision is not None)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(family.stop_tokens)),
        pad_token_id=tokenizer.pad_token_id,
    )
    return model.to(getattr(torch, sizes.dtype))


def random_model(config: PreTrainedConfig, seed: int, *, has_vision: bool) -> PreTrainedModel:
    """Return a model with random fp32 weights, chosen so that errors in using any of them show in the outputs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norms are initialized to one and biases to zero, so a test could not see whether they are used.
            for parameter in (parameter for parameter in model.parameters() if parameter.dim() == 1):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            # A patch has a thousand channels or more: keep its embedding from dominating the layers' outputs.
            for name, patches in model.named_parameters():
                if patches.dim() > 3 or name.endswith("patch_embedder.input_proj.weight"):
                    patches.normal_(std=patches[0].numel() ** -0.5)
            # Zero position tables and projections would hide images.
            for zeros in (parameter for parameter in model.parameters() if parameter.dim() > 1 and not parameter.any()):
                zeros.normal_(std=zeros.shape[0] ** -0.5 if zeros.dim() == 2 else 0.2)
            # With Transformers' e^16 the state decays so fast that fp32 rounds it to zero.
            for name, parameter in model.named_parameters():
                if name.endswith(".A_log"):
                    parameter.uniform_(-3, 0)
                elif config.model_type.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.mul_(
                        len(parameter) ** -0.25
                    )  # its scores are not divided by √d, which norms learn instead
                elif name.endswith("position_embedding_table"):  # it is all ones, so all positions would be equal
                    parameter.normal_(std=0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.1)
                elif name.endswith("std_bias"):
                    buffer.normal_(std=0.5)
                elif name.endswith("std_scale"):
                    buffer.uniform_(0.7, 1.1)
    return model


def _write(
    output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, family: DemoFamily, max_shard_size: str
) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.part")
    replaced = output.with_name(f".{output.name}.{os.getpid()}.replaced")
    try:
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        if FAMILIES[family.model_type].computed_as:
            _rewrite(partial / "config.json", model_type=family.model_type)
        tokenizer.save_pretrained(partial)
        named_tokens = family.vision.named_tokens if family.vision is not None else {}
        publish_tokenizer_config(partial, family.tokenizer_class, named_tokens)
        if family.vision is not None:
            write_processors(family.vision, partial)
            if family.has_experts and family.vision.deepstack:
                _publish_experts(partial)
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def publish_tokenizer_config(folder: Path, tokenizer_class: str, named_tokens: Mapping[str, str] | None = None) -> None:
    """Rewrite tokenizer_config.json as published: the family's class, and no unk_token.

    Without the key, Qwen2Tokenizer's default unk_token would be added to a vocabulary that lacks it.
    """
    named = {"extra_special_tokens": dict(named_tokens)} if named_tokens else {}
    _rewrite(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class, unk_token=None, **named)


def _publish_experts(folder: Path) -> None:
    """Transpose the experts of qwen3_vl_moe to their published layout, [experts, in, out].

    Transformers 5 writes [experts, out, in], and reads either.
    """
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in (name for name in tensors if ".mlp.experts." in name):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    # The last version with this layout, by which readers recognize it for square experts.
    _rewrite(folder / "config.json", transformers_version="4.57.0")


def _rewrite(path: Path, **values: Any) -> None:
    settings = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Turn Transformers' progress bars off in the block."""
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
        raise _cannot_write(output, "a file of this name exists", "name another folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise _cannot_write(output, "the folder is not empty", "name another folder, or add --overwrite")
    if not (output / "config.json").is_file():
        raise _cannot_write(output, "its content is not a checkpoint; --overwrite removes checkpoints only",
                            "name another folder")  # fmt: skip


def _cannot_write(output: Path, why: str, fix: str) -> MegatuneError:
    finding = Finding(what=f"cannot write {output}", where="--output", why=why, fix=fix)
    return MegatuneError(finding, ExitCode.CANNOT_WRITE)
