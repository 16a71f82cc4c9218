"""Builds roles that sample responses: the policy's engines, and judge models."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal, cast

from megatune.config.dialects.dialect import read_part
from megatune.config.dialects.roll_reader import SAMPLER, Part, Section, part_of
from megatune.config.dialects.roll_roles import STRATEGY, Roles, no_model, read_engine
from megatune.config.rl.role import RoleSettings, SamplerSettings
from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import SHARE_KEYS, USUAL_SHARE, InferRole
from megatune.config.settings import with_settings
from megatune.config.values import counted, is_number


def infer_role(
    roles: Roles, part: Part, name: str, default_model: str | None, generating: Generating
) -> InferRole | None:
    """Build a role that samples; None if its strategy is invalid."""
    strategy = roles.begin(part, name, ("vllm", "sglang", "hf_infer", "builtin"))
    if strategy is None:
        return None
    for key in part.mapping("training_args"):
        part.ignore(f"training_args.{key}", f"{part.name} does not train")
    settings, keys = read_engine(part, samples=True).settings, part.of(RoleSettings)
    devices, model = keys.devices, settings.model.model_name_or_path or default_model
    if model is None:
        no_model(part, name)
    tree = part.mapping("strategy_args", "strategy_config")
    ours = {key: node for key, node in tree.items() if key in SAMPLER.names}
    sampler = part_of(part.reader, ours, SAMPLER, part.key(STRATEGY)).of(SamplerSettings)
    config = {key: node for key, node in tree.items() if key not in SAMPLER.names}
    engine = cast(Literal["builtin", "vllm", "sglang"], strategy.replace("hf_infer", "builtin"))
    if engine == "builtin":
        unused = dict.fromkeys((*read_part("roll", "engines"), *SAMPLER.names), f"strategy_name is {strategy}")
        part_of(part.reader, tree, Section((), others=unused), part.key(STRATEGY))
        config = {}
    each, lengths = 1 if engine == "builtin" else _devices_per_engine(engine, config, part), roles.lengths
    most_key = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "")
    most = config.get(most_key)
    architecture = None
    if engine == "builtin" and model and roles.model_of is not None:  # other engines check their models themselves
        architecture = roles.model_of(with_settings(settings, {"model.model_name_or_path": model}), settings.run.stage)
    part.check(
        "engines",
        role=name,
        engine=engine,
        each=each,
        takes=counted(each, "device"),
        devices=len(devices),
        config=defaultdict(lambda: None, config),
        delta_family=architecture.model_type if architecture is not None and architecture.delta else None,
        is_policy=part.name in ("actor_infer", "student_infer"),
        most_key=most_key,
        most=most if isinstance(most, int) else None,
        longest=lengths.longest_sequence,
        prompt=lengths.prompt_length,
    )
    if engine == "sglang":
        config.pop("grpc_mode", None)
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
    """Return sampling arguments with effective values."""
    return generating.model_copy(
        update={
            "top_k": max(0, generating.top_k),
            "max_new_tokens": max_new_tokens,
            "num_return_sequences": responses or generating.num_return_sequences,
            "do_sample": generating.do_sample and generating.temperature > 0,
        }
    )


def _devices_per_engine(engine: str, config: dict[str, Any], part: Part) -> int:
    tensor = part.of(RoleSettings).num_gpus_per_worker if engine == "sglang" else 1
    devices = 1
    for key, default in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", 1)):
        size = config.get(key, default)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            what, why = f"{part.name}: {key} is {size}", "expected a whole number"
            part.report(what, f"{STRATEGY}.{key}", why=why, fix=f"write {key}: 1")
            size = 1
        devices *= size
    key = SHARE_KEYS[engine]
    share = config.get(key)
    if share is not None and not (is_number(share) and 0 < share <= 1):
        what, why = f"{part.name}: {key} is {share}", "expected a fraction of a device's memory, above 0 and at most 1"
        part.report(what, f"{STRATEGY}.{key}", why=why, fix=f"write {key}: {USUAL_SHARE}")
        del config[key]
    return devices
