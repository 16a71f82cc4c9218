"""What a run says of itself before it starts."""

from __future__ import annotations

from megatune.config.rl.settings import UNSCORED, ModelRole, RewardRole, RLSettings
from megatune.rl.rewards.code.sandbox import best_isolation


def start_lines(settings: RLSettings) -> list[str]:
    """Return lines on the roles, on a step, and on what log-probabilities are those of."""
    generating, rollout, infer = settings.actor_infer.generating_args, settings.rollout, settings.actor_infer
    models = [settings.actor_train, settings.reference, settings.critic, *settings.teachers.values()]
    ahead = rollout.async_generation_ratio
    turns = f"rollouts run up to {ahead:g} steps ahead" if ahead else "one phase after the other"
    step = f"{rollout.rollout_batch_size} prompts x {rollout.num_return_sequences_in_group} responses"
    return [
        f"run        {settings.run.exp_name}: {settings.run.max_steps} steps of {step}, {turns}",
        *(_line(role) for role in models if role is not None),
        f"role       actor_infer: {infer.engine}, {infer.num_engines} engines on devices {_ranges(infer.devices)}",
        *(
            f"role       rewards.{name}: {reward_line(role)}"
            for name, role in settings.rewards.items()
            if name != UNSCORED
        ),
        f"sampling   temperature {generating.temperature:g}, top_p {generating.top_p:g}, top_k {generating.top_k}"
        + _truncation(settings),
    ]


def reward_line(role: RewardRole) -> str:
    """Say what scores a domain, and what programs of a model can do on this machine."""
    name = f"{role.kind} {role.function}" if role.function else role.kind
    said = f"{name}, {role.workers} processes"
    if role.kind != "code_sandbox" or role.arguments.get("use_local") is False:
        return said
    return f"{said}; programs run here: {best_isolation().text} (docs/rl-rewards.md: no security boundary)"


def _truncation(settings: RLSettings) -> str:
    """Say what becomes of tokens that top_p and top_k leave out."""
    generating, algorithm = settings.actor_infer.generating_args, settings.algorithm
    said = "; log-probabilities are at this temperature"
    if generating.top_p >= 1 and generating.top_k <= 0:
        return said
    corrected = algorithm.train_infer_correction.corrects
    bounded = "train_infer_correction bounds" if corrected else "nothing bounds (train_infer_correction would)"
    return f"{said}, before top_p and top_k on both sides; {bounded} what sampling leaves out"


def _line(role: ModelRole) -> str:
    parallel = role.settings.parallel
    layout = f"tp {parallel.tensor_model_parallel_size}, pp {parallel.pipeline_model_parallel_size}"
    return f"role       {role.name}: megatron, {layout}, on devices {_ranges(role.devices)}"


def _ranges(devices: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"."""
    parts: list[list[int]] = []
    for device in sorted(devices):
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
