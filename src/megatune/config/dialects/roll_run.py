"""Derives the settings of the run, rollouts, the algorithm and trackers from the keys of the top level."""

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
    """Return the keys of the run, without secrets, and with environment variables as text."""
    run = top.of(RLRunSettings)
    variables, hub = environment(top), run.model_download_type
    if hub == "MODELSCOPE" or (hub is None and variables.get("USE_MODELSCOPE") == "1"):
        variables["USE_MODELSCOPE_HUB"] = "1"
    trackers = run.tracker_kwargs.model_copy(update={"api_key": None})  # see `tracker_variables`
    return run.model_copy(update={"system_envs": variables, "tracker_kwargs": trackers})


def environment(part: Part) -> dict[str, str]:
    """Return the environment variables in a part's system_envs, as text."""
    written = part.of(RoleSettings).system_envs if part.name else part.of(RLRunSettings).system_envs
    variables = {str(key): str(value) for key, value in written.items() if value is not None}
    for name in variables:
        if not is_variable(name):
            what, fix = f"{part.key('system_envs')}: {name!r} is not a valid name of a variable", "write NAME: value"
            part.report(what, "system_envs", fix=fix)
    return variables


def rollout_settings(top: Part) -> RolloutSettings:
    """Return the keys of rollouts, with sequence lengths that leave room for a response."""
    asked = top.of(RolloutSettings)
    prompt, longest = asked.prompt_length, asked.max_sequence_length
    val_prompt, val_whole = asked.val_prompt_length, asked.val_sequence_length
    whole = prompt + (asked.response_length or 0)
    twice = {"twice": 2 * prompt, "val_twice": 2 * (val_prompt or 0)}
    top.check("lengths", longest=longest, whole=whole, left=longest - prompt, **twice)
    if val_prompt is None or val_whole is None or val_whole <= val_prompt:
        val_prompt = val_whole = None
    longest = longest if longest > prompt else 2 * prompt
    lengths = {"sequence_length": longest, "val_prompt_length": val_prompt, "val_sequence_length": val_whole}
    return asked.model_copy(update=lengths)


def algorithm_settings(top: Part, updates: int) -> AlgorithmSettings:
    """Return the keys of the algorithm with effective values.

    Args:
        updates: policy updates per step.
    """
    asked = top.of(AlgorithmSettings)
    changes: dict[str, Any] = {}
    if asked.is_pure_opd:
        changes |= {"gamma": 0.0, "adv_estimator": "reinforce", "critic_warmup": 0, "use_kl_loss": False}
        changes["add_token_level_kl"] = False
        changes |= {"loss_agg_mode": "token-mean"} if asked.distils else {}
    elif asked.adv_estimator == "grpo":
        changes |= {"norm_mean_type": "group", "norm_std_type": "group"}
    if not asked.use_pg_clip_range:
        changes |= {"pg_clip_low": asked.pg_clip, "pg_clip_high": asked.pg_clip}
    settings = asked.model_copy(update=changes)
    needs_reference = settings.use_kl_loss or settings.rewards_kl or settings.enable_reference
    recomputes = _recomputes(settings, top, updates)
    return settings.model_copy(
        update={"enable_reference": needs_reference, "enable_old_logprobs_recompute": recomputes}
    )


def _recomputes(settings: AlgorithmSettings, top: Part, updates: int) -> bool:
    """Return whether the trainer computes log-probabilities before its updates."""
    corrects = settings.train_infer_correction.corrects  # in the loss, filters could not change divisors
    needs = {
        "add_token_level_kl": settings.rewards_kl,
        "use_opd": settings.use_opd,
        "is_pure_opd": settings.is_pure_opd and not settings.distils,
    }
    needing = [name for name, needed in needs.items() if needed]
    top.check("algorithm", needing=needing)
    if settings.force_disable_old_logprobs_recompute or settings.distils:
        return False
    return settings.enable_old_logprobs_recompute or bool(needing) or corrects or updates > 1


def reported(run: RLRunSettings) -> dict[str, Any]:
    """Return the logging settings, by "group.name", from `track_with` and `tracker_kwargs`."""
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
    """Return the settings, by "group.name", to profile one step: the second, if there is one."""
    if not run.profiler_timeline:
        return {}
    first = min(1, run.max_steps - 1)
    return {
        "logging.profile": True,
        "logging.profile_step_start": first,
        "logging.profile_step_end": first + 1,
    }


def tracker_variables(top: Part) -> dict[str, str]:
    """Return environment variables for the other keys of trackers, including the API key."""
    run = top.of(RLRunSettings)
    keys, names = run.tracker_kwargs, run.track_with
    found = {}
    for tracker, modes in read_part("roll", "modes").items():
        if tracker in names and keys.mode and keys.mode not in modes:
            what, fix = f"tracker_kwargs.mode {keys.mode} with {tracker}", f"write mode: {' or '.join(modes)}"
            top.report(what, "tracker_kwargs.mode", fix=fix)
        if tracker in names and keys.api_key:
            found[f"{tracker.upper()}_API_KEY"] = keys.api_key
    if "wandb" in names:
        given = {"NOTES": keys.notes, "TAGS": ",".join(keys.tags), "MODE": keys.mode}
        found |= {f"WANDB_{name}": value for name, value in given.items() if value}
    return found
