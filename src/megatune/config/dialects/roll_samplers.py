"""Roles that sample responses: their engines, and how they sample."""

from __future__ import annotations

from typing import Any, Literal, cast

from megatune.config.dialects.roll_engine import sampled_model
from megatune.config.dialects.roll_ignored import ENGINE_KEYS
from megatune.config.dialects.roll_reader import Part, place_of
from megatune.config.dialects.roll_roles import Roles
from megatune.config.dialects.roll_schema import SAMPLER
from megatune.config.dialects.roll_tree import Tree, data_of
from megatune.config.rl.settings import Generating, InferRole


def infer_role(
    roles: Roles, part: Part, name: str, default_model: str | None, generating: Generating
) -> InferRole | None:
    """Make a role that samples; None where its strategy is none that does."""
    strategy = roles.strategy(part, ("vllm", "sglang", "hf_infer", "builtin"), False)
    roles.check_class(part)
    roles.leave_out(part, ("data_args",), generates=True)
    if strategy is None:
        return None
    for key in part.trees.get("training_args", {}):
        roles.reader.ignore(f"{part.name}.training_args.{key}", f"{part.name} does not train")
    settings = sampled_model(part, roles.reader).settings
    devices, model = roles.devices(part, name), settings.model.model_name_or_path or default_model
    if model is None:
        roles.no_model(part, name)
    tree = part.inner["strategy_args"].trees.get("strategy_config", {})
    ours = {key: node for key, node in tree.items() if key in SAMPLER.names}
    own = roles.reader.read(ours, SAMPLER, f"{part.name}.strategy_args.strategy_config")
    config = {key: data_of(node) for key, node in tree.items() if key not in SAMPLER.names}
    engine = cast(Literal["builtin", "vllm", "sglang"], strategy.replace("hf_infer", "builtin"))
    if engine == "builtin":
        _unused(roles, tree, part, strategy)
        config = {}
    each = 1 if engine == "builtin" else _per_engine(roles, engine, config, part, tree)
    if devices and len(devices) % each:
        what = f"{name} has {len(devices)} devices, and one engine takes {each}"
        fix = f"write a device_mapping of a multiple of {each} devices, or engines of fewer devices"
        roles.reader.find(what, part.where("device_mapping"), "engines are all alike", fix)
    if part["num_gpus_per_worker"] != each and "num_gpus_per_worker" in part.places:
        why = f"an engine of {engine} takes {each} device{'s' if each > 1 else ''}"
        roles.reader.ignore(f"{part.name}.num_gpus_per_worker", why)
    _lengths(roles, engine, config, part, tree)
    return InferRole(
        devices,
        model or "",
        engine,
        dtype="fp16" if settings.precision.fp16 else "bf16" if settings.precision.bf16 else "fp32",
        devices_per_engine=each,
        generating=generating,
        config=config,
        py_executable=own["py_executable"],
        system_envs=roles.environment_of(part),
        sleep_level=own["sleep_level"],
        infer_batch_size=part["infer_batch_size"],
        name=name,
    )


def read_generating(roles: Roles, part: Part, max_new_tokens: int, responses: int | None = None) -> Generating:
    """Make what a part says of sampling."""
    keys = part.inner["generating_args"]
    return Generating(
        temperature=keys["temperature"],
        top_p=keys["top_p"],
        top_k=max(0, keys["top_k"]),
        max_new_tokens=max_new_tokens,
        num_return_sequences=responses or keys["num_return_sequences"],
        repetition_penalty=keys["repetition_penalty"],
        stop_strings=tuple(keys["stop_strings"]),
        do_sample=keys["do_sample"] and keys["temperature"] > 0,
    )


def _per_engine(roles: Roles, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> int:
    """Return the devices of one engine."""
    if config.get("data_parallel_size", 1) not in (1, None):
        why = "engines beside each other follow from device_mapping"
        where = place_of(tree["data_parallel_size"])
        roles.reader.find(f"{part.name}: data_parallel_size above 1", where, why, "remove data_parallel_size")
    sizes = []
    for key, default in (
        ("tensor_parallel_size", part["num_gpus_per_worker"] if engine == "sglang" else 1),
        ("pipeline_parallel_size", 1),
    ):
        size = config.get(key, default)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            fix = f"write {key}: 1"
            roles.reader.find(f"{part.name}: {key} is {size}", place_of(tree[key]), "expected a whole number", fix)
            size = 1
        sizes.append(size)
    if engine == "sglang":
        if "mem_fraction_static" not in config:
            fix = "write mem_fraction_static: 0.8 in strategy_config"
            roles.reader.find(f"{part.name} has no mem_fraction_static", part.at, "ROLL requires it of sglang", fix)
        if config.pop("grpc_mode", None):
            where = place_of(tree["grpc_mode"])
            roles.reader.find(f"{part.name}: grpc_mode is true", where, "ROLL refuses it, too", "remove grpc_mode")
    return sizes[0] * sizes[1]


def _unused(roles: Roles, tree: Tree, part: Part, strategy: str) -> None:
    for key, node in tree.items():
        if key in SAMPLER.names or key in ENGINE_KEYS:
            roles.reader.ignore(f"{part.name}.strategy_args.strategy_config.{key}", f"strategy_name is {strategy}")
        else:
            dotted = f"{part.name}.strategy_args.strategy_config.{key}"
            roles.reader.unknown(key, sorted(ENGINE_KEYS), dotted, place_of(node))


def _lengths(roles: Roles, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> None:
    key = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "")
    if part.name not in ("actor_infer", "student_infer") or not isinstance(config.get(key), int):
        return
    longest = max(roles.lengths.sequence_length, roles.lengths.val_sequence_length or 0)
    if config[key] <= roles.lengths.prompt_length:
        what = f"{part.name}: {key} {config[key]} leaves no token beside prompt_length {roles.lengths.prompt_length}"
        roles.reader.find(what, place_of(tree[key]), "responses would be empty", f"write {key}: {longest}")
    elif config[key] < longest:
        said = f"{part.name}: {key} {config[key]} is less than sequence_length {longest}"
        roles.reader.lines.append(f"{said}: longer responses are cut there")
