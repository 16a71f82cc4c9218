"""What scores responses, and the models that judge."""

from __future__ import annotations

from typing import Any

from megatune.config.dialects.roll_reader import Part, place_of
from megatune.config.dialects.roll_roles import Roles
from megatune.config.dialects.roll_schema import REWARD
from megatune.config.dialects.roll_tree import Tree
from megatune.config.rl.settings import GroupFilter, InferRole, RewardRole

# ROLL's classes, and what they are here; `format` and `length` are this program's own.
KINDS = {
    "MathRuleRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code_sandbox",
    "GeneralRuleRewardWorker": "general_rule",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "LLMJudgeRewardWorker": "llm_judge",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "GeneralValRuleRewardWorker": "general_val",
}
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "math_rule": ("format_pattern",),
    "code_sandbox": ("use_local", "code_url"),
    "general_rule": (),
    "crossthinkqa": ("reward_type", "response_length_penalty_coef"),
    "llm_judge": ("judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key"),
    "multiple_choice": (),
    "general_val": (),
    "format": ("format_pattern",),
    "length": ("arguments",),
    "python": ("arguments",),
}
_ALL_ARGUMENTS = tuple(dict.fromkeys(name for names in _ARGUMENTS.values() for name in names))
_JUDGE_TOKENS = 1024
_BOUNDS = {"mean_filter": ("threshold_up", "threshold_down"), "std_filter": ("std_threshold",), "no_filter": ()}


def read_rewards(trees: Tree, roles: Roles) -> dict[str, RewardRole]:
    """Make the rewards of a file, by domain."""
    found = {}
    for domain, node in trees.items():
        if isinstance(node, dict):
            part = roles.reader.read(node, REWARD, f"rewards.{domain}", place_of(node))
            if (role := _reward(domain, part, roles)) is not None:
                found[domain] = role
        else:
            fix = "write worker_cls, tag_included and the other keys below it"
            roles.reader.find(f"rewards.{domain} is no mapping", place_of(node), fix=fix)
    _tags(found, roles)
    return found


def reward_model(part: Part, roles: Roles) -> InferRole | None:
    """Make the judge that several rewards share."""
    tokens = part.inner["generating_args"]["max_new_tokens"] or _JUDGE_TOKENS
    return roles.infer_role(part, "reward_model", None, roles.generating(part, tokens))


def _reward(domain: str, part: Part, roles: Roles) -> RewardRole | None:
    kind, function = _kind(part, roles)
    if not part["tag_included"]:
        why = "a row's tag says which reward scores it"
        roles.reader.find(f"{part.name} has no tag_included", part.at, why, f"write tag_included: [{domain}]")
    arguments = _arguments(kind, part, roles)
    judge = None
    if kind == "llm_judge":
        judge = _judge(part, roles)
        tokens = part.inner["generating_args"]["max_new_tokens"] or _JUDGE_TOKENS
        arguments["generating"] = roles.generating(part, tokens)
        arguments["judge_model_type"] = part["judge_model_type"] or "api"
    else:
        for name in ("strategy_args", "generating_args", "training_args", "device_mapping"):
            if name in part.places:
                roles.reader.ignore(part.key(name), "a reward that is a rule runs no model")
    if kind == "code_sandbox" and not part["use_local"] and not part["code_url"]:
        fix = "write code_url: URL, or use_local: true"
        roles.reader.find(f"{part.name} has use_local: false without code_url", part.where("use_local"), fix=fix)
    return RewardRole(
        domain,
        kind,
        tag_included=tuple(part["tag_included"]),
        workers=part["world_size"] or 1,
        devices=judge.devices if judge else (),
        function=function,
        arguments=arguments,
        group_filter=_group_filter(part, roles),
        judge=judge,
    )


def _kind(part: Part, roles: Roles) -> tuple[str, str | None]:
    """Return which reward a class is, or the user's function."""
    path = part["worker_cls"]
    if path is None:
        fix = f"write worker_cls: one of {', '.join(KINDS)}, or package.module.function of your own"
        roles.reader.find(f"{part.name} has no worker_cls", part.at, "it says what scores", fix)
        return "math_rule", None
    name = path.rpartition(".")[2]
    if path in _ARGUMENTS:
        return path, None
    if name in KINDS and (path == name or path.startswith("roll.")):
        return KINDS[name], None
    if path.startswith("roll."):
        fix = f"one of {', '.join(KINDS)}, or a function of your own"
        roles.reader.find(f"{part.name}.worker_cls {name} is not built", part.where("worker_cls"), fix=fix)
        return "math_rule", None
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    if not module or not attribute.isidentifier():
        fix = "write worker_cls: package.module.function"
        roles.reader.find(f"{part.name}.worker_cls is {path!r}", part.where("worker_cls"), "no function's path", fix)
        return "python", None
    return "python", f"{module}:{attribute}"


def _arguments(kind: str, part: Part, roles: Roles) -> dict[str, Any]:
    """Return what a reward is made with; what other kinds take does nothing to it."""
    found: dict[str, Any] = {}
    for name in _ALL_ARGUMENTS:
        if name in _ARGUMENTS[kind]:
            found |= part[name] if name == "arguments" else {name: part[name]} if name in part.places else {}
        elif name in part.places:
            roles.reader.ignore(part.key(name), f"{kind} does not take it")
    return found


def _judge(part: Part, roles: Roles) -> InferRole | None:
    kind, find = part["judge_model_type"] or "api", roles.reader.find
    if kind == "inference":
        tokens = part.inner["generating_args"]["max_new_tokens"] or _JUDGE_TOKENS
        return roles.infer_role(part, part.name, None, roles.generating(part, tokens))
    if kind == "cluster" and not roles.top.inner["reward_model"].is_written:
        where = part.where("judge_model_type")
        find(f"{part.name} has judge_model_type: cluster without the role reward_model", where, fix="add reward_model")
    if kind == "api":
        for name in ("judge_api_url", "judge_model_name"):
            if not part[name]:
                fix = f"write {name}, or judge_model_type: inference with a model and devices"
                find(f"{part.name} has no {name}", part.where("judge_model_type"), "judge_model_type is api", fix)
    return None


def _group_filter(part: Part, roles: Roles) -> GroupFilter:
    keys = part.inner["query_filter_config"]
    valid, given = _BOUNDS[keys["type"]], {}
    for name, value in keys["filter_args"].items():
        where = keys.where("filter_args")
        if name not in valid:
            fix = f"remove {name}" + (f"; {keys['type']} takes {', '.join(valid)}" if valid else "")
            roles.reader.find(f"{keys.key('filter_args')}: {keys['type']} does not take {name!r}", where, fix=fix)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            fix = f"write {name}: 0.5"
            roles.reader.find(f"{keys.key('filter_args')}.{name} is {value!r}", where, "expected a number", fix)
        else:
            given[name] = float(value)
    return GroupFilter(type=keys["type"], **given)


def _tags(rewards: dict[str, RewardRole], roles: Roles) -> None:
    owners: dict[str, Any] = {}
    for domain, role in rewards.items():
        for tag in role.tag_included:
            if tag in owners:
                what = f"the tag {tag!r} is in tag_included of rewards.{owners[tag]} and rewards.{domain}"
                roles.reader.find(what, why="one reward scores a row; ROLL takes the last", fix="keep one of the two")
            owners[tag] = domain
