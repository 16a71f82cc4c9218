"""Interprets Megatron-SWIFT's flags whose meaning depends on other flags, beyond what the table of checks can express.

Each function reads a `Command`, and changes, sets, ignores or refuses its flags.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from megatune.config.dialects.dialect import read_part, table
from megatune.config.dialects.swift_command import Command
from megatune.config.entry import SettingEntry
from megatune.config.values import TooLarge, parse, read_text
from megatune.errors import Finding
from megatune.families.rope import rope_parameters
from megatune.hub.megatron import is_torch_dist

_MANIFEST = "training/manifest.json"  # which megatune's checkpoints have
# Defaults of loss_scale, its base values, and its parts that mask the beginnings of answers.
_OF_STAGE, _BASES = {"pt": "all", "rlhf": "last_round"}, ("default", "last_round", "all")
_MIN_VIDEO_RATIO = 1.05  # qwen_vl_utils: the largest frame has at least this many times the pixels of the smallest one
# Types of rlhf that train on sampled responses, and `of` of their flags in the table: gkd uses flags of both.
SAMPLED = ("grpo", "gkd")
_MASKS = {"ignore_empty_think": "empty_thought", "ignore_think_prefix": "think_tag"}


def model(command: Command) -> None:
    """Find the weights: --load and --mcore_model name a checkpoint of Megatron-Core or of Transformers."""
    source = command.value("mcore_model")
    is_megatron = isinstance(source, str) and is_torch_dist(source)
    if is_megatron:
        entry = command.flags["mcore_model"]
        command.flags["mcore_model"] = replace(entry, key="mcore_model")
        command.whys[entry.where] = "a Megatron-Core checkpoint"
    elif isinstance(source, str):
        entry = command.flags.pop("mcore_model")
        if command.given("model"):
            command.ignore("model", f"the weights are read from --{entry.key}")
        command.flags["model"] = replace(entry, key="model")
        command.whys.setdefault(entry.where, "a Hugging Face model")
    if is_megatron and command.generation == 3 and not command.given("finetune"):
        command.whys["finetune"] = "only the weights are read, and training starts at step 0, as with --finetune true"
    model = command.value("model")
    is_own = isinstance(model, str) and os.path.isfile(os.path.join(model, _MANIFEST))
    if command.value("finetune") is False and is_own:
        command.sets("finetune", "resume_from_checkpoint", model, "a checkpoint of megatune")
        command.flags.pop("finetune")
    command.check("start", is_megatron=is_megatron)


def output(command: Command) -> None:
    """Set the folder of the run and what is saved in it."""
    if not command.given("output_dir"):
        name = str(command.value("model") or command.value("mcore_model", "model")).rstrip("/")
        command.default("output_dir", f"megatron_output/{name.rpartition('/')[2]}")
    if command.value("add_version"):
        _add_version(command)
    elif not command.given("add_version"):
        command.whys["add_version"] = "off: --add_version true adds vN-DATE-TIME to output_dir"
    command.check("output")


def _add_version(command: Command) -> None:
    folder = Path(str(command.value("output_dir", "")))
    if command.env.get("NNODES", "1") not in ("", "1") or command.env.get("WORLD_SIZE"):
        why = "every machine would choose another folder by its clock"
        command.refuse("add_version", why, "write --output_dir with a new name, and --add_version false")
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
    """Take ids from ModelScope, or from Hugging Face with use_hf."""
    on_hugging_face = command.value("use_hf", command.env.get("USE_HF", "0").lower() in ("1", "true"))
    command.variables.setdefault("USE_MODELSCOPE_HUB", "0" if on_hugging_face else "1")
    if command.given("use_hf"):
        host = "Hugging Face" if on_hugging_face else "ModelScope"
        command.whys[command.flags.pop("use_hf").where] = f"names that are not local paths are ids on {host}"
        return
    names = [command.value("model"), *(command.value("dataset") or ())]
    ids = [name for name in names if isinstance(name, str) and "/" in name and not os.path.exists(name.split("#")[0])]
    if ids and not on_hugging_face:
        command.whys["hub"] = "names that are not local paths are ids on ModelScope, or with --use_hf on Hugging Face"


def precision(command: Command) -> None:
    """Without a flag use the model's dtype, where float32 also becomes fp16."""
    is_fp32 = command.value("fp16") is False and command.value("bf16") is False
    if command.given("torch_dtype"):  # fp16 and bf16 override it in any order
        command.flags = {"torch_dtype": command.flags["torch_dtype"], **command.flags}
    if is_fp32:
        command.whys[command.flags["bf16"].where] = "fp32"
    elif not (command.given("torch_dtype") or command.value("fp16") or command.value("bf16")):
        dtype = command.model_config.get("dtype") or command.model_config.get("torch_dtype")
        key = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}.get(str(dtype).removeprefix("torch."))
        if key is not None and not command.given(key):
            command.default(key, True, f"config.json's dtype is {dtype}")
    command.check("precision")


def length(command: Command) -> None:
    """Without max_length allow rows as long as the model's context, and only warn about their memory."""
    if command.given("max_length") or command.given("seq_length"):
        return
    longest = command.model_config.get("max_position_embeddings")
    if isinstance(longest, int):
        command.default("max_length", longest, "config.json's max_position_embeddings")
        command.default("memory_check", "warn", "rows may be shorter than the model's context")


def tokens(command: Command) -> None:
    """Read new tokens from words that end in .txt: files of tokens, separated by spaces or lines."""
    found: list[str] = []
    for word in command.value("new_special_tokens") or ():
        try:
            found += Path(word).read_text(encoding="utf-8").split() if word.endswith(".txt") else [word]
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            fix = "name a file of UTF-8 text, by its path from this folder, or write the tokens themselves"
            command.refuse("new_special_tokens", f"{word} cannot be read: {why}", fix)
            return
    if command.given("new_special_tokens"):
        command.becomes("new_special_tokens", found)


def rope(command: Command) -> None:
    """Derive the factor of rope_scaling, if it has none, from max_model_len, which has no other effect."""
    scaling, longest = command.value("rope_scaling"), command.number("max_model_len")
    if scaling is None:
        return
    said = {"rope_type": scaling} if isinstance(scaling, str) else scaling
    if not isinstance(said, dict) or "factor" in said:
        command.ignore("max_model_len", "rope_scaling has a factor")
    elif not longest:
        command.refuse("rope_scaling", "it has no factor", "write --max_model_len with the length of the longest row")
    elif command.model_config:
        original = rope_parameters({**command.model_config, **said})["original_max_position_embeddings"]
        if isinstance(original, int) and original > 0:
            factor = float(max(math.ceil(longest / original), 1))
            command.becomes("rope_scaling", {**said, "factor": factor}, f"{longest:g} tokens, and {original} positions")
    command.flags.pop("max_model_len", None)


def cached(command: Command) -> None:
    """Use folders that `swift export --to_cached_dataset` wrote as data sets."""
    if command.given("cached_dataset"):
        command.check("cached")
    for name in ("dataset", "val_dataset"):
        flag = f"cached_{name}"
        if command.given(flag):
            folders = [*(command.value(name) or ()), *command.value(flag)]
            command.flags[name] = replace(command.flags.pop(flag), key=name)
            command.becomes(name, folders)


def evaluation(command: Command) -> None:
    """Turn evaluation on if there is an evaluation set."""
    command.check("evaluation")
    has_rows = command.given("val_dataset") or command.number("split_dataset_ratio") > 0
    evaluates = has_rows and command.value("eval_iters") != 0
    command.check("evaluated", has_rows=has_rows, evaluates=evaluates)
    if evaluates and not command.given("eval_steps"):
        command.default("eval_steps", command.value("save_steps", 500) or 500, "as save_steps")


def rows(command: Command) -> None:
    """Set the system message, and how rows are shuffled, mixed and truncated."""
    system = command.value("system")
    if isinstance(system, str) and system.endswith(".txt"):
        try:
            command.becomes("system", read_text(Path(system)), "the text of the file")
        except (OSError, UnicodeDecodeError, TooLarge) as error:
            why = getattr(error, "problem", None) or getattr(error, "strerror", None) or "it is not UTF-8 text"
            entry, fix = command.flags.pop("system"), "name a file of UTF-8 text, by its path from this folder"
            command.findings.append(Finding(f"{entry.key}: {system} cannot be read", entry.where, why, fix))
    elif isinstance(system, str) and "\\n" in system:
        command.becomes("system", system.replace("\\n", "\n"), "\\\\n is a newline")
    command.check("rows")


def parallel(command: Command) -> None:
    """Translate flags of the layout that have no effect or another unit."""
    command.check("parallel")
    each = command.number("num_layers_per_virtual_pipeline_stage")
    layers, stages = command.model_config.get("num_hidden_layers"), command.number("pipeline_model_parallel_size") or 1
    if each and isinstance(layers, int) and layers % (each * stages) == 0:
        chunks = int(layers / stages / each)
        if chunks > 1:
            name = "virtual_pipeline_model_parallel_size"
            command.sets("num_layers_per_virtual_pipeline_stage", name, chunks)
        else:
            command.whys[command.flags["num_layers_per_virtual_pipeline_stage"].where] = "no virtual stages"
        command.flags.pop("num_layers_per_virtual_pipeline_stage")
    command.check("stages")


def shape(command: Command) -> None:
    """Refuse version 3's flags that contradict config.json, because the weights would not fit."""
    for name, row in table("swift").items():
        wanted, found = command.value(name) if row.config else None, command.model_config.get(row.config)
        if wanted is not None and found is not None and wanted != found:
            why = f"{row.config} is {found} in the model's config.json, and the weights have that shape"
            command.refuse(name, why, f"remove --{name}")


def experts(command: Command) -> None:
    """Set the defaults of MoE models, and of models whose config.json is unknown but whose layout has experts."""
    if not (command.has_experts or (not command.config and command.number("expert_model_parallel_size") > 1)):
        return
    command.check("experts")
    tp, pp, ep = (int(command.number(f"{kind}_model_parallel_size")) or 1 for kind in ("tensor", "pipeline", "expert"))
    has_default = command.version > 3 or command.given("expert_tensor_parallel_size")
    if not has_default and command.processes % (tp * pp * ep):
        why = "as since version 3.9: expert tensor parallelism would not divide the number of processes"
        command.default("expert_tensor_parallel_size", 1, why)


_OF_RUN = (model, hub, output, precision, length, tokens, rope, cached, evaluation, rows, parallel, shape, experts)


def learning_rate(command: Command) -> None:
    """Set the learning rate by tuner_type, and collect the arguments of the schedule."""
    command.check("rates")
    style, lowest, highest = command.value("lr_decay_style"), command.number("min_lr"), command.number("lr")
    if style == "cosine" and lowest:
        command.becomes("lr_decay_style", "cosine_with_min_lr")
        command.sets("min_lr", "lr_scheduler_kwargs", {"min_lr": lowest})
        command.flags.pop("min_lr")
    elif style == "WSD":
        _warmup_stable_decay(command, lowest, highest)
    elif lowest:
        fix = "write --min_lr 0, or --lr_decay_style cosine"
        command.refuse("min_lr", f"lr_decay_style {style} has no minimum learning rate here", fix)
    command.check("whole_rates")


def _warmup_stable_decay(command: Command, lowest: float, highest: float) -> None:
    shape = command.value("lr_wsd_decay_style", "exponential")
    iters, why, fix = command.number("lr_wsd_decay_iters"), list[str](), list[str]()
    if shape not in ("cosine", "linear"):
        why.append(f"lr_wsd_decay_style {shape} is not supported")
        fix.append("--lr_wsd_decay_style cosine or linear")
    if not iters:
        why.append("lr_wsd_decay_iters is missing")
        fix.append("--lr_wsd_decay_iters 100, the number of decay steps at the end")
    if why:
        command.refuse("lr_decay_style", ", and ".join(why), f"write {', and '.join(fix)}")
        return
    kwargs: dict[str, object] = {"decay_type": shape, "num_decay_steps": int(iters)}
    if lowest and highest:
        kwargs["min_lr_ratio"] = lowest / highest
    command.sets("lr_wsd_decay_iters", "lr_scheduler_kwargs", kwargs)
    for each in ("min_lr", "lr_wsd_decay_style", "lr_wsd_decay_iters"):
        if each in command.flags:
            where = command.flags.pop(each).where
            command.whys.setdefault(where, "in lr_scheduler_kwargs")


def tuner(command: Command) -> None:
    """Set the defaults of adapters, and use LoRA if adapters are given."""
    if command.given("adapters") and command.value("tuner_type") == "full":
        command.default("tuner_type", "lora", "adapters are given")
        command.flags.pop("tuner_type", None)
    modules = command.value("target_modules")
    of_attention = isinstance(modules, list) and {*modules} <= {"linear_qkv", "linear_proj"}
    command.check("adapters", drops=not command.has_experts or of_attention)


def vision(command: Command) -> None:
    """Set what is frozen in the vision encoder, and the limits of image and video sizes, from environment variables."""
    bounds = command.value("model_kwargs", {})
    known = {"max_pixels", "min_pixels", "video_max_pixels", "video_min_pixels", "fps", "fps_max_frames"}
    if isinstance(bounds, dict) and bounds and bounds.keys() <= {*known, "image_max_token_num", "video_max_token_num"}:
        command.env = {**{name.upper(): str(value) for name, value in bounds.items()}, **command.env}
        command.whys[command.flags.pop("model_kwargs").where] = "limits of image sizes, like the environment variables"
    encoder, kind = command.config.get("vision_config"), str(command.config.get("model_type", ""))
    mergers = encoder.get("deepstack_visual_indexes", kind.startswith("qwen3_vl")) if isinstance(encoder, dict) else ()
    if command.config and not mergers and command.given("freeze_aligner"):
        command.sets("freeze_aligner", "freeze_multi_modal_projector", command.value("freeze_aligner"))
        del command.flags["freeze_aligner"]
    if encoder is None:
        return
    if command.value("freeze_vit") is False and not command.given("freeze_aligner"):
        command.default("freeze_deepstack_mergers", True, "freeze_aligner includes them")
    area = 32**2 if kind.startswith("qwen3") else 28**2  # pixels per token
    for variable, row in read_part("swift", "environment").items():
        if row.keys() == {"key"}:
            continue
        text, tokens = command.env.get(variable, ""), command.env.get(row.get("in_tokens", ""), "")
        if re.fullmatch("[0-9]{1,9}", tokens):
            text = str(int(tokens) * area)
        elif "tokens" in row and re.fullmatch("[0-9]{1,9}", text):
            text = str(int(text) // area * area)  # whole tokens
        if text:
            place = f"{variable}={text}"
            command.defaults[variable] = SettingEntry(variable, parse(text), place, place)
        else:
            command.default(variable, row["tokens"] * area if "tokens" in row else row["value"])
    least = command.number("VIDEO_MIN_PIXELS") * _MIN_VIDEO_RATIO
    if command.number("VIDEO_MAX_PIXELS") < least:
        command.becomes("VIDEO_MAX_PIXELS", int(least), f"at least {_MIN_VIDEO_RATIO} times VIDEO_MIN_PIXELS")


def tasks(command: Command) -> None:
    """Map sequence classification to stage cls."""
    if command.verb == "sft" and command.value("task_type") == "seq_cls":
        command.verb = "cls"
        command.sets("task_type", "stage", "cls")
        command.flags.pop("task_type")
    command.check("tasks")


def losses(command: Command) -> None:
    """Set which tokens are trained, and check what the loss is averaged over."""
    if not command.given("loss_scale"):
        command.default("loss_scale", _OF_STAGE.get(command.verb, "default"))
    if command.stage == "pt" and command.generation == 3:
        command.check("texts")
    elif command.stage == "pt" and command.value("use_chat_template") is True:
        command.verb = "sft"  # with every token trained
        command.ignore("use_chat_template", "it becomes stage sft, with the loss_scale of pt")
    base, *names = str(command.value("loss_scale")).split("+")
    if base not in _BASES:
        base, names = "default", [base, *names]
    known = ("base", "ignore_empty_think", *(() if command.generation == 3 else _MASKS))
    masks = [_MASKS[name] for name in names if name in _MASKS]
    if unknown := [name for name in names if name not in known]:
        why = f"{unknown[0]} weights tokens differently, and here a token is trained or not"
        command.refuse("loss_scale", why, "write --loss_scale default, last_round or all")
        return
    command.becomes("loss_scale", base)
    if masks:
        command.sets("loss_scale", "answer_masks", masks)
    elif command.value("disable_ignore_empty_think"):
        command.sets("disable_ignore_empty_think", "answer_masks", [])
        del command.flags["disable_ignore_empty_think"]
    command.ignore("disable_ignore_empty_think", "loss_scale decides which beginnings of answers are not trained")
    command.check("losses")


def preferences(command: Command) -> None:
    """Translate the flags of rlhf, by its type and loss."""
    command.check("losses_of_stages")
    if command.verb == "rlhf" and not command.given("rlhf_type"):
        command.default("rlhf_type", "dpo")
    if command.verb != "rlhf":
        return
    if command.stage in SAMPLED:
        _take_rollouts(command)
        return
    command.check("preferences")
    loss = command.value("loss_type")
    if loss is not None and {"aot", "aot_unpaired", "kto_pair"} & {*loss.split()}:
        why = "losses over all pairs of a batch are not supported"
        command.refuse("loss_type", why, "write --loss_type sigmoid")
    elif loss is not None:
        key = "kto_loss" if command.stage == "kto" else "pref_loss"
        command.sets("loss_type", key, loss if key == "kto_loss" else loss.split())
        command.flags.pop("loss_type")


def _take_rollouts(command: Command) -> None:
    """Move the flags of grpo or gkd to `rollouts`, for `swift_rl`; the trainer's settings are read as for sft."""
    parts = SAMPLED if command.stage == "gkd" else SAMPLED[:1]
    named = [name for name, row in table("swift").items() if row.of in parts and not row.ignored]
    more = ("external_plugins",) if command.stage == "grpo" else ()
    for name in ("rlhf_type", *named, "loss_type", "beta", "ref_model", *more):
        if name in command.flags:
            command.rollouts[name] = command.flags.pop(name)
    command.whys[command.rollouts["rlhf_type"].where] = "reinforcement learning, as with `megatune rl`"
    command.check("rollouts")


# Functions, and names of parts of the table of checks, in the order in which they run.
MEANINGS = ("steps", tuner, learning_rate, vision, tasks, losses, preferences, "seeds", *_OF_RUN)
