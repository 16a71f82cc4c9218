"""Makes the tiny model folders and pictures of the golden cases: config, tokenizer and processors, and no weights.

Run `python tests/swift_golden/models.py DIR`. ms-swift chooses a template by the name of the folder, so each bears a
published model's name. Tokenizers are trained on the demo text and are the same wherever they are made: see `digest`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
_MARKS = re.compile(r"\{%-\s*(end)?generation\s*-%\}")  # of what the assistant writes; published templates have none
VOCAB_SIZE = 900  # small: golden ids are long enough


@dataclass(frozen=True, slots=True)
class Model:
    """A demo family of `megatune.demo`, and what a published model of another name has besides.

    Attributes:
        family: a key of `megatune.demo.family.FAMILIES`.
        chat_template: a file of tests/data/chat_templates; None for the family's own.
    """

    family: str
    chat_template: str | None = None


MODELS = {
    "Qwen3-8B": Model("qwen3"),
    "Qwen3-4B-Instruct-2507": Model("qwen3", "qwen3_instruct"),
    "Qwen3-4B-Thinking-2507": Model("qwen3", "qwen3_thinking"),
    "Qwen3-30B-A3B": Model("qwen3_moe"),
    "Qwen3-30B-A3B-Instruct-2507": Model("qwen3_moe", "qwen3_instruct"),
    "Qwen3-30B-A3B-Thinking-2507": Model("qwen3_moe", "qwen3_thinking"),
    "Qwen3-8B-Base": Model("qwen3"),
    "Qwen2.5-7B-Instruct": Model("qwen2"),
    "Qwen2.5-7B": Model("qwen2"),
    "Qwen2.5-Coder-7B-Instruct": Model("qwen2"),
    "Qwen2-7B-Instruct": Model("qwen2"),
    "Qwen1.5-MoE-A2.7B-Chat": Model("qwen2_moe"),
    "Meta-Llama-3-8B-Instruct": Model("llama"),
    "Meta-Llama-3.1-8B-Instruct": Model("llama", "llama31"),
    "Llama-3.2-3B-Instruct": Model("llama", "llama31"),
    "Llama-3.3-70B-Instruct": Model("llama", "llama31"),
    "DeepSeek-R1-Distill-Qwen-7B": Model("deepseek_r1_distill_qwen"),
    "DeepSeek-R1-Distill-Llama-8B": Model("deepseek_r1_distill_llama"),
    "DeepSeek-V3": Model("deepseek_v3"),
    "DeepSeek-V3-0324": Model("deepseek_v3"),
    "DeepSeek-R1": Model("deepseek_v3", "deepseekr1"),
    "Mixtral-8x7B-Instruct-v0.1": Model("mixtral"),
    "Qwen2-VL-7B-Instruct": Model("qwen2_vl"),
    "Qwen2.5-VL-7B-Instruct": Model("qwen2_5_vl"),
    "Qwen3-VL-8B-Instruct": Model("qwen3_vl"),
    "Qwen3-VL-8B-Thinking": Model("qwen3_vl", "qwen3_thinking"),
    "Qwen3-VL-30B-A3B-Instruct": Model("qwen3_vl_moe"),
}
# Of families of later sessions of golden cases, whose tokenizers are no part of the first digest.
LATER = {
    "Qwen3.5-4B": Model("qwen3_5"),
    "Qwen3.6-35B-A3B": Model("qwen3_5_moe"),
    "Qwen3-Next-80B-A3B-Instruct": Model("qwen3_next"),
    "Kimi-K2-Instruct": Model("kimi_k2"),
    "gemma-3-1b-it": Model("gemma3_text"),
    "Mistral-Small-3.1-24B-Instruct-2503": Model("mistral3"),
    "Phi-3-mini-4k-instruct": Model("phi3"),
    "gpt-oss-20b": Model("gpt_oss"),
    "MiniMax-M2": Model("minimax_m2"),
    "MiniMax-M2.1": Model("minimax_m2"),
}

# name: (width, height); every pixel is computed from its place, so that a file has the same bytes everywhere.
PICTURES = {
    "a.png": (140, 112),
    "b.png": (56, 84),
    "tiny.png": (10, 7),
    "line.png": (300, 12),
    "odd.png": (333, 251),
    "dot.png": (1, 1),
    "big.png": (900, 700),
    "thin.png": (640, 3),
}


def make_models(folder: Path) -> None:
    """Write every model folder, and the pictures in `pictures/`, unless they are there."""
    for name in (*MODELS, *LATER):
        if not (folder / name / "tokenizer.json").exists():
            make_model(folder / name)
    make_pictures(folder / "pictures")


def make_model(folder: Path) -> None:
    """Write the folder of the model of this name."""
    from transformers import AutoConfig

    from megatune.demo.checkpoint import publish_tokenizer_config
    from megatune.demo.family import FAMILIES
    from megatune.demo.sizes import ModelSizes, config_arguments
    from megatune.demo.tokenizer import make_tokenizer
    from megatune.demo.vision import write_processors
    from megatune.families import FAMILIES as DECLARED

    model = {**MODELS, **LATER}[folder.name]
    family = FAMILIES[model.family]
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(family, VOCAB_SIZE)
    if model.chat_template is not None:
        path = TESTS / "data" / "chat_templates" / f"{model.chat_template}.jinja"
        tokenizer.chat_template = _MARKS.sub("", path.read_text(encoding="utf-8"))
    tokenizer.save_pretrained(folder)
    publish_tokenizer_config(folder, family.tokenizer_class)
    sizes = ModelSizes(vocab_size=VOCAB_SIZE, max_position_embeddings=4096).resolved(family)
    model_type = DECLARED[family.model_type].computed_as or family.model_type
    config = AutoConfig.for_model(model_type, **config_arguments(family, sizes, tokenizer))
    config.save_pretrained(folder)
    if family.vision is not None:
        write_processors(family.vision, folder)


def make_pictures(folder: Path) -> None:
    """Write the pictures."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for name, (width, height) in PICTURES.items():
        pixels = bytes(
            channel
            for row in range(height)
            for column in range(width)
            for channel in (column * 7 % 256, row * 5 % 256, (row + column) % 256)
        )
        Image.frombytes("RGB", (width, height), pixels).save(folder / name)


def digest(folder: Path) -> str:
    """Return a digest of what decides token ids: vocabularies, added tokens and chat templates of all models."""
    whole = hashlib.sha256()
    for name in MODELS:
        content = json.loads((folder / name / "tokenizer.json").read_text(encoding="utf-8"))
        kept = {key: content[key] for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")}
        whole.update(json.dumps([name, kept], sort_keys=True).encode())
        whole.update((folder / name / "chat_template.jinja").read_bytes())
    return whole.hexdigest()


if __name__ == "__main__":
    make_models(Path(sys.argv[1]))
    print(digest(Path(sys.argv[1])))
