"""Roles with a model: those that compute with our engine, with how their samples become micro-batches, and those that
sample responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

from megatune.architecture import Architecture
from megatune.config.dialects.roll_reader import SAMPLER, Part, part_of
from megatune.config.dialects.roll_roles import NO_PROMPTS, RULES, STRATEGY, Roles, no_model, read_engine, sampled_model
from megatune.config.dialects.roll_run import profiled, reported
from megatune.config.dialects.table import read_part
from megatune.config.load import Loaded
from megatune.config.of_model import of_model
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, SamplerSettings
from megatune.config.rl.rollout import Generating, RolloutSettings
from megatune.config.rl.settings import InferRole, ModelRole
from megatune.config.settings import Settings, with_settings


def model_role(roles: Roles, part: Part, name: str, default_model: str | None, *, trains: bool) -> ModelRole | None:
    """Make a role with a model of our engine; None where its strategy is not one."""
    unread = {"generating_args": f"{part.name} samples nothing"}
    unread = unread if name == "actor_train" else {**NO_PROMPTS, **unread}
    valid = ("megatron_train",) if trains else ("megatron_infer", "hf_infer")
    strategy = roles.begin(part, name, valid, unread, trains=trains)
    if strategy is None:
        return None
    if strategy == "hf_infer":
        part = replace(part, tree={key: node for key, node in part.tree.items() if key != "strategy_args"})
    loaded, keys = read_engine(part, trains=trains), part.of(RoleSettings)
    devices = roles.devices(part)
    settings = _settings(roles, loaded.settings, part, name, default_model, len(devices), trains)
    loaded, architecture = replace(loaded, settings=settings), None
    if roles.model_of is not None and settings.model.model_name_or_path:
        architecture = roles.model_of(settings)
    if trains and architecture is not None:
        loaded, lines = of_model(_with_encoder(loaded, architecture), architecture)
        part.reader.lines += lines
    settings, found = loaded.settings, loaded.check_rules(architecture, len(devices), rules=RULES)
    part.reader.findings += [each for each in found if each not in part.reader.findings]
    _positions(roles, architecture)
    _world(settings, part, devices)
    role = ModelRole(
        **{**dict(keys), "system_envs": roles.environment_of(part), "pg_variant": _variant(part, name)},
        name=name,
        settings=settings,
        strategy="hf" if strategy == "hf_infer" else "megatron",
        training=trains,
    )
    if keys.router_replay.mode == "R2":
        why = "the trainer's forward pass before its updates chooses the same experts as training does, at once"
        fix = "write mode: R3, or disable"
        part.find(part.key("router_replay.mode is R2"), "router_replay.mode", why=why, fix=fix)
    return role.model_copy(update=_micro_batches(roles.lengths.max_sequence_length, role, part))


def _settings(
    roles: Roles, settings: Settings, part: Part, name: str, default_model: str | None, world_size: int, trains: bool
) -> Settings:
    """Return the settings of an engine with what other keys of the file say."""
    keys, top, parallel, optimizer = part.of(RoleSettings), roles.run, settings.parallel, settings.optimizer
    changes: dict[str, Any] = {
        "run.stage": "rm" if name == "critic" else "sft",
        "run.output_dir": top.output_dir,
        "run.seed": top.seed,
        "run.run_name": top.tracker_kwargs.name or top.exp_name,
        "run.num_processes": max(1, world_size),
        "run.ddp_timeout": max(1, round(keys.backend_timeout * 60)),
        "batch.per_device_eval_batch_size": keys.infer_batch_size,
        "data.cutoff_len": max(2, roles.lengths.max_sequence_length),
        "data.packing": keys.use_sequence_packing,
    }
    if settings.model.model_name_or_path is None:
        if default_model is None:
            no_model(part, name)
        changes["model.model_name_or_path"] = default_model
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        part.ignore("sequence_parallel", "tensor_model_parallel_size is 1")
        changes["parallel.sequence_parallel"] = False
    if trains:
        changes |= reported(top) | {"optimizer.max_grad_norm": roles.top.of(AlgorithmSettings).max_grad_norm}
        changes |= profiled(top) if name == "actor_train" else {}
    else:
        changes["batch.per_device_train_batch_size"] = keys.infer_batch_size
        changes["batch.gradient_accumulation_steps"] = parallel.pipeline_model_parallel_size
    if optimizer.lr_scheduler_type == "constant" and (optimizer.warmup_steps or optimizer.warmup_ratio):
        line = "lr_scheduler_type constant with a warm-up is constant_with_warmup, as in ROLL's Megatron"
        part.reader.lines.append(f"{part.name}: {line}")
        changes["optimizer.lr_scheduler_type"] = "constant_with_warmup"
    return with_settings(settings, changes)


def _with_encoder(loaded: Loaded, architecture: Architecture) -> Loaded:
    """Train the encoder of pictures too where nothing freezes it, as ROLL does; adapters are of the language model."""
    frozen = ("finetuning.freeze_vision_tower", "finetuning.freeze_multi_modal_projector")
    is_lora = loaded.settings.finetuning.finetuning_type == "lora"
    if architecture.vision is None or is_lora or not loaded.entries.keys().isdisjoint(frozen):
        return loaded
    return replace(loaded, settings=with_settings(loaded.settings, dict.fromkeys(frozen, False)))


def _positions(roles: Roles, architecture: Architecture | None) -> None:
    """Positions beyond those the model was made for mean nothing to it."""
    longest = roles.lengths.longest_sequence
    if architecture is not None and longest > architecture.max_position_embeddings:
        positions = architecture.max_position_embeddings
        what = f"sequence_length {longest} is more than the {positions} positions of the model"
        why = "the rotary embeddings of its config.json were made for no more"
        fix = f"write a prompt_length and a response_length of {positions} or less together"
        roles.top.find(what, "sequence_length", "response_length", "val_sequence_length", why=why, fix=fix)


def _world(settings: Settings, part: Part, devices: tuple[int, ...]) -> None:
    parallel = settings.parallel
    for size, what, why in (
        (
            parallel.model_parallel_size,
            "one copy of the model",
            "tensor_model_parallel_size × pipeline_model_parallel_size × context_parallel_size",
        ),
        (
            parallel.expert_parallel_size,
            "one copy of the experts",
            "expert_tensor_parallel_size × expert_model_parallel_size × pipeline_model_parallel_size",
        ),
    ):
        if devices and len(devices) % size:
            text = f"{part.name} has {len(devices)} devices, not a multiple of the {size} that {what} takes"
            fix = f"write a device_mapping of a multiple of {parallel.smallest_world} devices, or another layout"
            part.find(text, "device_mapping", why=f"{why} is {size}", fix=fix)
            return


def _micro_batches(longest: int, role: ModelRole, part: Part) -> dict[str, int | None]:
    """Return how samples of a role become micro-batches.

    Args:
        longest: tokens of a sample.
    """
    found: dict[str, int | None] = {}
    switches = {"train": "use_dynamic_batching_in_train", "forward": "use_dynamic_batching_in_infer"}
    if role.use_sequence_packing:
        if any(getattr(role, switch) for switch in switches.values()):
            what, fix = f"{part.name} has use_sequence_packing and dynamic batching", " and ".join(switches.values())
            part.find(what, *switches.values(), fix=f"remove {fix}")
        rows = {"train": role.settings.batch.per_device_train_batch_size, "forward": role.infer_batch_size}
        for phase, count in rows.items():
            key = f"max_packed_sequence_length_{phase}"
            tokens = getattr(role.sequence_packing_args, key) or max(1, count) * longest
            _long_enough(longest, part, f"sequence_packing_args.{key}", tokens)
            found[f"packed_tokens_{phase}"] = tokens
        return found
    for phase, switch in switches.items():
        key = switch.replace("use_dynamic_batching", "max_tokens_per_microbatch")
        if getattr(role, switch) and not getattr(role, key):
            part.find(f"{part.name} has {switch} without {key}", switch, fix=f"write {key}: {2 * longest}")
        elif getattr(role, switch):
            _long_enough(longest, part, key, getattr(role, key))
            found[f"dynamic_tokens_{phase}"] = getattr(role, key)
    return found


def _long_enough(longest: int, part: Part, key: str, tokens: int) -> None:
    if tokens < longest:
        what, fix = f"{part.key(key)} {tokens} is less than sequence_length {longest}", key.rpartition(".")[2]
        part.find(what, key, why="the longest sample would fit nowhere", fix=f"write {fix}: {longest}")


def _variant(part: Part, name: str) -> str | None:
    keys = part.of(RoleSettings)
    is_pg = (keys.worker_cls or "").endswith("ActorPGWorker")
    if keys.pg_variant and not is_pg and name == "actor_train":
        part.ignore("pg_variant", "it takes effect with worker_cls of ActorPGWorker, as in ROLL")
    variant = (keys.pg_variant or "vanilla") if is_pg else None
    for key in ("pg_ratio_low", "pg_ratio_high"):
        if part.has(key) and variant not in ("tis", "topr", "cispo"):
            part.ignore(key, "it is of pg_variant tis, topr and cispo")
    return variant


def infer_role(
    roles: Roles, part: Part, name: str, default_model: str | None, generating: Generating
) -> InferRole | None:
    """Make a role that samples; None where its strategy is none that does."""
    strategy = roles.begin(part, name, ("vllm", "sglang", "hf_infer", "builtin"), NO_PROMPTS, trains=False)
    if strategy is None:
        return None
    for key in part.mapping("training_args"):
        part.ignore(f"training_args.{key}", f"{part.name} does not train")
    settings, keys = sampled_model(part).settings, part.of(RoleSettings)
    devices, model = roles.devices(part), settings.model.model_name_or_path or default_model
    if model is None:
        no_model(part, name)
    tree = part.mapping("strategy_args", "strategy_config")
    ours = {key: node for key, node in tree.items() if key in SAMPLER.names}
    sampler = part_of(part.reader, ours, SAMPLER, part.key(STRATEGY)).of(SamplerSettings)
    config = {key: node for key, node in tree.items() if key not in SAMPLER.names}
    engine = cast(Literal["builtin", "vllm", "sglang"], strategy.replace("hf_infer", "builtin"))
    if engine == "builtin":
        _unused(part, strategy)
        config = {}
    each = 1 if engine == "builtin" else _per_engine(engine, config, part)
    if devices and len(devices) % each:
        what = f"{name} has {len(devices)} devices, and one engine takes {each}"
        fix = f"write a device_mapping of a multiple of {each} devices, or engines of fewer devices"
        part.find(what, "device_mapping", why="engines are all alike", fix=fix)
    if keys.num_gpus_per_worker != each and part.has("num_gpus_per_worker"):
        part.ignore("num_gpus_per_worker", f"an engine of {engine} takes {each} device{'s' if each > 1 else ''}")
    _lengths(roles.lengths, engine, config, part)
    own = {"system_envs": roles.environment_of(part), "generating_args": generating}
    return InferRole(
        **{**dict(keys), **dict(sampler), **own},
        name=name,
        model_name_or_path=model or "",
        engine=engine,
        dtype="fp16" if settings.precision.fp16 else "bf16" if settings.precision.bf16 else "fp32",
        devices_per_engine=each,
        config=config,
    )


def sampling_of(generating: Generating, max_new_tokens: int, responses: int | None = None) -> Generating:
    """Return how responses are sampled, with what counts in place of its keys."""
    return generating.model_copy(
        update={
            "top_k": max(0, generating.top_k),
            "max_new_tokens": max_new_tokens,
            "num_return_sequences": responses or generating.num_return_sequences,
            "do_sample": generating.do_sample and generating.temperature > 0,
        }
    )


def _per_engine(engine: str, config: dict[str, Any], part: Part) -> int:
    """Return the devices of one engine."""
    if config.get("data_parallel_size", 1) not in (1, None):
        what, why = f"{part.name}: data_parallel_size above 1", "the number of engines follows from device_mapping"
        part.find(what, f"{STRATEGY}.data_parallel_size", why=why, fix="remove data_parallel_size")
    tensor = part.of(RoleSettings).num_gpus_per_worker if engine == "sglang" else 1
    devices = 1
    for key, default in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", 1)):
        size = config.get(key, default)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            what, why = f"{part.name}: {key} is {size}", "expected a whole number"
            part.find(what, f"{STRATEGY}.{key}", why=why, fix=f"write {key}: 1")
            size = 1
        devices *= size
    if engine == "sglang":
        if "mem_fraction_static" not in config:
            fix = "write mem_fraction_static: 0.8 in strategy_config"
            part.find(f"{part.name} has no mem_fraction_static", why="ROLL requires it of sglang", fix=fix)
        if config.pop("grpc_mode", None):
            what, key = f"{part.name}: grpc_mode is true", f"{STRATEGY}.grpc_mode"
            part.find(what, key, why="ROLL refuses it, too", fix="remove grpc_mode")
    return devices


def _unused(part: Part, strategy: str) -> None:
    known = read_part("roll", "engines")
    for key in part.mapping(*STRATEGY.split(".")):
        if key in SAMPLER.names or key in known:
            part.ignore(f"{STRATEGY}.{key}", f"strategy_name is {strategy}")
        else:
            part.unknown(key, sorted(known), f"{STRATEGY}.")


def _lengths(lengths: RolloutSettings, engine: str, config: dict[str, Any], part: Part) -> None:
    key = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "")
    if part.name not in ("actor_infer", "student_infer") or not isinstance(config.get(key), int):
        return
    longest, prompt = lengths.longest_sequence, lengths.prompt_length
    if config[key] <= prompt:
        what = f"{part.name}: {key} {config[key]} leaves no token after prompt_length {prompt}"
        part.find(what, f"{STRATEGY}.{key}", why="responses would be empty", fix=f"write {key}: {longest}")
    elif config[key] < longest:
        said = f"{part.name}: {key} {config[key]} is less than sequence_length {longest}"
        part.reader.lines.append(f"{said}: longer responses are cut there")
