"""Builds the roles that sample responses, the engines of the policy and judge models, and the rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, cast

from megatune.config.dialects.dialect import read_part
from megatune.config.dialects.roll_reader import REWARD, SAMPLER, Part, Section, part_of
from megatune.config.dialects.roll_roles import STRATEGY, Roles, model_role, no_model, read_engine
from megatune.config.rl.role import RoleSettings, SamplerSettings
from megatune.config.rl.rollout import ENVIRONMENTS, Generating, GroupFilter, RewardSettings
from megatune.config.rl.settings import REWARD_MODEL, SHARE_KEYS, USUAL_SHARE, InferRole, RewardRole
from megatune.config.settings import with_settings
from megatune.config.values import counted, is_number, shown

_ADDRESSES = ("code_url", "judge_api_url")


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


def read_rewards(roles: Roles) -> dict[str, RewardRole]:
    """Build the rewards of a file, by domain."""
    found = {}
    owners: dict[str, str] = {}
    for domain, node in roles.top.mapping("rewards").items():
        if not isinstance(node, dict):
            fix = "write worker_cls, tag_included and the other keys below it"
            roles.top.reader.report(f"rewards.{domain} is not a mapping", roles.top.place(f"rewards.{domain}"), fix=fix)
            continue
        part = part_of(roles.top.reader, node, REWARD, f"rewards.{domain}")
        found[domain] = _reward(domain, part, roles)
        for tag in found[domain].tag_included:
            if tag in owners:
                what = f"the tag {tag!r} is in tag_included of rewards.{owners[tag]} and rewards.{domain}"
                part.report(
                    what, "tag_included", why="one reward scores a row; ROLL uses the last", fix="keep one of the two"
                )
            owners[tag] = domain
    return found


def judge_role(roles: Roles, part: Part, name: str) -> InferRole | None:
    """Build a judge model."""
    return infer_role(roles, part, name, None, _judge_sampling(part))


def _judge_sampling(part: Part) -> Generating:
    generating = part.of(RoleSettings).generating_args
    return sampling_of(generating, generating.max_tokens)


def _reward(domain: str, part: Part, roles: Roles) -> RewardRole:
    (kind, function), keys, own = _kind(part), part.of(RoleSettings), part.of(RewardSettings)
    scores = kind == REWARD_MODEL or (kind == "swift" and bool(keys.devices))
    judges = roles.top.parts["reward_model"].tree
    part.check("reward", kind=kind, domain=domain, reward_model=judges, scores=scores)
    arguments = _arguments(kind, part) | _environment(part)
    judge = None
    if kind == "llm_judge":
        if own.judge_model_type == "inference":
            judge = judge_role(roles, part, part.name)
        arguments |= {"generating": _judge_sampling(part), "judge_model_type": own.judge_model_type or "api"}
    return RewardRole(
        domain,
        kind,
        tag_included=tuple(keys.tag_included),
        workers=keys.world_size or 1,
        function=function,
        arguments=arguments,
        group_filter=_group_filter(part),
        judge=judge,
        model=model_role(roles, part, part.name, None, trains=False) if scores else None,
        score_weight=own.score_weight,
        truncated_score=own.truncated_score,
    )


def _kind(part: Part) -> tuple[str, str | None]:
    """Return the kind of reward, and the import path of the user's function or None."""
    path, kinds = part.of(RoleSettings).worker_cls, read_part("roll", "classes")
    name = (path or "").rpartition(".")[2]
    if path is None:
        kind = "environment" if part.of(RewardSettings).environment else None
    elif path in read_part("roll", "rewards"):
        kind = path
    elif path == name or path.startswith("roll."):
        kind = kinds.get(name)
    else:
        return "python", _import_path(part, "worker_cls", path, "function", "write worker_cls: package.module.function")
    part.check("worker", kind=kind, worker=name, kinds=", ".join(kinds))
    return kind or "math_rule", None


def _import_path(part: Part, key: str, path: str, what: str, fix: str) -> str:
    """Return "module:name" of a user's function or class, which may be written as module.name."""
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    if not module or not attribute.isidentifier():
        part.report(f"{part.key(key)} is {path!r}", key, why=f"not a path of a {what}", fix=fix)
    return f"{module}:{attribute}"


def _arguments(kind: str, part: Part) -> dict[str, Any]:
    """Return the arguments of a reward; arguments of other kinds have no effect."""
    found: dict[str, Any] = {}
    takes: Mapping[str, list[str]] = read_part("roll", "rewards")
    for name in dict.fromkeys(name for names in takes.values() for name in names):
        if name in takes[kind]:
            value = getattr(part.of(RewardSettings), name)
            _check_value(name, value, part)
            found |= value if name == "arguments" else {name: value} if part.has(name) else {}
        elif part.has(name):
            part.ignore(name, f"{kind} does not take it")
    return found


def _check_value(name: str, value: Any, part: Part) -> None:
    """Report an invalid time limit or address."""
    limit = value.get("timeout") if name == "arguments" else None
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit < math.inf):
        what, why = f"{part.key(name)}.timeout is {shown(limit)}", "expected seconds per response, above 0"
        part.report(what, name, why=why, fix="write timeout: 60")
    if name in _ADDRESSES and value and not value.startswith(("http://", "https://")):
        what, fix = f"{part.key(name)} is {value!r}", f"write {name}: http://{value.rpartition('/')[2]}"
        part.report(what, name, why="expected an address that starts with http:// or https://", fix=fix)


def _environment(part: Part) -> dict[str, Any]:
    """Return the arguments of a reward's environment as {"environment": ...}; {} without one."""
    own = part.of(RewardSettings)
    if not (name := own.environment):
        return {}
    if name not in ENVIRONMENTS:
        fix = f"write environment: {' or '.join(ENVIRONMENTS)}, or your own package.module.Class"
        name = _import_path(part, "environment", name, "class", fix)
    return {"environment": {"name": name, "arguments": own.environment_arguments, "max_turns": own.max_turns}}


def _group_filter(part: Part) -> GroupFilter:
    asked, key = part.of(RewardSettings).query_filter_config, "query_filter_config.filter_args"
    valid, given = read_part("roll", "filters")[asked.type], {}
    for name, value in asked.filter_args.items():
        if name not in valid:
            fix = f"remove {name}" + (f"; {asked.type} takes {', '.join(valid)}" if valid else "")
            part.report(f"{part.key(key)}: {asked.type} does not take {name!r}", key, fix=fix)
        elif not is_number(value):
            what = f"{part.key(key)}.{name} is {value!r}"
            part.report(what, key, why="expected a number", fix=f"write {name}: 0.5")
        else:
            given[name] = float(value)
    if (low := given.get("threshold_down", -math.inf)) >= (high := given.get("threshold_up", math.inf)):
        what = f"{part.key(key)}: threshold_down {low:g} is not below threshold_up {high:g}"
        fix = "write threshold_down: 0.1 and threshold_up: 0.9"
        part.report(what, key, why="every group would be dropped", fix=fix)
    return asked.model_copy(update={"filter_args": given})
