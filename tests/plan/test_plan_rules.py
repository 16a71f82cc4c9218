"""Rules of layouts: the branches that no other table has, and that every fix does fix."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.architecture import Architecture, MixtureOfExperts, MultiLatentAttention
from megatune.config.load import load
from megatune.config.rules import check, layout, memory, pipeline
from megatune.config.rules.rule import Context
from megatune.config.settings import GROUPS, Settings, all_settings
from megatune.config.values import coerce, parse
from megatune.references import spell

DENSE = Architecture(
    model_type="qwen2",
    num_layers=12,
    hidden_size=96,
    ffn_hidden_size=192,
    num_attention_heads=12,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=151_643,
    max_position_embeddings=4096,
    norm_epsilon=1e-6,
    rotary_base=1e6,
)
SPARSE = dataclasses.replace(
    DENSE,
    model_type="qwen2_moe",
    moe=MixtureOfExperts(
        layers=(True,) * 12,
        num_experts=8,
        router_topk=2,
        moe_ffn_hidden_size=48,
        shared_expert_intermediate_size=56,
    ),
)
LATENT = dataclasses.replace(
    DENSE,
    model_type="deepseek_v3",
    num_query_groups=12,
    moe=MixtureOfExperts(
        layers=(False, *(True,) * 11),
        num_experts=8,
        router_topk=2,
        moe_ffn_hidden_size=48,
        score_function="sigmoid",
        expert_bias=True,
    ),
    mla=MultiLatentAttention(
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        softmax_scale=0.25,
    ),
)
BASE = ["model_name_or_path=m", "dataset=d", "output_dir=o"]


def messages(architecture: Architecture, *overrides: str, world_size: int | None = None) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings, architecture, world_size)]


VALID = [
    (LATENT, ["tensor_model_parallel_size=6", "sequence_parallel=true"]),  # a key and value for each head
    (SPARSE, ["tensor_model_parallel_size=4", "sequence_parallel=true", "expert_tensor_parallel_size=1"]),
    (LATENT, ["recompute_granularity=selective", "recompute_modules=[mla_up_proj, mlp, moe]"]),
    (DENSE, ["pipeline_model_parallel_size=13", "account_for_embedding_in_pipeline_split=true"]),
    (DENSE, ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2",
             "gradient_accumulation_steps=2", "decoder_last_pipeline_num_layers=4"]),
    (DENSE, ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=E(t*2|)*5t*2L",
             "virtual_pipeline_model_parallel_size=3", "gradient_accumulation_steps=4"]),
    (DENSE, ["pipeline_model_parallel_size=5", "recompute_granularity=full", "recompute_method=block",
             "recompute_num_layers=3"]),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "overrides"), VALID)
def test_what_is_valid_passes(architecture: Architecture, overrides: list[str]) -> None:
    assert messages(architecture, *overrides) == []


# model, overrides -> the one message they cause
WRONG = [
    (
        SPARSE,
        ["tensor_model_parallel_size=12", "sequence_parallel=true"],
        "tensor_model_parallel_size 12 does not split the model's 160 rows of queries, keys and values, 56 channels of "
        "the shared experts\n"
        "    why: each process takes an equal number of each; key/value heads may also be shared by several processes\n"
        "    fix: write tensor_model_parallel_size: 4, the nearest valid size",
    ),
    (
        LATENT,
        ["tensor_model_parallel_size=8", "sequence_parallel=true"],
        "tensor_model_parallel_size 8 does not split the model's 12 attention heads\n"
        "    why: each process takes an equal number of each; key/value heads may also be shared by several processes\n"
        "    fix: write tensor_model_parallel_size: 6, the nearest valid size",
    ),
    (
        DENSE,
        ["tensor_model_parallel_size=2", "context_parallel_size=4", "cp_comm_type=a2a"],
        "context_parallel_size 4 with cp_comm_type a2a does not divide the 6 attention heads of a process\n"
        "    why: a2a gives each context-parallel process an equal number of heads\n"
        "    fix: write cp_comm_type: p2p, or context_parallel_size: 3, the nearest that divides them",
    ),
    (
        SPARSE,
        ["tensor_model_parallel_size=2", "sequence_parallel=true", "expert_tensor_parallel_size=5"],
        "expert_tensor_parallel_size 5 does not divide an expert's 48 channels\n"
        "    why: each process takes an equal number of channels of every expert\n"
        "    fix: write expert_tensor_parallel_size: 4",
    ),
    (
        DENSE,
        ["expert_tensor_parallel_size=2"],
        "expert_tensor_parallel_size: 2 with a dense model\n"
        "    why: a qwen2 has no experts\n"
        "    fix: remove expert_tensor_parallel_size",
    ),
    (
        dataclasses.replace(SPARSE, num_attention_heads=20, num_query_groups=20, ffn_hidden_size=240,
                            moe=dataclasses.replace(SPARSE.moe, shared_expert_intermediate_size=0)),
        ["tensor_model_parallel_size=20", "sequence_parallel=true"],
        "expert_tensor_parallel_size 20 (tensor_model_parallel_size, as it is not set) does not divide an expert's "
        "48 channels\n"
        "    why: each process takes an equal number of channels of every expert\n"
        "    fix: write expert_tensor_parallel_size: 16",
    ),
    (
        SPARSE,
        ["expert_model_parallel_size=4", "expert_tensor_parallel_size=2", "num_processes=12"],
        "12 processes are not a multiple of the 8 that one replica of the experts takes\n"
        "    why: expert_tensor_parallel_size 2 times expert_model_parallel_size 4 times "
        "pipeline_model_parallel_size 1 is 8\n"
        "    fix: write expert_tensor_parallel_size: 1, or write num_processes: 8 or 16",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2", "gradient_accumulation_steps=2",
         "decoder_first_pipeline_num_layers=5"],
        "decoder_first_pipeline_num_layers 5: 5 layers cannot be divided into 2 virtual stages\n"
        "    why: the parts together must have the model's 12 layers\n"
        "    fix: write decoder_first_pipeline_num_layers: 4",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "decoder_first_pipeline_num_layers=12"],
        "decoder_first_pipeline_num_layers 12: with 12 layers some of 2 parts have none\n"
        "    why: the parts together must have the model's 12 layers\n"
        "    fix: write decoder_first_pipeline_num_layers: 11",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*9|t*5L"],
        "pipeline_model_parallel_layout Et*9|t*5L: it has 14 layers, the model 12\n"
        "    why: the parts together must have the model's 12 layers\n"
        "    fix: write pipeline_model_parallel_layout: Et*7|t*5L",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=15", "account_for_loss_in_pipeline_split=true"],
        "pipeline_model_parallel_size 15: with 12 layers some of 15 parts have none\n"
        "    why: every stage has at least one layer\n"
        "    fix: write pipeline_model_parallel_size: 13, the largest possible",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=14", "virtual_pipeline_model_parallel_size=2",
         "gradient_accumulation_steps=14"],
        "pipeline_model_parallel_size 14: with 12 layers some of 28 parts have none\n"
        "    why: every stage has at least one layer\n"
        "    fix: write pipeline_model_parallel_size: 12, the largest possible, and remove "
        "virtual_pipeline_model_parallel_size",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*12L"],
        "pipeline_model_parallel_layout 'Et*12L' has 1 parts for 2 stages\n"
        "    why: every stage holds one part, or one for each of its virtual stages\n"
        "    fix: write a multiple of 2 parts, or remove pipeline_model_parallel_layout",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=3", "gradient_accumulation_steps=2",
         "pipeline_model_parallel_layout=Et*6|t*6L"],
        "pipeline_model_parallel_layout 'Et*6|t*6L' has 2 parts for 2 stages of 3 virtual stages\n"
        "    why: every stage holds one part, or one for each of its virtual stages\n"
        "    fix: write 6 parts, or remove virtual_pipeline_model_parallel_size",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=3", "gradient_accumulation_steps=2",
         "pipeline_model_parallel_layout=Et*3|t*3|t*3|t*3L"],
        "pipeline_model_parallel_layout 'Et*3|t*3|t*3|t*3L' has 4 parts for 2 stages of 3 virtual stages\n"
        "    why: every stage holds one part, or one for each of its virtual stages\n"
        "    fix: write 6 parts, or virtual_pipeline_model_parallel_size: 2",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=4", "virtual_pipeline_model_parallel_size=2", "gradient_accumulation_steps=4",
         "pipeline_model_parallel_layout=E(tt|)*5ttL"],
        "pipeline_model_parallel_layout 'E(tt|)*5ttL' has 6 parts for 4 stages of 2 virtual stages\n"
        "    why: every stage holds one part, or one for each of its virtual stages\n"
        "    fix: write 8 parts, or pipeline_model_parallel_size: 3",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*6|(t*6L"],
        "pipeline_model_parallel_layout 'Et*6|(t*6L' cannot be read: a parenthesis is not closed, or not followed "
        "by * and a number\n"
        "    fix: write E first, t for each layer, L last, and | between stages: Et*3|t*3L",
    ),
    (
        DENSE,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*3|t*3|t*3|t*3L",
         "gradient_accumulation_steps=3"],
        "gradient_accumulation_steps 3 is not a multiple of pipeline_model_parallel_size 2\n"
        "    why: with virtual stages, micro-batches go through the pipeline in rounds of one for each stage\n"
        "    fix: write gradient_accumulation_steps: 2 or 4",
    ),
    (
        # One of the stages holds the word embedding only.
        DENSE,
        ["pipeline_model_parallel_size=13", "account_for_embedding_in_pipeline_split=true",
         "recompute_granularity=full", "recompute_num_layers=2"],
        "recompute_num_layers 2 does not divide the 1 layers of a stage\n"
        "    why: uniform recomputes layers in groups of that size\n"
        "    fix: write recompute_num_layers: 1, the nearest that does, or recompute_method: block",
    ),
    (
        dataclasses.replace(SPARSE, moe=dataclasses.replace(SPARSE.moe, shared_expert_intermediate_size=48)),
        ["recompute_granularity=selective", "recompute_modules=[shared_experts]", "moe_shared_expert_overlap=true"],
        "recompute_modules has shared_experts with moe_shared_expert_overlap: true\n"
        "    fix: remove shared_experts, or write moe_shared_expert_overlap: false",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "overrides", "message"), WRONG)
def test_what_is_wrong_is_told_with_the_nearest_valid_value(
    architecture: Architecture, overrides: list[str], message: str
) -> None:
    assert messages(architecture, *overrides) == [message]


def test_a_stage_without_a_model_or_with_too_few_layers_is_left_to_other_rules() -> None:
    recomputed = ["recompute_granularity=full", "recompute_num_layers=5"]
    loaded = load(overrides=[*BASE, *recomputed, "pipeline_model_parallel_size=13"])
    assert list(memory.groups_of_layers(Context(loaded.settings, None, None))) == []
    assert list(memory.groups_of_layers(Context(loaded.settings, DENSE, None))) == []


RULES = [*layout.RULES, *pipeline.RULES, *layout.EXPERT_RULES, *memory.RULES]
PATHS = {info.name: info.path for info in all_settings().values()}


def any_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


LAYOUTS = st.fixed_dictionaries(
    {},
    optional={
        "tensor_model_parallel_size": st.integers(1, 24),
        "pipeline_model_parallel_size": st.integers(1, 16),
        "virtual_pipeline_model_parallel_size": st.integers(2, 8),
        "sequence_parallel": st.booleans(),
        "use_distributed_optimizer": st.booleans(),
        "overlap_grad_reduce": st.booleans(),
        "overlap_param_gather": st.booleans(),
        "context_parallel_size": st.integers(1, 8),
        "cp_comm_type": any_of("p2p", "all_gather", "a2a"),
        "expert_model_parallel_size": st.integers(1, 12),
        "expert_tensor_parallel_size": st.integers(1, 30),
        "decoder_first_pipeline_num_layers": st.integers(1, 14),
        "decoder_last_pipeline_num_layers": st.integers(1, 14),
        "account_for_embedding_in_pipeline_split": st.booleans(),
        "account_for_loss_in_pipeline_split": st.booleans(),
        "pipeline_model_parallel_layout": st.lists(st.integers(1, 7), min_size=1, max_size=8).map(
            lambda counts: f"E{'|'.join('t' * count for count in counts)}L"
        ),
        "gradient_accumulation_steps": st.integers(1, 20),
        "cutoff_len": any_of(2, 5, 64),
        "num_processes": st.integers(1, 64),
        "packing": st.booleans(),
        "attention_backend": any_of("auto", "fused"),
        "recompute_granularity": any_of(None, "full", "selective"),
        "recompute_method": any_of(None, "uniform", "block"),
        "recompute_num_layers": st.integers(1, 12),
        "recompute_modules": st.lists(
            any_of("core_attn", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"), min_size=2, unique=True
        ),
        "moe_grouped_gemm": st.booleans(),
        "moe_shared_expert_overlap": st.booleans(),
        "moe_token_dispatcher_type": any_of("alltoall", "allgather"),
        "moe_layer_recompute": st.booleans(),
    },
)


def settings_of(values: dict[str, Any]) -> Settings:
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        group, _, key = PATHS[name].partition(".")
        groups[group][key] = value
    return Settings(**{group: GROUPS[group](**chosen) for group, chosen in groups.items()})


def fixed(values: dict[str, Any], fix: str) -> Iterator[dict[str, Any]]:
    """The settings after each of the ways that a fix offers; a number of parts of a layout is no setting."""
    fix = re.sub(r"(remove \w+): .*", r"\1", fix)  # and why
    for way in re.split(r"(?:,|;)? or (?=remove |write |[a-z_]+: )", fix):
        changed = dict(values)
        for removed in re.findall(r"remove ((?:\w+ and )*\w+)", way):
            for name in removed.split(" and "):
                if name in PATHS:
                    changed.pop(name, None)
                else:
                    changed["recompute_modules"] = [module for module in changed["recompute_modules"] if module != name]
        if kept := re.search(r"keep (\w+)", way):
            kinds = {"decoder", "account", "pipeline"} - {kept[1].partition("_")[0]}
            for name in [name for name in changed if name.partition("_")[0] in kinds and name.endswith(SHAPE_ENDINGS)]:
                changed.pop(name)
        written = re.findall(r"(\w+): ([^\s,]+)(?: or (\d+)(?!\w))?", way)
        if not written and changed != values:
            yield changed
        for choice in (1, 2) if any(other for _, _, other in written) else (1,) if written else ():
            yield {**changed, **{words[0]: read(words[0], words[choice]) for words in written}}


SHAPE_ENDINGS = ("num_layers", "pipeline_split", "parallel_layout")


def read(name: str, text: str) -> Any:
    return coerce(parse(text), all_settings()[PATHS[name]])


@settings(max_examples=400, deadline=None)
@given(values=LAYOUTS, architecture=any_of(DENSE, SPARSE, LATENT))
def test_every_fix_of_a_layout_fixes(values: dict[str, Any], architecture: Architecture) -> None:
    for rule in RULES:
        for problem in rule(Context(settings_of(values), architecture, None)):
            for changed in fixed(values, spell(problem.fix)):
                left = [p for p in rule(Context(settings_of(changed), architecture, None)) if p.paths == problem.paths]
                if "recompute.recompute_modules" in problem.paths:  # one problem for each module
                    left = [other for other in left if other.what == problem.what]
                assert left == [], (problem, changed)
