"""What roles of both kinds have in common, and those that sample responses: their engines, and how they sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from megatune.architecture import Architecture
from megatune.config.dialects.roll_engine import sampled_model
from megatune.config.dialects.roll_reader import SAMPLER, Part, place_of
from megatune.config.dialects.roll_run import environment
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
        parts: of the roles that have devices, by the names of the roles.
    """

    top: Part
    run: RLRunSettings
    lengths: RolloutSettings
    model_of: ModelOf | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    def begin(
        self, part: Part, name: str, valid: tuple[str, ...], unread: dict[str, str], *, trains: bool
    ) -> str | None:
        """Check what computes a role, and note what of it is not read.

        Args:
            valid: names of strategies.
            unread: mappings of the role, and why nobody reads them.

        Returns:
            The strategy; None, and a finding, where it is none of the valid ones.
        """
        keys, key, self.parts[name] = part.of(RoleSettings), "strategy_args.strategy_name", part
        strategy, path = keys.strategy_args.strategy_name, keys.worker_cls
        if strategy is None and part.key(key) not in part.reader.refused:
            fix = f"write strategy_args: {{strategy_name: {valid[0]}}}"
            part.find(f"{part.name} has no {key}", why=f"it says what computes {part.name}", fix=fix)
        elif strategy is not None and strategy not in valid:
            why = f"{part.name} {'trains' if trains else 'does not train'}: expected {' or '.join(valid)}"
            part.find(f"{part.key(key)} is {strategy}", key, why=why, fix=f"write strategy_name: {valid[0]}")
        if path and not part.name.startswith("rewards.") and path.rpartition(".")[2] not in _ACTORS:
            what, fix = f"{part.name}.worker_cls is {path}", "remove worker_cls"
            part.find(what, "worker_cls", why="roles are built in", fix=fix)
        for section, why in unread.items():
            if section in part.places:
                part.ignore(section, why)
        return strategy if strategy in valid else None

    def devices(self, part: Part) -> tuple[int, ...]:
        devices = part.of(RoleSettings).devices
        if not devices and part.key("device_mapping") not in part.reader.refused:
            fix = "write device_mapping: list(range(0,8))"
            part.find(f"{part.name} has no device_mapping", why="a model needs devices", fix=fix)
        return devices

    def environment_of(self, part: Part) -> dict[str, str]:
        return {**environment(self.top), **environment(part)}


NO_PROMPTS = {"data_args": "prompts are made with actor_train's"}


def no_model(part: Part, name: str) -> None:
    keys = {**dict.fromkeys(("actor_train", "actor_infer", "reference"), "pretrain"), "critic": "reward_pretrain"}
    fix = f"write model_args: {{model_name_or_path: MODEL}} in {part.name}"
    fix += f", or {keys[name]}: MODEL at the top level" if name in keys else ""
    part.find(f"{part.name} has no model", fix=fix)


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
    sampler = part.reader.read(ours, SAMPLER, part.key(_CONFIG)).of(SamplerSettings)
    config = {key: data_of(node) for key, node in tree.items() if key not in SAMPLER.names}
    engine = cast(Literal["builtin", "vllm", "sglang"], strategy.replace("hf_infer", "builtin"))
    if engine == "builtin":
        _unused(tree, part, strategy)
        config = {}
    each = 1 if engine == "builtin" else _per_engine(engine, config, part, tree)
    if devices and len(devices) % each:
        what = f"{name} has {len(devices)} devices, and one engine takes {each}"
        fix = f"write a device_mapping of a multiple of {each} devices, or engines of fewer devices"
        part.find(what, "device_mapping", why="engines are all alike", fix=fix)
    if keys.num_gpus_per_worker != each and "num_gpus_per_worker" in part.places:
        part.ignore("num_gpus_per_worker", f"an engine of {engine} takes {each} device{'s' if each > 1 else ''}")
    _lengths(roles.lengths, engine, config, part, tree)
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


def _per_engine(engine: str, config: dict[str, Any], part: Part, tree: Tree) -> int:
    """Return the devices of one engine."""
    find = part.reader.find
    if config.get("data_parallel_size", 1) not in (1, None):
        what, where = f"{part.name}: data_parallel_size above 1", place_of(tree["data_parallel_size"])
        find(what, where, "the number of engines follows from device_mapping", "remove data_parallel_size")
    tensor = part.of(RoleSettings).num_gpus_per_worker if engine == "sglang" else 1
    devices = 1
    for key, default in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", 1)):
        size = config.get(key, default)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            what, where = f"{part.name}: {key} is {size}", place_of(tree[key])
            find(what, where, "expected a whole number", f"write {key}: 1")
            size = 1
        devices *= size
    if engine == "sglang":
        if "mem_fraction_static" not in config:
            fix = "write mem_fraction_static: 0.8 in strategy_config"
            part.find(f"{part.name} has no mem_fraction_static", why="ROLL requires it of sglang", fix=fix)
        if config.pop("grpc_mode", None):
            where = place_of(tree["grpc_mode"])
            find(f"{part.name}: grpc_mode is true", where, "ROLL refuses it, too", "remove grpc_mode")
    return devices


def _unused(tree: Tree, part: Part, strategy: str) -> None:
    known = read_part("roll", "engines")
    for key, node in tree.items():
        if key in SAMPLER.names or key in known:
            part.ignore(f"{_CONFIG}.{key}", f"strategy_name is {strategy}")
        else:
            part.unknown(key, sorted(known), f"{_CONFIG}.", place_of(node))


def _lengths(lengths: RolloutSettings, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> None:
    key = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "")
    if part.name not in ("actor_infer", "student_infer") or not isinstance(config.get(key), int):
        return
    longest, prompt = lengths.longest_sequence, lengths.prompt_length
    if config[key] <= prompt:
        what = f"{part.name}: {key} {config[key]} leaves no token after prompt_length {prompt}"
        part.reader.find(what, place_of(tree[key]), "responses would be empty", f"write {key}: {longest}")
    elif config[key] < longest:
        said = f"{part.name}: {key} {config[key]} is less than sequence_length {longest}"
        part.reader.lines.append(f"{said}: longer responses are cut there")
