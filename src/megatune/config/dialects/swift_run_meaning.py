"""What Megatron-SWIFT's flags mean together: model and folders, precision, evaluation, data and the machine."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

from megatune.config.dialects.swift_command import Command
from megatune.config.dialects.table import table
from megatune.config.values import TooLarge, read_text
from megatune.hub.megatron import is_torch_dist

_OURS = "training/manifest.json"  # what a checkpoint of this program has


def model(command: Command) -> None:
    """Where the weights come from: --load and --mcore_model name a checkpoint of Megatron-Core, or of Transformers."""
    source = command.value("mcore_model")
    is_megatron = isinstance(source, str) and is_torch_dist(source)
    if is_megatron:
        entry = command.flags["mcore_model"]
        command.flags["mcore_model"] = replace(entry, key="mcore_model")
        command.whys[entry.where] = "a checkpoint of Megatron-Core"
    elif isinstance(source, str):
        entry = command.flags.pop("mcore_model")
        if command.given("model"):
            command.ignore("model", f"the weights are those of --{entry.key}")
        command.flags["model"] = replace(entry, key="model")
        command.whys.setdefault(entry.where, "a Hugging Face model")
    _start(command, is_megatron=is_megatron)


def _start(command: Command, *, is_megatron: bool) -> None:
    """Whether more than weights is read: of a checkpoint of this program, and of no other."""
    model, starts_anew = command.value("model"), command.value("finetune", command.generation == 4)
    if not starts_anew and command.given("finetune"):
        if isinstance(model, str) and os.path.isfile(os.path.join(model, _OURS)):
            command.sets("finetune", "resume_from_checkpoint", model, "a checkpoint of this program")
            command.flags.pop("finetune")
        elif is_megatron:
            why = "optimizer and step of a checkpoint of Megatron-Core are not read, and its weights are"
            command.refuse("finetune", why, "write --finetune true")
        else:
            command.ignore("finetune", "a Hugging Face model has weights alone")
    elif not starts_anew and is_megatron:
        command.whys["finetune"] = "the weights are read, and training begins at step 0, as with --finetune true"
    command.ignore("finetune", "a run starts with the weights alone, at step 0")
    command.check("start")


def output(command: Command) -> None:
    """The folder of the run, and what is saved there."""
    if not command.given("output_dir"):
        name = str(command.value("model") or command.value("mcore_model", "model")).rstrip("/")
        command.default("output_dir", f"megatron_output/{name.rpartition('/')[2]}")
    if command.value("add_version"):
        _add_version(command)
    elif not command.given("add_version"):
        command.whys["add_version"] = "off: --add_version true adds vN-DATE-TIME to output_dir"
    else:
        command.ignore("add_version", "output_dir is as it is written")
    wants_wandb = command.generation == 3 and command.value("wandb_exp_name") and not command.given("report_to")
    if wants_wandb:
        command.default("report_to", ["tensorboard", "wandb"], "wandb_exp_name is given")
    for tracker in ("wandb", "swanlab"):
        if tracker in command.value("report_to", ()) and not command.given(f"{tracker}_project"):
            command.default(f"{tracker}_project", "megatron-swift")
    if command.value("save_safetensors", True):
        command.ignore("save_safetensors", "checkpoints are Hugging Face models")
    else:
        command.sets("save_safetensors", "save_format", "torch_dist", "beside the Hugging Face model")
        command.flags.pop("save_safetensors")


def _add_version(command: Command) -> None:
    folder = Path(str(command.value("output_dir", "")))
    if command.env.get("NNODES", "1") not in ("", "1") or command.env.get("WORLD_SIZE"):
        why = "every machine would name another folder by its clock"
        command.refuse("add_version", why, "write --output_dir with a name of its own, and --add_version false")
        return
    found = [re.match(r"v(\d+)-", each.name) for each in folder.glob("v*-*")] if os.path.isdir(folder) else []
    number = 1 + max((int(each[1]) for each in found if each), default=-1)
    versioned = str(folder / f"v{number}-{time.strftime('%Y%m%d-%H%M%S')}")
    entry = command.flags.pop("add_version")
    command.whys[entry.where] = f"output_dir: {versioned}"
    if command.given("output_dir"):
        command.becomes("output_dir", versioned)
    else:
        command.default("output_dir", versioned)


def hub(command: Command) -> None:
    """Names of a hub are ModelScope's, unless use_hf says Hugging Face's."""
    on_hugging_face = command.value("use_hf", command.env.get("USE_HF", "0").lower() in ("1", "true"))
    command.variables.setdefault("USE_MODELSCOPE_HUB", "0" if on_hugging_face else "1")
    if command.given("use_hf"):
        host = "Hugging Face" if on_hugging_face else "ModelScope"
        command.whys[command.flags.pop("use_hf").where] = f"what is no folder or file here is taken from {host}"
        return
    names = [command.value("model"), *(command.value("dataset") or ())]
    ids = [name for name in names if isinstance(name, str) and "/" in name and not os.path.exists(name.split("#")[0])]
    if ids and not on_hugging_face:
        command.whys["hub"] = "what is no folder or file here is taken from ModelScope; --use_hf: from Hugging Face"


def precision(command: Command) -> None:
    """Without a flag the model's own dtype decides, and float32 becomes fp16 as float16 does."""
    is_said = any(command.given(name) for name in ("torch_dtype", "fp16", "bf16"))
    is_fp32 = command.value("fp16") is False and command.value("bf16") is False
    if command.given("torch_dtype"):  # fp16 and bf16 win, wherever they stand
        command.flags = {"torch_dtype": command.flags["torch_dtype"], **command.flags}
    if is_fp32:
        command.whys[command.flags["bf16"].where] = "fp32"
    elif not is_said or not (command.given("torch_dtype") or command.value("fp16") or command.value("bf16")):
        dtype = command.model_config.get("dtype") or command.model_config.get("torch_dtype")
        key = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}.get(str(dtype).removeprefix("torch."))
        if key is not None and not command.given(key):
            command.default(key, True, f"config.json's dtype is {dtype}")
    command.check("precision")


def length(command: Command) -> None:
    """Without max_length rows are as long as the model allows, which memory is not planned for."""
    if command.given("max_length") or command.given("seq_length"):
        return
    longest = command.model_config.get("max_position_embeddings")
    if isinstance(longest, int):
        command.default("max_length", longest, "config.json's max_position_embeddings")
        command.default("memory_check", "warn", "rows may be shorter than the model allows")


def evaluation(command: Command) -> None:
    """An evaluation set turns evaluation on; all of it is evaluated, every so often."""
    command.check("evaluation")
    has_rows = command.given("val_dataset") or command.number("split_dataset_ratio") > 0
    if not has_rows or command.value("eval_iters") == 0:
        why = "eval_iters is 0" if has_rows else "there is nothing to evaluate on"
        for name in ("val_dataset", "eval_steps", "split_dataset_ratio"):
            command.ignore(name, why)
    else:
        strategy = "epoch" if command.value("save_strategy") == "epoch" else "steps"
        command.default("eval_strategy", strategy, "there is an evaluation set")
        if not command.given("eval_steps"):
            command.default("eval_steps", command.value("save_steps", 500) or 500, "it is save_steps")
    command.ignore("eval_iters", "an evaluation takes the whole set")


def rows(command: Command) -> None:
    """How rows are shuffled, mixed and cut."""
    if command.value("train_dataloader_shuffle") is False and command.value("dataset_shuffle") is False:
        command.sets("train_dataloader_shuffle", "disable_shuffling", True)
        command.flags.pop("train_dataloader_shuffle")
    why = "rows are shuffled once" if command.value("train_dataloader_shuffle") else "dataset_shuffle still is on"
    command.ignore("train_dataloader_shuffle", why)
    system = command.value("system")
    if isinstance(system, str) and system.endswith(".txt"):
        try:
            command.becomes("system", read_text(Path(system)), "the text of the file")
        except (OSError, UnicodeDecodeError, TooLarge) as error:
            why = getattr(error, "problem", None) or str(error)
            command.refuse("system", f"the file cannot be read: {why}", "name a file of UTF-8 text")
    elif isinstance(system, str) and "\\n" in system:
        command.becomes("system", system.replace("\\n", "\n"), "\\\\n is a line break")
    command.check("rows")


def parallel(command: Command) -> None:
    """Layouts: what has no effect there, or is counted in another way."""
    command.check("parallel")
    each = command.number("num_layers_per_virtual_pipeline_stage")
    layers, stages = command.model_config.get("num_hidden_layers"), command.number("pipeline_model_parallel_size") or 1
    if each and isinstance(layers, int) and layers % (each * stages) == 0:
        chunks = int(layers / stages / each)
        if chunks > 1:
            name = "virtual_pipeline_model_parallel_size"
            command.sets("num_layers_per_virtual_pipeline_stage", name, chunks)
        else:
            command.whys[command.flags["num_layers_per_virtual_pipeline_stage"].where] = "a stage has one part"
        command.flags.pop("num_layers_per_virtual_pipeline_stage")
    why = "it does not divide the layers of a stage"
    fix = "write --virtual_pipeline_model_parallel_size 2"
    command.refuse("num_layers_per_virtual_pipeline_stage", why, fix)


def shape(command: Command) -> None:
    """Version 3 can give a model another shape than its config.json, which its weights would not fit."""
    for name, row in table("swift").items():
        wanted, found = command.value(name) if row.config else None, command.model_config.get(row.config)
        if wanted is not None and found is not None and wanted != found:
            why = f"{row.config} is {found} in the model's config.json, and its weights are made for that"
            command.refuse(name, why, f"remove --{name}")


def experts(command: Command) -> None:
    """Mixtures of experts have defaults of their own."""
    if not command.has_experts:
        return
    command.check("experts")
    tp, pp, ep = (int(command.number(f"{kind}_model_parallel_size")) or 1 for kind in ("tensor", "pipeline", "expert"))
    has_default = command.version > 3 or command.given("expert_tensor_parallel_size")
    if not has_default and int(command.number("num_processes")) % (tp * pp * ep):
        why = "as since version 3.9: experts cut by tensor_model_parallel_size would not divide the processes"
        command.default("expert_tensor_parallel_size", 1, why)


MEANINGS = (model, hub, output, precision, length, evaluation, rows, parallel, shape, experts)
