"""What is wrong between roles: devices, batches, domains, models and how responses are sampled."""

from __future__ import annotations

from megatune.config.dialects.roll_reader import Part
from megatune.config.dialects.roll_roles import Roles
from megatune.config.rl.role import RoleSettings
from megatune.config.rl.settings import UNSCORED, ModelRole, RLSettings
from megatune.config.rules.problem import either, multiples_around
from megatune.config.values import shown

_BATCH = ("rollout_batch_size", "num_return_sequences_in_group")
_UPDATE = ("per_device_train_batch_size", "gradient_accumulation_steps")


def check_roles(settings: RLSettings, trained: Part, sampled: Part, roles: Roles) -> None:
    """Report everything that is wrong between roles, and say how responses are sampled."""
    _batches(settings, roles.top)
    _devices(settings, roles)
    _partial(settings, roles.top)
    _models(settings, sampled)
    _domains(settings, roles.top, trained)
    _groups(settings, roles.top)
    _sampling(settings, sampled)
    _functions(settings, roles.top)
    _turns(settings, trained)
    _engines(settings, sampled)


def _batches(settings: RLSettings, top: Part) -> None:
    """Updates are of whole mini-batches, and every replica has as many samples."""
    refused = top.reader.refused
    if not refused.isdisjoint(_BATCH):
        return
    samples = settings.samples_per_step
    said = (
        f"rollout_batch_size {settings.rollout.rollout_batch_size} × num_return_sequences_in_group "
        f"{settings.rollout.num_return_sequences_in_group} is {samples} samples"
    )
    for role in (settings.actor_train, settings.critic, settings.reference, *settings.teachers.values()):
        if role is None or not role.devices:
            continue
        if role.training and not refused.isdisjoint(f"{role.name}.training_args.{key}" for key in _UPDATE):
            continue
        size, parts = _whole(role)
        group = settings.rollout.num_return_sequences_in_group
        if samples % size:
            fix = f"write rollout_batch_size: {either(_prompts(samples, size, group))}"
            if role.training:
                fix += ", or another gradient_accumulation_steps"
            top.find(f"{said}, not a multiple of {size}", *_BATCH, why=f"{role.name} takes {parts}", fix=fix)


def _whole(role: ModelRole) -> tuple[int, str]:
    """Return the number that samples of a step must be a multiple of, and why."""
    batch, parallel = role.settings.batch, role.settings.parallel
    replicas = max(1, len(role.devices) // parallel.model_parallel_size)
    if not role.training:
        return replicas, f"{replicas} replicas, with as many samples each"
    micro, steps = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    why = f"per_device_train_batch_size {micro} × gradient_accumulation_steps {steps} × {replicas} replicas an update"
    return micro * steps * replicas, why


def _prompts(samples: int, size: int, group: int) -> list[int]:
    """Return the numbers of prompts next to those asked for whose samples are a multiple."""
    step = next(count for count in range(1, size + 1) if count * group % size == 0)
    return list(multiples_around(samples // group, step))


def _devices(settings: RLSettings, roles: Roles) -> None:
    """Roles that work at the same time have devices of their own."""
    infer, ratio = set(settings.actor_infer.devices), "async_generation_ratio"
    ahead = settings.rollout.async_generation_ratio > 0
    others = {role.name: role.devices for role in (settings.actor_train, settings.reference, settings.critic) if role}
    for name, devices in others.items():
        if ahead and (shared := infer & set(devices)):
            why = f"{_numbers(shared)}: what runs at the same time cannot take turns on a device"
            fix = f"write {ratio}: 0, or a device_mapping of actor_infer of its own"
            roles.top.find(f"{ratio} above 0, and actor_infer shares devices with {name}", ratio, why=why, fix=fix)
    judges = [role.judge for role in settings.rewards.values()]
    for judge in filter(None, (*judges, settings.reward_model)):
        own, part = f"a device_mapping of {judge.name} of its own", roles.parts[judge.name]
        if shared := infer & set(judge.devices):
            what = f"{judge.name} shares devices with actor_infer"
            why = f"{_numbers(shared)}: responses are judged while others are still sampled"
            part.find(what, "device_mapping", why=why, fix=f"write {own}")
        for name, devices in others.items():
            if ahead and (shared := {*judge.devices} & {*devices}):
                what = f"{ratio} above 0, and {judge.name} shares devices with {name}"
                why = f"{_numbers(shared)}: responses are judged beside training, and could not take turns with it"
                part.find(what, "device_mapping", why=why, fix=f"write {ratio}: 0, or {own}")


def _partial(settings: RLSettings, top: Part) -> None:
    """What a synchronous run continues is what it has sampled too much of."""
    rollout, key = settings.rollout, "partial_rollout_steps"
    if not rollout.partial_rollout_steps:
        return
    what = f"{key} has no effect"
    if rollout.async_generation_ratio > 0:
        why = "with async_generation_ratio above 0 no step waits, and responses continue anyway"
        top.find(what, key, why=why, fix=f"write {key}: 0")
    elif not (rollout.is_use_additional_prompts and rollout.max_additional_running_prompts):
        why = "a step needs all prompts that it samples"
        fix = "write is_use_additional_prompts: true, and max_additional_running_prompts above 0"
        top.find(what, key, why=why, fix=fix)


def _models(settings: RLSettings, sampled: Part) -> None:
    """The model that samples is the one that is trained."""
    trained, infer = settings.actor_train.settings.model.model_name_or_path, settings.actor_infer.model_name_or_path
    if trained and infer and trained != infer:
        what = f"actor_infer samples with {infer}, and actor_train trains {trained}"
        fix = f"write pretrain: {trained}, and no model_name_or_path in actor_infer"
        sampled.find(what, why="weights go from the one to the other", fix=fix)


def _domains(settings: RLSettings, top: Part, trained: Part) -> None:
    """Every domain that is trained has a reward, files and a share."""
    key = "data_args.domain_interleave_probs"
    shares, dotted = settings.data.domain_interleave_probs, trained.key(key)
    if not settings.data.file_name:
        what, why = f"{trained.key('data_args.file_name')} is missing", "there are no problems to train on"
        trained.find(what, why=why, fix="write file_name: [data/problems.jsonl] below data_args")
    if not settings.rewards:
        top.find("there are no rewards", fix="write rewards: with one domain at least")
    if not shares and len(settings.rewards) > 1:
        equal = ", ".join(f"{name}: {1 / len(settings.rewards):.2g}" for name in settings.rewards)
        why, fix = "it says which rewards are trained on, and how much", f"write domain_interleave_probs: {{{equal}}}"
        trained.find(f"{dotted} is missing", key, "data_args", why=why, fix=fix)
    for domain, share in shares.items():
        if domain not in settings.rewards and settings.rewards:
            fix = f"add rewards.{domain}, or take one of: {', '.join(settings.rewards)}"
            trained.find(f"domain_interleave_probs has {domain}, and rewards has not", key, "data_args", fix=fix)
        if share < 0:
            what = f"the share of {domain} is {share:g}"
            trained.find(what, key, "data_args", why="expected a number from 0 to 1")
    prompts = settings.rollout.rollout_batch_size
    counts = settings.data.prompts_of_domains(prompts) if shares and min(shares.values()) >= 0 else {}
    if empty := [domain for domain, count in counts.items() if count < 1]:
        what = f"domain_interleave_probs: {', '.join(empty)} would get no prompt of rollout_batch_size"
        why = f"of {prompts} prompts a step each share is rounded down, and {[*shares][-1]} takes the rest"
        fix = "raise its share or rollout_batch_size, or leave the domain out"
        trained.find(what, key, "data_args", why=why, fix=fix)
    if settings.validation and UNSCORED in settings.rewards:
        what, why = "validation without rewards", "nothing scores its responses"
        top.parts["validation"].find(what, why=why, fix="add rewards, or remove validation")
    if settings.validation and not settings.validation.data_args.file_name:
        why, fix = "there is nothing to validate on", "write file_name below data_args, or remove validation"
        top.parts["validation"].find("validation.data_args.file_name is missing", why=why, fix=fix)


def _groups(settings: RLSettings, top: Part) -> None:
    """What compares responses to the same prompt has several."""
    algorithm, key = settings.algorithm, "num_return_sequences_in_group"
    compares = algorithm.adv_estimator in ("grpo", "rloo", "reinforce_plus_plus")
    if settings.rollout.num_return_sequences_in_group == 1 and (compares or algorithm.norm_mean_type == "group"):
        name = "adv_estimator" if compares else "norm_mean_type"
        value = algorithm.adv_estimator if compares else "group"
        why = "a response alone has nothing to be compared with"
        top.find(f"{name} {value} with {key} 1", name, key, why=why, fix=f"write {key}: 8")


def _sampling(settings: RLSettings, sampled: Part) -> None:
    """Responses that are trained on are sampled from what the trainer computes."""
    generating, keys = settings.actor_infer.generating_args, "generating_args"
    if generating.repetition_penalty != 1:
        key, why = f"{keys}.repetition_penalty", "the trainer's log-probabilities know of no penalty"
        what = f"{sampled.key(key)} is {generating.repetition_penalty:g}"
        sampled.find(what, key, why=why, fix="write repetition_penalty: 1.0")
    if not generating.do_sample and settings.rollout.num_return_sequences_in_group > 1:
        why = "all responses of a group would be the same, and have nothing to be judged against"
        what, fix = f"{sampled.key(keys)} takes the likeliest tokens", "write temperature: 1.0 and do_sample: true"
        sampled.find(what, f"{keys}.temperature", f"{keys}.do_sample", why=why, fix=fix)
        return
    tokens = sampled.of(RoleSettings).generating_args.max_new_tokens
    if tokens is not None and tokens != generating.max_new_tokens:
        left = f"{generating.max_new_tokens}, which sequence_length leaves, as in ROLL"
        sampled.reader.lines.append(f"{sampled.key(keys)}.max_new_tokens {tokens}: {left}")


def _functions(settings: RLSettings, top: Part) -> None:
    """Functions of a user's take the place of what other keys name."""
    algorithm, variant = settings.algorithm, settings.actor_train.pg_variant
    if algorithm.advantage_function and (algorithm.adv_estimator == "gae" or algorithm.is_pure_opd):
        what = "advantage_function with " + ("is_pure_opd" if algorithm.is_pure_opd else "adv_estimator: gae")
        why, fix = "one of the two computes advantages", "write adv_estimator: reinforce, without is_pure_opd"
        top.find(what, "advantage_function", why=why, fix=fix)
    if algorithm.loss_function and variant:
        what, why = f"loss_function with pg_variant: {variant}", "one of the two computes losses"
        top.find(what, "loss_function", why=why, fix="remove one of them")


def _turns(settings: RLSettings, trained: Part) -> None:
    """Observations are written by the template of the prompts, which knows nothing of ms-swift's rules."""
    playing = [name for name, role in settings.rewards.items() if "environment" in role.arguments]
    if playing and settings.data.conversation_rules:
        what = f"rewards.{playing[0]} has an environment, and the data conversation_rules"
        why = "turns after the first are not written by ms-swift's templates"
        trained.find(what, "data_args.conversation_rules", why=why, fix="remove conversation_rules")


def _engines(settings: RLSettings, sampled: Part) -> None:
    """Experts are replayed from an engine that tells them."""
    infer = settings.actor_infer
    if not settings.actor_train.replays_routing or infer.engine != "vllm":
        return
    for key, needed in (("pipeline_parallel_size", 1), ("enable_prefix_caching", True)):
        if (value := infer.config.get(key, needed)) != needed:
            why = "vLLM tells which experts it took without pipeline parallelism alone, and with its prefix cache"
            fix = f"write {key}: {shown(needed)}, or router_replay: {{mode: disable}}"
            sampled.find(f"router_replay R3 with {key} {shown(value)} of vllm", why=why, fix=fix)


def _numbers(devices: set[int]) -> str:
    listed = sorted(devices)
    if len(listed) > 4 and listed[-1] - listed[0] == len(listed) - 1:
        return f"devices {listed[0]} to {listed[-1]}"
    return f"device{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed[:8]))}" + (
        ", ..." if len(listed) > 8 else ""
    )
