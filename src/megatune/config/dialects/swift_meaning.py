"""What Megatron-SWIFT's flags mean together, where a table cannot say it: how long, how fast and what is trained.

Each function reads a `Command`, and changes, sets, ignores or refuses flags of it.
"""

from __future__ import annotations

import re

from megatune.config.dialects.swift_command import Command
from megatune.config.dialects.table import read_part, table
from megatune.config.entry import SettingEntry
from megatune.config.values import parse
from megatune.errors import Finding

# What loss_scale is by itself, and the parts of it that mask the beginnings of answers.
_OF_STAGE, _BASES = {"pt": "all", "rlhf": "last_round"}, ("default", "last_round", "all")
_ROOM_OF_VIDEOS = 1.05  # qwen_vl_utils: the largest frame is at least so many times the smallest one
_MASKS = {"ignore_empty_think": "empty_thought", "ignore_think_prefix": "think_tag"}


def steps(command: Command) -> None:
    """How long it trains: since version 3.12 epochs win over steps; 3.4 ends at whichever comes first."""
    epochs = "max_epochs" if command.generation == 3 else "num_train_epochs"
    if not command.given("train_iters") and not command.given("num_train_epochs"):
        if not command.given("max_steps"):
            fix = f"write --train_iters 1000, or --{epochs} 1"
            command.findings.append(Finding("train_iters is missing", why="nothing says when training ends", fix=fix))
    elif command.given("train_iters") and command.given("num_train_epochs"):
        if command.version > 3 and not command.value("streaming"):
            command.ignore("train_iters", f"{epochs} decides, since version 3.12")
        else:
            why = f"with both, training ends at whichever comes first: a run here has {epochs} or train_iters"
            command.refuse("num_train_epochs", why, f"keep --train_iters, or --{epochs}")


def learning_rate(command: Command) -> None:
    """lr depends on what is trained; the schedule's arguments are on several flags."""
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
        command.refuse("min_lr", f"with lr_decay_style {style} the rate has no floor here", fix)
    if command.given("lr_decay_iters") and command.value("lr_decay_iters") == command.value("train_iters"):
        command.ignore("lr_decay_iters", "it is train_iters")
    command.check("whole_rates")


def _warmup_stable_decay(command: Command, lowest: float, highest: float) -> None:
    shape = command.value("lr_wsd_decay_style", "exponential")
    if shape not in ("cosine", "linear"):
        why = f"lr_wsd_decay_style {shape} is not supported"
        command.refuse("lr_decay_style", why, "write --lr_wsd_decay_style cosine or linear")
        return
    kwargs: dict[str, object] = {"decay_type": shape}
    if iters := command.number("lr_wsd_decay_iters"):
        kwargs["num_decay_steps"] = int(iters)
    if lowest and highest:
        kwargs["min_lr_ratio"] = lowest / highest
    name = "lr_wsd_decay_iters" if iters else "lr_decay_style"
    command.sets(name, "lr_scheduler_kwargs", kwargs)
    for each in ("min_lr", "lr_wsd_decay_style", "lr_wsd_decay_iters"):
        if each in command.flags:
            where = command.flags.pop(each).where
            command.whys.setdefault(where, "in lr_scheduler_kwargs")


def tuner(command: Command) -> None:
    """Adapters have defaults of their own, and mean LoRA where nothing else does."""
    if command.given("adapters") and command.value("tuner_type") == "full":
        command.default("tuner_type", "lora", "adapters are given")
        command.flags.pop("tuner_type", None)
    if command.value("tuner_type") != "lora":
        for name in _flags_of("lora"):
            command.ignore(name, "it is of tuner_type lora")
        return
    modules = command.value("target_modules")
    of_attention = isinstance(modules, list) and {*modules} <= {"linear_qkv", "linear_proj"}
    drops = (0.0, "adapters of experts drop nothing") if command.has_experts and not of_attention else (0.05,)
    if not command.given("adapters") and not command.given("lora_dropout"):
        command.default("lora_dropout", *drops)
    command.check("adapters")
    if isinstance(modules, list) and "all-embedding" in modules:
        why, fix = "embeddings have no adapters here", "write --modules_to_save embed_tokens, which trains them"
        command.refuse("target_modules", why, fix)


def pictures(command: Command) -> None:
    """freeze_aligner is true by itself; bounds of pictures are environment variables there, with other defaults."""
    bounds = command.value("model_kwargs", {})
    known = {"max_pixels", "min_pixels", "video_max_pixels", "video_min_pixels", "fps", "fps_max_frames"}
    if isinstance(bounds, dict) and bounds and bounds.keys() <= {*known, "image_max_token_num", "video_max_token_num"}:
        command.env = {**{name.upper(): str(value) for name, value in bounds.items()}, **command.env}
        command.whys[command.flags.pop("model_kwargs").where] = "bounds of pictures, as environment variables are"
    if "vision_config" not in command.config:
        return
    if command.value("freeze_vit") is False and not command.given("freeze_aligner"):
        command.default("freeze_deepstack_mergers", True, "they are of freeze_aligner")
    area = 32**2 if str(command.config.get("model_type", "")).startswith("qwen3") else 28**2  # of a token
    for variable, row in read_part("swift", "environment").items():
        key, text, tokens = row["key"], command.env.get(variable, ""), command.env.get(row.get("in_tokens", ""), "")
        if re.fullmatch("[0-9]{1,9}", tokens):
            text = str(int(tokens) * area)
        elif "tokens" in row and re.fullmatch("[0-9]{1,9}", text):
            text = str(int(text) // area * area)  # whole tokens
        if text:
            command.defaults[key] = SettingEntry(key, parse(text), f"{variable}={text}", f"{variable}={text}")
        else:
            command.default(key, row["tokens"] * area if "tokens" in row else row["value"])
    least = command.number("video_min_pixels") * _ROOM_OF_VIDEOS
    if command.number("video_max_pixels") < least:
        command.becomes("video_max_pixels", int(least), f"at least {_ROOM_OF_VIDEOS} times VIDEO_MIN_PIXELS")


def losses(command: Command) -> None:
    """What is trained of a row, and what a step's loss is the mean of."""
    if not command.given("loss_scale"):
        command.default("loss_scale", _OF_STAGE.get(command.verb, "default"))
    if command.stage == "pt" and command.generation == 3:
        command.ignore("loss_scale", "version 3 trains every token of a text")
        command.ignore("use_chat_template", "version 3 trains texts without it")
        command.default("loss_scale", "all")
    elif command.stage == "pt" and command.value("use_chat_template") is True:
        command.verb = "sft"  # with every token trained
        command.ignore("use_chat_template", "so it is stage sft, with the loss_scale of pt")
    base, *names = str(command.value("loss_scale")).split("+")
    if base not in _BASES:
        base, names = "default", [base, *names]
    known = ("base", "ignore_empty_think", *(() if command.generation == 3 else _MASKS))
    masks = [_MASKS[name] for name in names if name in _MASKS]
    if unknown := [name for name in names if name not in known]:
        why = f"{unknown[0]} weighs some tokens more than others, and a token is trained or not"
        command.refuse("loss_scale", why, "write --loss_scale default, last_round or all")
        return
    command.becomes("loss_scale", base)
    if masks:
        command.sets("loss_scale", "answer_masks", masks)
    elif command.value("disable_ignore_empty_think"):
        command.sets("disable_ignore_empty_think", "answer_masks", [])
        del command.flags["disable_ignore_empty_think"]
    command.ignore("disable_ignore_empty_think", "loss_scale says which beginnings of answers are not trained")
    command.check("losses")


def preferences(command: Command) -> None:
    """rlhf's own flags, of which each loss takes some."""
    if command.verb != "rlhf":
        for name in _flags_of("rlhf"):
            command.ignore(name, "it is of rlhf")
        return
    if not command.given("rlhf_type"):
        command.default("rlhf_type", "dpo")
    if command.stage == "gkd":  # one reason for all of its flags
        for name in (*_flags_of("rlhf"), *_flags_of("grpo"), *_flags_of("rollouts")):
            if name != "rlhf_type":
                command.ignore(name, "it is of gkd")
        return
    if command.stage == "grpo":
        _take_rollouts(command)
        return
    command.check("preferences")
    loss = command.value("loss_type")
    if loss is not None and {"aot", "aot_unpaired", "kto_pair"} & {*loss.split()}:
        why = "losses that look at all pairs of a step together are not supported"
        command.refuse("loss_type", why, "write --loss_type sigmoid")
    elif loss is not None:
        key = "kto_loss" if command.stage == "kto" else "pref_loss"
        command.sets("loss_type", key, loss if key == "kto_loss" else loss.split())
        command.flags.pop("loss_type")


def _take_rollouts(command: Command) -> None:
    """Put the flags of grpo aside, for `swift_rl`: the settings of its engine are those of sft."""
    for name in ("rlhf_type", *_flags_of("grpo"), "loss_type", "beta", "ref_model", "external_plugins"):
        if name in command.flags:
            command.rollouts[name] = command.flags.pop(name)
    command.whys[command.rollouts["rlhf_type"].where] = "reinforcement learning, as `megatune rl` does it"
    for name in _flags_of("rlhf"):
        command.ignore(name, "it is of the preference stages")
    command.default("stage", "sft")


def seeds(command: Command) -> None:
    """One seed for everything."""
    if command.value("data_seed", 42) == command.value("seed", 42):
        command.ignore("data_seed", "seed is that of rows, too")
    command.refuse("data_seed", "one seed orders rows and draws weights", "write --seed with that number")


def _flags_of(part: str) -> list[str]:
    """List the flags that say something only of a part: lora, rlhf, rollouts."""
    return [name for name, row in table("swift").items() if row.of == part]


MEANINGS = (steps, tuner, learning_rate, pictures, losses, preferences, seeds)
