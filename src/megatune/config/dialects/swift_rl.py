"""Translates `megatron rlhf --rlhf_type grpo` and `gkd` to the keys of a file for `megatune rl`, which are ROLL's.

Settings of training, layout and adapters are read as for other verbs and written into the roles; the flags of grpo and
gkd are translated here. After ms-swift 4.6 (`megatron/trainers/grpo_trainer.py`, `gkd_trainer.py`,
`rl_core/advantage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatune.config.dialects.dialect import ACCUMULATION, read_part
from megatune.config.dialects.roll_tree import KeyNames, Reading
from megatune.config.dialects.swift import SwiftRun
from megatune.config.dialects.swift_roles import Keys, write_rewards, write_roles
from megatune.config.rules import layout
from megatune.config.rules.rule import multiples_around
from megatune.config.settings import Settings, whole_steps
from megatune.config.values import is_number
from megatune.errors import MegatuneError
from megatune.references import either


class PromptSet(NamedTuple):
    """A data set: its name, its files, and the requested number of rows."""

    name: str
    files: Sequence[str]
    limit: int | None


FindPrompts = Callable[[Settings, bool], Sequence[PromptSet]]  # settings, whether to find the evaluation sets
CountRows = Callable[[Sequence[str]], int]


def rollout_keys(run: SwiftRun, find: FindPrompts, count_rows: CountRows) -> Reading:
    """Translate a command line to keys, each with the flag that it comes from, and findings.

    Args:
        find: finds the files of data sets, which may be on a hub; it is called only if nothing else is wrong.
        count_rows: counts the rows of files, for runs whose length is in epochs.

    Raises:
        MegatuneError: from `find` and `count_rows`.
    """
    asked = run.loaded.settings.run.num_processes
    wrong = run.loaded.check_rules(world_size=asked, rules=[layout.world]) if asked else []
    processes = run.loaded.settings.parallel.smallest_world if wrong else asked or 1  # report it only once
    keys = Keys(run, run.loaded.for_world(processes), processes)
    keys.reading.dialect, keys.reading.names = run.loaded.dialect, KeyNames(read_part("swift", "grpo")["names"])
    keys.reading.findings += [*keys.loaded.findings, *wrong]
    _data(keys)
    _rollouts(keys)
    _algorithm(keys) if keys.stage == "grpo" else _distillation(keys)
    write_roles(keys)
    if keys.stage == "grpo":
        write_rewards(keys)
    _trackers(keys)
    keys.refuse_others()
    _lengths_of_run(keys, count_rows, _files(keys, find, count_rows))
    keys.note_others()
    reading = keys.reading  # the top level comes first, then the roles
    reading.data = dict(sorted(reading.data.items(), key=lambda item: isinstance(item[1], dict)))
    return reading


def _data(keys: Keys) -> None:
    """Write data_args: files of prompts, with templates and system messages as in ms-swift."""
    evaluates = keys.setting("evaluation.eval_strategy") != "no" and keys.setting("data.eval_dataset")
    if evaluates and keys.stage == "gkd":
        where = keys.loaded.entries["data.eval_dataset"].where
        why = "no reward scores its responses, and the divergence is computed only in updates"
        keys.reading.report("gkd does not support evaluation", where, why, f"remove {where}")
        evaluates = False
    for role, path in (("actor_train", "data.dataset"), *([("validation", "data.eval_dataset")] if evaluates else [])):
        keys.put(f"{role}.data_args.file_name", keys.setting(path) or ["missing"], path)
        keys.put(f"{role}.data_args.conversation_rules", keys.setting("data.conversation_rules"))
        vision = ("image_max_pixels", "image_min_pixels", "media_dir")
        for name in ("template", "default_system", "enable_thinking", *vision):
            value = keys.setting(f"data.{name}")
            if value is not None and (keys.has_vision or name not in vision):
                keys.put(f"{role}.data_args.{name}", value, f"data.{name}")
    if not keys.setting("data.dataset"):
        fix = "write --dataset FILE.jsonl, with messages"
        fix += " and the columns that rewards read, such as solution" * (keys.stage == "grpo")
        keys.reading.report("dataset is missing", why="prompts are read from it", fix=fix)


def _files(keys: Keys, find: FindPrompts, count_rows: CountRows) -> list[str]:
    """Replace the names of data sets by their files, and return the training files; `NAME#N` are the first N rows."""
    trained: list[str] = []
    if keys.reading.findings:
        return trained
    for role, path in (("actor_train", "data.dataset"), ("validation", "data.eval_dataset")):
        if role not in keys.reading.data:
            continue
        files: list[str] = []
        try:
            found = find(keys.loaded.settings, role == "validation")
        except MegatuneError as error:
            raise MegatuneError([keys.loaded.placed(each) for each in error.findings], error.exit_code) from error
        for each in found:
            remaining = each.limit
            for file in each.files:
                limited = file if remaining is None else f"{file}#{remaining}"
                files += [limited] if remaining != 0 else []
                remaining = None if remaining is None else remaining - count_rows([limited])
            if each.limit is not None:
                keys.reading.lines.append(f"{each.name}: the first {each.limit} rows; ms-swift samples them at random")
        trained = trained or files
        keys.put(f"{role}.data_args.file_name", files, path)
    return trained


def _rollouts(keys: Keys) -> None:
    """Write the number and the lengths of prompts and responses of a step.

    A step is one generation of ms-swift: its responses are trained in steps_per_generation updates.
    """
    group, batch = int(keys.value("num_generations")) if keys.stage == "grpo" else 1, batch_of(keys)
    accumulation = int(keys.setting(ACCUMULATION))
    if keys.stage == "grpo" and group == 1:
        keys.refuse("num_generations", "a group of one response has no baseline", "write --num_generations 8")
        group = 2
    updates = _updates(keys)
    if (samples := batch * updates) % group and ACCUMULATION not in keys.loaded.invalid:
        what = f"{samples} responses of a generation are not a multiple of num_generations {group}"
        # Complete groups, and as many micro-batches in every data-parallel process.
        unit = math.lcm(batch // accumulation, group // math.gcd(group, updates))
        fix = f"write --global_batch_size {either(multiples_around(batch, unit))}"
        keys.reading.report(what, "--num_generations", "each prompt has a complete group", fix)
    prompts = samples if samples % group else samples // group  # report it only once
    keys.put("rollout_batch_size", prompts, "steps_per_generation", "generation_batch_size")
    keys.put("num_return_sequences_in_group", group, *["num_generations"] * (keys.stage == "grpo"))
    response = int(keys.value("max_completion_length"))
    longest = keys.value("vllm_max_model_len") or keys.run.command.model_config.get("max_position_embeddings")
    length = keys.setting("data.cutoff_len")
    # Without max_length, cutoff_len is the whole context; a prompt has what the response leaves of it.
    if isinstance(longest, int) and response >= longest:
        why = f"prompt and response share the model's {longest} positions"
        keys.refuse("max_completion_length", why, f"write --max_completion_length {longest // 2}")
        response = longest // 2
    if isinstance(longest, int):
        length = min(length, longest - response)
    keys.put("prompt_length", max(1, length), "data.cutoff_len")
    keys.put("response_length", response, "max_completion_length")
    keys.reading.lines.append(f"prompts of more than {max(1, length)} tokens are dropped")
    keys.choice("repetition_penalty")
    for role in ("actor_infer", *(["validation"] if "validation" in keys.reading.data else [])):
        for flag in ("temperature", "top_p", "top_k"):
            keys.put(f"{role}.generating_args.{flag}", keys.value(flag), flag)
    if "validation" in keys.reading.data:
        count = keys.value("num_generations_eval") or group
        keys.put("validation.generating_args.num_return_sequences", count, "num_generations_eval", "num_generations")


def batch_of(keys: Keys) -> int:
    """Return the number of responses per update."""
    replicas = max(1, keys.devices // keys.loaded.settings.parallel.model_parallel_size)
    rows = int(keys.setting("batch.per_device_train_batch_size"))
    return rows * int(keys.setting(ACCUMULATION)) * replicas


def _updates(keys: Keys) -> int:
    """Return the number of updates per generation."""
    whole, updates, batch = keys.value("generation_batch_size"), keys.value("steps_per_generation"), batch_of(keys)
    if whole is not None and (whole < batch or whole % batch or updates not in (None, whole // batch)):
        why = f"a generation is split into updates of {batch} responses"
        keys.refuse("generation_batch_size", why, "write --steps_per_generation instead")
    elif whole is not None:
        return int(whole // batch)
    return max(1, int(updates or 1))


def _lengths_of_run(keys: Keys, count_rows: CountRows, files: Sequence[str]) -> None:
    """Write the number of steps and their intervals, which ms-swift counts in updates.

    Args:
        files: training files; [] if something is wrong.
    """
    updates, asked = _updates(keys), keys.setting("optimizer.max_steps")
    is_epoch, epoch = keys.setting("checkpoint.save_strategy") == "epoch", 1
    if files and (asked <= 0 or is_epoch):
        epoch = max(1, count_rows(files) // keys.written("rollout_batch_size"))
    steps = math.ceil(asked / updates)
    if asked <= 0:
        steps = max(1, round(epoch * keys.setting("optimizer.num_train_epochs")))
    flags = ("optimizer.max_steps",) if asked > 0 else ("optimizer.num_train_epochs",)
    keys.put("max_steps", steps, *flags)

    def interval(path: str) -> int:
        value = keys.setting(path) or 500
        return whole_steps(value, steps) if value < 1 else math.ceil(value / updates)

    every = epoch if is_epoch else interval("checkpoint.save_steps")
    keys.put("save_steps", every, "checkpoint.save_steps", "checkpoint.save_strategy")
    keys.put("logging_steps", interval("logging.logging_steps"), "logging.logging_steps")
    evaluates = "validation" in keys.reading.data
    between = epoch if is_epoch else interval("evaluation.eval_steps")
    keys.put("eval_steps", between if evaluates else 0, "evaluation.eval_steps")
    keys.put("max_ckpt_to_keep", keys.setting("checkpoint.save_total_limit") or 0, "checkpoint.save_total_limit")
    if (resume := keys.setting("run.resume_from_checkpoint")) is not None:
        keys.put("resume_from_checkpoint", resume, "run.resume_from_checkpoint")
    if updates > 1:
        keys.reading.lines.append(f"a step is one generation of {updates} updates: {steps} steps")


def _algorithm(keys: Keys) -> None:
    """Write the keys of advantages and the loss."""
    given = keys.run.command.rollouts
    estimator, scale = keys.choice("advantage_estimator"), keys.choice("scale_rewards")
    if estimator == "rloo" and scale is not None and "scale_rewards" in given:
        keys.refuse("scale_rewards", "", "write --scale_rewards none")
    named = estimator if estimator == "rloo" or scale == "group" else "reinforce"
    keys.put("adv_estimator", named, "advantage_estimator", "scale_rewards")
    if estimator == "grpo":
        keys.put("norm_mean_type", "group", "scale_rewards")
        keys.put("norm_std_type", scale, "scale_rewards")
    if not is_number(beta := 0.04 if keys.value("beta") is None else keys.value("beta")) or beta < 0:
        keys.refuse("beta", "expected a number, at least 0", "write --beta 0.04, the default")
        beta = 0.04
    in_reward = keys.value("kl_in_reward") if "kl_in_reward" in given else estimator == "rloo"
    if beta and in_reward:
        why = "the KL divergence is part of the loss" + "; rloo adds it to rewards by default" * (estimator == "rloo")
        keys.refuse("kl_in_reward", why, "write --kl_in_reward false, or --beta 0", value=True)
    keys.put("use_kl_loss", bool(beta), "beta")
    keys.put("kl_loss_coef", float(beta), "beta")
    keys.put("init_kl_coef", 0.0)
    _clipping(keys)
    _loss(keys)
    keys.put("max_grad_norm", keys.setting("optimizer.max_grad_norm"), "optimizer.max_grad_norm")
    if keys.value("overlong_filter"):
        keys.put("max_len_mask", True, "overlong_filter")
        keys.reading.lines.append("overlong_filter: dropped responses are not counted in the mean either")
    keys.choice("num_iterations")


def _distillation(keys: Keys) -> None:
    """Write the keys of distillation, on responses that the student samples or on the data set's answers."""
    share = keys.value("lmbda")
    if not keys.value("use_vllm"):
        share = 0.0
        keys.reading.lines.append("use_vllm false: every step trains on the data set's answers, as in ms-swift")
    keys.put("opd_lmbda", share, "lmbda", "use_vllm")
    if share < 1:
        keys.put("opd_sft_alpha", keys.value("sft_alpha"), "sft_alpha")
    if (teacher := keys.value("teacher_model")) is None and not keys.run.command.given("teacher_model_server"):
        why = "self-distillation is not supported"
        keys.reading.report("teacher_model is missing", "--teacher_model", why, "write --teacher_model MODEL")
    keys.put("is_pure_opd", True, "rlhf_type")
    keys.put("opd_loss", "jsd", "rlhf_type")
    keys.put("teacher.model_args.model_name_or_path", teacher or "missing", "teacher_model")
    keys.put("opd_beta", 0.5 if keys.value("beta") is None else keys.value("beta"), "beta")
    keys.put("opd_top_k", keys.value("gkd_logits_topk"), "gkd_logits_topk")
    keys.put("max_grad_norm", keys.setting("optimizer.max_grad_norm"), "optimizer.max_grad_norm")


def _clipping(keys: Keys) -> None:
    low, high = keys.value("epsilon"), keys.value("epsilon_high")
    keys.put("use_pg_clip_range", True)
    keys.put("pg_clip_low", float(low), "epsilon")
    keys.put("pg_clip_high", float(low if high is None else high), "epsilon_high", "epsilon")
    if (delta := keys.value("delta")) is not None:
        if delta <= (least := 1 + (low if high is None else high)):
            fix = f"write --delta {least + 1:g}"
            keys.refuse("delta", "it must be above 1 + epsilon_high", fix)
            delta = least + 1
        keys.put("dual_clip_bound", float(delta), "delta")
        keys.put("dual_clip_loss", True, "delta")
    keys.put("importance_sampling", keys.choice("importance_sampling_level"), "importance_sampling_level")
    if (weight := keys.choice("rollout_importance_sampling_mode")) is None:
        return
    above = "train_infer_correction.is_weight"
    keys.put(f"{above}.enabled", True, "rollout_importance_sampling_mode")
    keys.put(f"{above}.weight_type", weight, "rollout_importance_sampling_mode")
    bound = keys.value("rollout_importance_sampling_threshold")
    keys.put(f"{above}.upper_bound", float(bound), "rollout_importance_sampling_threshold")


def _loss(keys: Keys) -> None:
    keys.put("loss_agg_mode", keys.choice("loss_type"), "loss_type")
    kind = keys.value("loss_type")
    if kind == "cispo":
        high = keys.value("epsilon_high")
        keys.put("actor_train.worker_cls", "ActorPGWorker", "loss_type")
        keys.put("actor_train.pg_variant", "cispo", "loss_type")
        keys.put("actor_train.pg_ratio_low", 0.0, "loss_type")
        bound = keys.value("epsilon") if high is None else high
        keys.put("actor_train.pg_ratio_high", float(bound), "epsilon_high", "epsilon")
        if keys.value("importance_sampling_level") != "token":
            keys.refuse("importance_sampling_level", "cispo uses token-level ratios", "remove it")
    if kind == "dr_grpo":
        # ms-swift divides the sum over tokens by responses × max_completion_length, ROLL by sequence_length - 1.
        prompt, response = keys.written("prompt_length"), keys.written("response_length")
        keys.put("rl_loss_coef", (prompt + response - 1) / (batch_of(keys) * response), "loss_type")


def _trackers(keys: Keys) -> None:
    logging = keys.loaded.settings.logging
    found: list[str] = [name for name in logging.report_to if name != "none"] or ["stdout"]
    keys.put("track_with", keys.loaded.settings.trackers if "all" in found else found, "logging.report_to")
    project = logging.wandb_project if "wandb" in found else logging.swanlab_project if "swanlab" in found else None
    if project:
        keys.put("tracker_kwargs.project", project, "logging.wandb_project", "logging.swanlab_project")
    keys.put("exp_name", keys.loaded.settings.run.run_name or keys.stage, "run.run_name")
