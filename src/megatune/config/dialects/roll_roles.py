"""What roles of both kinds have in common, and those that sample responses: their engines, and how they sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from megatune.architecture import Architecture
from megatune.config.dialects.roll_engine import sampled_model
from megatune.config.dialects.roll_reader import Part, Reader, place_of
from megatune.config.dialects.roll_run import environment
from megatune.config.dialects.roll_schema import SAMPLER
from megatune.config.dialects.roll_tree import Tree, data_of
from megatune.config.dialects.table import read_part
from megatune.config.rl.role import RoleSettings, SamplerSettings
from megatune.config.rl.rollout import Generating, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rl.settings import InferRole
from megatune.config.settings import Settings

# Settings of a role's engine -> the model's numbers; None where they cannot be read.
ModelOf = Callable[[Settings], Architecture | None]

_ACTORS = ("ActorWorker", "ActorPGWorker", "InferWorker", "CriticWorker", "BaseWorker")
_CONFIG = "strategy_args.strategy_config"


@dataclass(slots=True)
class Roles:
    """What roles are made with.

    Attributes:
        run, lengths: keys of the top level, as far as they are valid.
        places: "actor_train.device_mapping" -> where it was written, for what is checked between roles.
    """

    reader: Reader
    top: Part
    run: RLRunSettings
    lengths: RolloutSettings
    model_of: ModelOf | None = None
    places: dict[str, str] = field(default_factory=dict)

    def strategy(self, part: Part, valid: tuple[str, ...], trains: bool) -> str | None:
        """Return what computes a role; None, and a finding, where it is none of the valid ones."""
        name, key = part.of(RoleSettings).strategy_args.strategy_name, part.key("strategy_args.strategy_name")
        if name in valid:
            return name
        if name is not None:
            why = f"{part.name} {'trains' if trains else 'does not train'}: expected {' or '.join(valid)}"
            where = part.where("strategy_args.strategy_name")
            self.reader.find(f"{key} is {name}", where, why, f"write strategy_name: {valid[0]}")
        elif key not in self.reader.refused:
            what, fix = f"{part.name} has no strategy_args.strategy_name", f"{{strategy_name: {valid[0]}}}"
            self.reader.find(what, part.at, f"it says what computes {part.name}", f"write strategy_args: {fix}")
        return None

    def devices(self, part: Part, name: str) -> tuple[int, ...]:
        devices = part.of(RoleSettings).devices
        self.places[name] = part.where("device_mapping")
        if not devices and part.key("device_mapping") not in self.reader.refused:
            fix = "write device_mapping: list(range(0,8))"
            self.reader.find(f"{part.name} has no device_mapping", part.at, "a model needs devices", fix)
        return devices

    def check_class(self, part: Part) -> None:
        path = part.of(RoleSettings).worker_cls
        if path and not part.name.startswith("rewards.") and path.rpartition(".")[2] not in _ACTORS:
            fix = "remove worker_cls"
            self.reader.find(f"{part.name}.worker_cls is {path}", part.where("worker_cls"), "roles are built in", fix)

    def leave_out(self, part: Part, sections: tuple[str, ...]) -> None:
        """Say which mappings of a role nobody reads."""
        for name in sections:
            if name in part.places:
                why = "prompts are made with actor_train's" if name == "data_args" else f"{part.name} samples nothing"
                self.reader.ignore(part.key(name), why)

    def environment_of(self, part: Part) -> dict[str, str]:
        return {**environment(self.top, self.reader), **environment(part, self.reader)}

    def no_model(self, part: Part, name: str) -> None:
        keys = {**dict.fromkeys(("actor_train", "actor_infer", "reference"), "pretrain"), "critic": "reward_pretrain"}
        fix = f"write model_args: {{model_name_or_path: MODEL}} in {part.name}"
        fix += f", or {keys[name]}: MODEL at the top level" if name in keys else ""
        self.reader.find(f"{part.name} has no model", part.at, fix=fix)


def infer_role(
    roles: Roles, part: Part, name: str, default_model: str | None, generating: Generating
) -> InferRole | None:
    """Make a role that samples; None where its strategy is none that does."""
    strategy = roles.strategy(part, ("vllm", "sglang", "hf_infer", "builtin"), False)
    roles.check_class(part)
    roles.leave_out(part, ("data_args",))
    if strategy is None:
        return None
    for key in part.mapping("training_args"):
        roles.reader.ignore(f"{part.name}.training_args.{key}", f"{part.name} does not train")
    settings, keys = sampled_model(part, roles.reader).settings, part.of(RoleSettings)
    devices, model = roles.devices(part, name), settings.model.model_name_or_path or default_model
    if model is None:
        roles.no_model(part, name)
    tree = part.mapping("strategy_args", "strategy_config")
    ours = {key: node for key, node in tree.items() if key in SAMPLER.names}
    sampler = roles.reader.read(ours, SAMPLER, part.key(_CONFIG)).of(SamplerSettings)
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
    if keys.num_gpus_per_worker != each and "num_gpus_per_worker" in part.places:
        why = f"an engine of {engine} takes {each} device{'s' if each > 1 else ''}"
        roles.reader.ignore(f"{part.name}.num_gpus_per_worker", why)
    _lengths(roles, engine, config, part, tree)
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


def _per_engine(roles: Roles, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> int:
    """Return the devices of one engine."""
    if config.get("data_parallel_size", 1) not in (1, None):
        why = "the number of engines follows from device_mapping"
        where = place_of(tree["data_parallel_size"])
        roles.reader.find(f"{part.name}: data_parallel_size above 1", where, why, "remove data_parallel_size")
    tensor = part.of(RoleSettings).num_gpus_per_worker if engine == "sglang" else 1
    devices = 1
    for key, default in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", 1)):
        size = config.get(key, default)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            fix = f"write {key}: 1"
            roles.reader.find(f"{part.name}: {key} is {size}", place_of(tree[key]), "expected a whole number", fix)
            size = 1
        devices *= size
    if engine == "sglang":
        if "mem_fraction_static" not in config:
            fix = "write mem_fraction_static: 0.8 in strategy_config"
            roles.reader.find(f"{part.name} has no mem_fraction_static", part.at, "ROLL requires it of sglang", fix)
        if config.pop("grpc_mode", None):
            where = place_of(tree["grpc_mode"])
            roles.reader.find(f"{part.name}: grpc_mode is true", where, "ROLL refuses it, too", "remove grpc_mode")
    return devices


def _unused(roles: Roles, tree: Tree, part: Part, strategy: str) -> None:
    known = read_part("roll", "engines")
    for key, node in tree.items():
        dotted = part.key(f"{_CONFIG}.{key}")
        if key in SAMPLER.names or key in known:
            roles.reader.ignore(dotted, f"strategy_name is {strategy}")
        else:
            roles.reader.unknown(key, sorted(known), dotted, place_of(node))


def _lengths(roles: Roles, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> None:
    key = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "")
    if part.name not in ("actor_infer", "student_infer") or not isinstance(config.get(key), int):
        return
    longest, prompt = roles.lengths.longest_sequence, roles.lengths.prompt_length
    if config[key] <= prompt:
        what = f"{part.name}: {key} {config[key]} leaves no token after prompt_length {prompt}"
        roles.reader.find(what, place_of(tree[key]), "responses would be empty", f"write {key}: {longest}")
    elif config[key] < longest:
        said = f"{part.name}: {key} {config[key]} is less than sequence_length {longest}"
        roles.reader.lines.append(f"{said}: longer responses are cut there")
