"""What a file says of the run, of rollouts and of the algorithm, with what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.config.dialects.roll_reader import Part, Reader
from megatune.config.dialects.roll_roles import environment
from megatune.config.rl.settings import (
    AlgorithmPart,
    CorrectionFilter,
    IsWeight,
    PromptData,
    RolloutPart,
    RunPart,
)


def run_part(top: Part, reader: Reader) -> RunPart:
    """Make what a run is."""
    mock, copies = top.inner["rollout_mock"], top.inner["checkpoint_config"]
    if copies["type"] and not copies["output_dir"]:
        fix = "write output_dir: FOLDER below checkpoint_config, or remove it"
        reader.find("checkpoint_config has no output_dir", copies.at, "it says where checkpoints are copied to", fix)
    variables = environment(top, reader)
    hub = top["model_download_type"]
    if hub == "MODELSCOPE" or (hub is None and variables.get("USE_MODELSCOPE") == "1"):
        variables["USE_MODELSCOPE_HUB"] = "1"
    names = (
        *("exp_name", "seed", "output_dir", "max_steps", "save_steps", "max_ckpt_to_keep", "logging_steps"),
        *("eval_steps", "resume_from_checkpoint", "rpc_timeout", "rollout_dump_dir", "num_gpus_per_node"),
        "model_update_buffer_size_mb",
    )
    return RunPart(
        **{name: top[name] for name in names},
        rollout_mock=mock["mode"] if mock["enable"] else None,
        rollout_mock_dir=mock["dump_dir"] if mock["enable"] else None,
        system_envs=variables,
        checkpoint_output_dir=copies["output_dir"],
    )


def rollout_part(top: Part, reader: Reader) -> RolloutPart:
    """Make how long prompts and responses are, and how they are scheduled."""
    prompt, response, whole = top["prompt_length"], top["response_length"], top["sequence_length"]
    if response is None and whole is None:
        if not {"response_length", "sequence_length"} & top.places.keys():
            reader.find("response_length is missing", fix="write response_length: 4096, or sequence_length")
        whole = 2 * prompt
    elif whole is None:
        whole = prompt + response
    elif response is not None and whole != prompt + response:
        reader.lines.append(
            f"response_length {response} does nothing beside sequence_length {whole}: {whole - prompt} tokens are left"
        )
    if whole <= prompt:
        what = f"sequence_length {whole} leaves no token for a response beside prompt_length {prompt}"
        where = top.where("sequence_length", "prompt_length")
        reader.find(what, where, fix=f"write sequence_length: {2 * prompt}, or response_length: {prompt}")
        whole = 2 * prompt
    val_prompt, val_whole = top["val_prompt_length"], top["val_sequence_length"]
    if (val_prompt is None) != (val_whole is None):
        written, other = (
            ("val_prompt_length", "val_sequence_length")
            if val_whole is None
            else ("val_sequence_length", "val_prompt_length")
        )
        reader.find(
            f"{written} without {other}", top.where(written), "ROLL takes both or neither", f"write {other}, too"
        )
        val_prompt = val_whole = None
    if val_prompt is not None and val_whole <= val_prompt:
        what = f"val_sequence_length {val_whole} leaves no token beside val_prompt_length {val_prompt}"
        reader.find(what, top.where("val_sequence_length"), fix=f"write val_sequence_length: {2 * val_prompt}")
        val_prompt = val_whole = None
    ratio = top["async_generation_ratio"]
    if 0 < ratio < 1:
        what, where = f"async_generation_ratio {ratio:g} is between 0 and 1", top.where("async_generation_ratio")
        reader.find(what, where, "a rollout is whole updates ahead, or none", "write async_generation_ratio: 1, or 0")
    names = (
        *("rollout_batch_size", "num_return_sequences_in_group", "prompt_length", "max_running_requests"),
        *("async_generation_ratio", "is_use_additional_prompts", "max_additional_running_prompts", "global_template"),
        "tag_to_template",
    )
    return RolloutPart(
        **{name: top[name] for name in names},
        sequence_length=whole,
        val_prompt_length=val_prompt,
        val_sequence_length=val_whole,
    )


def algorithm_part(top: Part, reader: Reader, updates: int) -> AlgorithmPart:
    """Make the algorithm, with what follows from its keys.

    Args:
        updates: of the policy in one step.
    """
    values = {name: top[name] for name in _PLAIN}
    if top["is_pure_opd"] and top["use_opd"]:
        what = "is_pure_opd and use_opd"
        reader.find(what, top.where("use_opd"), "one has rewards beside the teacher, the other has not", "keep one")
    if top["is_pure_opd"]:
        values |= {"gamma": 0.0, "adv_estimator": "reinforce", "critic_warmup": 0, "use_kl_loss": False}
        values["add_token_level_kl"] = False
    if values["adv_estimator"] == "grpo":
        for name in ("norm_mean_type", "norm_std_type"):
            if top[name] not in (None, "group"):
                reader.lines.append(f"{name} {top[name]} is group with adv_estimator grpo, as in ROLL")
            values[name] = "group"
    uses_kl = values["add_token_level_kl"] and values["init_kl_coef"] > 0
    needs_reference = values["use_kl_loss"] or uses_kl
    low, high = (top["pg_clip_low"], top["pg_clip_high"]) if top["use_pg_clip_range"] else (top["pg_clip"],) * 2
    correction = top.inner["train_infer_correction"]
    is_weight = IsWeight(**correction.inner["is_weight"].values)
    filters = tuple(CorrectionFilter(**row) for row in correction.rows.get("filters", ()))
    corrects = is_weight.enabled or any(each.enabled for each in filters)
    _thresholds(top, reader)
    return AlgorithmPart(
        **values,
        pg_clip_low=low,
        pg_clip_high=high,
        dual_clip=1 + 2 * top["pg_clip"],
        enable_reference=needs_reference or top["enable_reference"],
        recompute_old_log_probs=_recomputes(top, reader, updates, uses_kl=uses_kl, corrects=corrects),
        train_infer_is_weight=is_weight,
        train_infer_filters=tuple(each for each in filters if each.enabled),
    )


def prompt_data(part: Part, filters: Part | None = None) -> PromptData:
    """Make what rows prompts are made of.

    Args:
        part: data_args.
        filters: dataset_filter.
    """
    names = ("template", "tag", "id", "messages", "prompt", "response")
    return PromptData(
        files=tuple(part["file_name"]),
        domain_shares={str(key): float(share) for key, share in part["domain_interleave_probs"].items()},
        **{name: part[name] for name in names},
        sources=tuple(filters["source"]) if filters else (),
        num_samples=filters["num_samples"] if filters else 0,
    )


_PLAIN = (
    *("adv_estimator", "ppo_epochs", "lambd", "gamma", "dual_clip_loss", "value_clip", "kl_penalty"),
    *("target_kl", "init_kl_coef", "kl_horizon", "add_token_level_kl", "use_kl_loss", "kl_loss_coef"),
    *("entropy_loss_coef", "reward_clip", "whiten_rewards", "whiten_advantages", "advantage_clip", "norm_mean_type"),
    *("norm_std_type", "loss_agg_mode", "critic_warmup", "importance_sampling", "rl_loss_coef", "max_len_mask"),
    *("difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold", "difficulty_loss_weight"),
    *("length_loss_weight", "error_max_len_clip", "error_max_len_threshold", "is_pure_opd", "use_opd"),
)


def _recomputes(top: Part, reader: Reader, updates: int, *, uses_kl: bool, corrects: bool) -> bool:
    """Tell whether the trainer computes log-probabilities before its updates."""
    needs: Mapping[str, Any] = {
        "train_infer_correction": corrects,
        "add_token_level_kl": uses_kl,
        "use_opd": top["use_opd"],
        "is_pure_opd": top["is_pure_opd"],
    }
    needing = [name for name, needed in needs.items() if needed]
    if not top["force_disable_old_logprobs_recompute"]:
        return bool(top["enable_old_logprobs_recompute"] or needing or updates > 1)
    if needing:
        what = f"force_disable_old_logprobs_recompute with {needing[0]}"
        why = "it is computed from the trainer's log-probabilities before its updates"
        fix = f"remove force_disable_old_logprobs_recompute, or {needing[0]}"
        reader.find(what, top.where("force_disable_old_logprobs_recompute"), why, fix)
    return False


def _thresholds(top: Part, reader: Reader) -> None:
    low, high = top["difficulty_low_threshold"], top["difficulty_high_threshold"]
    if top["difficulty_mask"] and low >= high:
        what = f"difficulty_low_threshold {low:g} is not below difficulty_high_threshold {high:g}"
        where = top.where("difficulty_low_threshold", "difficulty_high_threshold")
        reader.find(what, where, "every group would be left out", "write 0.1 and 0.95")
