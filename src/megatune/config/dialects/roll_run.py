"""What follows from the keys of the top level: of the run, of rollouts, of the algorithm and of trackers."""

from __future__ import annotations

from typing import Any

from megatune.config.dialects.dialect import read_part
from megatune.config.dialects.roll_reader import Part
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings
from megatune.config.rl.rollout import RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.values import is_variable


def run_settings(top: Part) -> RLRunSettings:
    """Return the keys of the run, without secrets, and with variables as the environment has them."""
    run = top.of(RLRunSettings)
    variables, hub = environment(top), run.model_download_type
    if hub == "MODELSCOPE" or (hub is None and variables.get("USE_MODELSCOPE") == "1"):
        variables["USE_MODELSCOPE_HUB"] = "1"
    trackers = run.tracker_kwargs.model_copy(update={"api_key": None})  # `tracker_variables` has it
    return run.model_copy(update={"system_envs": variables, "tracker_kwargs": trackers})


def environment(part: Part) -> dict[str, str]:
    """Write a part's system_envs as variables of the environment have them."""
    written = part.of(RoleSettings).system_envs if part.name else part.of(RLRunSettings).system_envs
    said = {str(key): str(value) for key, value in written.items() if value is not None}
    for name in said:
        if not is_variable(name):
            what, fix = f"{part.key('system_envs')}: {name!r} is not a valid name of a variable", "write NAME: value"
            part.find(what, "system_envs", fix=fix)
    return said


def rollout_settings(top: Part) -> RolloutSettings:
    """Return the keys of rollouts, with lengths that leave tokens for a response."""
    asked = top.of(RolloutSettings)
    prompt, response, whole = asked.prompt_length, asked.response_length, asked.sequence_length
    longest, val_prompt, val_whole = asked.max_sequence_length, asked.val_prompt_length, asked.val_sequence_length
    if response is not None and whole is not None and whole != prompt + response:
        top.reader.lines.append(
            f"response_length {response} has no effect with sequence_length {whole}: {whole - prompt} tokens are left"
        )
    if longest <= prompt:
        what = f"sequence_length {longest} leaves no token for a response after prompt_length {prompt}"
        fix = f"write sequence_length: {2 * prompt}, or response_length: {prompt}"
        top.find(what, "sequence_length", "prompt_length", fix=fix)
        longest = 2 * prompt
    if (val_prompt is None) != (val_whole is None):
        names = ("val_prompt_length", "val_sequence_length")
        written, other = names if val_whole is None else names[::-1]
        why, fix = "ROLL takes both or neither", f"write {other}, too"
        top.find(f"{written} without {other}", written, why=why, fix=fix)
        val_prompt = val_whole = None
    if val_prompt is not None and val_whole is not None and val_whole <= val_prompt:
        what = f"val_sequence_length {val_whole} leaves no token after val_prompt_length {val_prompt}"
        top.find(what, "val_sequence_length", fix=f"write val_sequence_length: {2 * val_prompt}")
        val_prompt = val_whole = None
    lengths = {"sequence_length": longest, "val_prompt_length": val_prompt, "val_sequence_length": val_whole}
    return asked.model_copy(update=lengths)


def algorithm_settings(top: Part, updates: int) -> AlgorithmSettings:
    """Return the keys of the algorithm, as they count.

    Args:
        updates: of the policy in one step.
    """
    asked = top.of(AlgorithmSettings)
    changes: dict[str, Any] = {}
    if asked.is_pure_opd:
        changes |= {"gamma": 0.0, "adv_estimator": "reinforce", "critic_warmup": 0, "use_kl_loss": False}
        changes["add_token_level_kl"] = False
    elif asked.adv_estimator == "grpo":
        for name in ("norm_mean_type", "norm_std_type"):
            if getattr(asked, name) not in (None, "group"):
                top.reader.lines.append(f"{name} {getattr(asked, name)} is group with adv_estimator grpo, as in ROLL")
            changes[name] = "group"
    if not asked.use_pg_clip_range:
        changes |= {"pg_clip_low": asked.pg_clip, "pg_clip_high": asked.pg_clip}
    low, high = asked.difficulty_low_threshold, asked.difficulty_high_threshold
    if asked.difficulty_mask and low >= high:
        what = f"difficulty_low_threshold {low:g} is not below difficulty_high_threshold {high:g}"
        keys, why = ("difficulty_low_threshold", "difficulty_high_threshold"), "every group would be left out"
        top.find(what, *keys, why=why, fix="write 0.1 and 0.95")
    settings = asked.model_copy(update=changes)
    needs_reference = settings.use_kl_loss or settings.rewards_kl or settings.enable_reference
    recomputes = _recomputes(settings, top, updates)
    return settings.model_copy(
        update={"enable_reference": needs_reference, "enable_old_logprobs_recompute": recomputes}
    )


def _recomputes(settings: AlgorithmSettings, top: Part, updates: int) -> bool:
    """Tell whether the trainer computes log-probabilities before its updates."""
    corrects = settings.train_infer_correction.corrects  # otherwise in the loss, where filters change no divisors
    needs = {
        "add_token_level_kl": settings.rewards_kl,
        "use_opd": settings.use_opd,
        "is_pure_opd": settings.is_pure_opd,
    }
    needing, switch = [name for name, needed in needs.items() if needed], "force_disable_old_logprobs_recompute"
    if not settings.force_disable_old_logprobs_recompute:
        return settings.enable_old_logprobs_recompute or bool(needing) or corrects or updates > 1
    if needing:
        why = "it is computed from the trainer's log-probabilities before its updates"
        top.find(f"{switch} with {needing[0]}", switch, why=why, fix=f"remove {switch}, or {needing[0]}")
    return False


def reported(run: RLRunSettings) -> dict[str, Any]:
    """Return the settings of the log, by "group.name", that `track_with` and `tracker_kwargs` say."""
    keys, names = run.tracker_kwargs, [name for name in run.track_with if name != "stdout"]
    return {
        "logging.logging_steps": run.logging_steps,
        "logging.report_to": names or ["none"],
        "logging.tensorboard_dir": keys.log_dir,
        "logging.wandb_project": keys.project,
        "logging.wandb_save_dir": keys.log_dir if "wandb" in names else None,
        "logging.swanlab_project": keys.project,
        "logging.swanlab_workspace": keys.workspace,
        "logging.swanlab_mode": keys.mode if keys.mode in read_part("roll", "modes")["swanlab"] else None,
    }


def profiled(run: RLRunSettings) -> dict[str, Any]:
    """Return the settings, by "group.name", that let the trainer profile one step: the second, if there is one."""
    if not run.profiler_timeline:
        return {}
    first = min(1, run.max_steps - 1)
    return {
        "logging.profile": True,
        "logging.profile_step_start": first,
        "logging.profile_step_end": first + 1,
    }


def tracker_variables(top: Part) -> dict[str, str]:
    """Return variables of the environment that say the rest of it, the account's key among them."""
    run = top.of(RLRunSettings)
    keys, names = run.tracker_kwargs, run.track_with
    found = {}
    for tracker, modes in read_part("roll", "modes").items():
        if tracker in names and keys.mode and keys.mode not in modes:
            what, fix = f"tracker_kwargs.mode {keys.mode} with {tracker}", f"write mode: {' or '.join(modes)}"
            top.find(what, "tracker_kwargs.mode", fix=fix)
        if tracker in names and keys.api_key:
            found[f"{tracker.upper()}_API_KEY"] = keys.api_key
    if "wandb" in names:
        given = {"NOTES": keys.notes, "TAGS": ",".join(keys.tags), "MODE": keys.mode}
        found |= {f"WANDB_{name}": value for name, value in given.items() if value}
    return found
