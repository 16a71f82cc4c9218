"""The small files of a model (configuration, tokenizer, generation settings), and whether its chat template, which
other programs use, is the one of training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.settings import Settings
from megatune.data.encode import load_tokenizer, make_encoder, padding_token
from megatune.data.templates import has_chat_template
from megatune.data.templates.chat_template import ChatTemplate
from megatune.data.templates.jinja import as_jinja, prompt_difference
from megatune.data.templates.turns import Template, Thinking
from megatune.families import FAMILIES, read_config
from megatune.families.scores import as_saved
from megatune.hub.models import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Weights in any format and files of a training run are not copied from the model's folder.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json", ".md", ".png")
_RUN_FILES = (
    "run.yaml", "metrics.jsonl", "trainer_log.jsonl", "trainer_state.json", "report.json", "adapter_config.json",
    "start.log", "all_results.json", "train_results.json", "eval_results.json", "plan.json", "trackers.json",
    "bad_rows.jsonl", "bad_steps.jsonl", "generations.jsonl", "args.json", "latest_checkpointed_iteration.txt",
)  # fmt: skip


def scored_config(
    config: Mapping[str, Any], folder: Path, count: int, problem_type: str | None = None
) -> dict[str, Any]:
    """Return the config.json of a classifier or reward model, given its own or that of a language model.

    Args:
        folder: has the tokenizer, whose padding token the config gets.
        count, problem_type: as `as_saved` takes them.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    model_type = FAMILIES[config["model_type"]].computed_as or config["model_type"]
    class_name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[model_type]
    return as_saved(config, class_name, padding_token(load_tokenizer(folder)), count, problem_type)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json with a torch dtype and without quantization."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    changed.pop("quantization_config", None)
    # Transformers 5 writes "dtype", Transformers 4 "torch_dtype"; parts of a vision-language model may have it, too.
    changed.setdefault("dtype" if "torch_dtype" not in changed else "torch_dtype", None)
    for part in (changed, changed.get("text_config") or {}, changed.get("vision_config") or {}):
        part |= {key: dtype for key in ("dtype", "torch_dtype") if key in part}
    return changed


def small_files(folder: Path) -> list[Path]:
    """List the files of a model's folder that are copied into a model trained from it."""
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _RUN_FILES)
    return [path for path in found if not path.name.startswith(".") and not path.name.endswith(_NOT_COPIED)]


def copy_small_files(source: Path, target: Path, dtype: str) -> None:
    """Copy configuration and tokenizer of a model; config.json gets `dtype`, as torch prints it."""
    for file in small_files(source):
        shutil.copyfile(file, target / file.name)
    config = read_config(source)
    if (changed := with_dtype(config, dtype.removeprefix("torch."))) != config:
        (target / CONFIG).write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


CHAT_TEMPLATE = "chat_template.jinja"


def chat_template_notes(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """Return notes and warnings on the chat template that is saved."""
    if (template := _other_template(settings, tokenizer)) is None:
        return [], []
    if not tokenizer.chat_template:
        try:
            as_jinja(template, tokenizer)
        except ValueError as error:
            return [], [_not_saved(template, error)]
        return [f"the tokenizer has no chat template: {CHAT_TEMPLATE} with the text of {template.name} is saved"], []
    if settings.data.template is None:  # ms-swift's for the model
        return [], []
    thinking = Thinking(settings.data.enable_thinking)
    difference = prompt_difference(template, tokenizer, thinking, settings.data.default_system or "")
    return [], [_prompts_differ(template, difference)] if difference else []


def write_chat_template(settings: Settings, source: Path, folder: Path) -> None:
    """Write the template of training into a model's folder if the tokenizer in `source` has none."""
    if has_chat_template(source):
        return
    tokenizer = load_tokenizer(source)
    if not tokenizer.chat_template and (template := _other_template(settings, tokenizer)) is not None:
        try:
            text = as_jinja(template, tokenizer)
        except ValueError:  # reported at the start of the run
            return
        (folder / CHAT_TEMPLATE).write_text(text, encoding="utf-8")


def _other_template(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """Return the template of training if it is not the tokenizer's chat template; None also for plain text, and for the
    prompts of reinforcement learning, which have other settings."""
    data = settings.data
    if settings.run.stage == "pt" or (data.template is None and not data.swift_version):
        return None
    template = make_encoder(settings, tokenizer).template
    return None if isinstance(template, ChatTemplate) else template


def _not_saved(template: Template, error: ValueError) -> str:
    return (
        f"the tokenizer has no chat template, and template {template.name} cannot be saved as one: {error}; "
        f"`megatune infer`, vLLM and others cannot chat with the model until its folder has a {CHAT_TEMPLATE}"
    )


def _prompts_differ(template: Template, difference: str) -> str:
    return (
        f"template {template.name} is not the tokenizer's chat template, which is saved with the model: "
        f"`megatune infer`, vLLM and others will prompt it with {difference}, and its answers may be bad; "
        "remove template to train with the tokenizer's"
    )
