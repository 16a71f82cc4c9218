"""Small models of every family: rules and layouts hold for them as for the real ones."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some
from transformers import AutoConfig

from megatune.config.pipeline import pipeline_chunks
from megatune.config.rules import check as check_rules
from megatune.config.rules import layout, memory, pipeline
from megatune.config.settings import ParallelSettings, Settings
from megatune.families import FAMILIES, read_architecture
from megatune.plan.catalogue.models import model_config
from megatune.rehearse.model import RealModel, shrink
from megatune.rehearse.run import _environment
from megatune.rehearse.settings import MOST_PROCESSES, other_layout, rehearsal_world_size, shrink_settings

REAL = {
    "llama": "Llama-3.1-8B",
    "qwen2": "Qwen2.5-7B",
    "qwen3": "Qwen3-8B",
    "mixtral": "Mixtral-8x7B",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B",
    "qwen3_moe": "Qwen3-30B-A3B",
    "deepseek_v3": "DeepSeek-V3",
    "qwen2_vl": "Qwen2-VL-7B",
    "qwen2_5_vl": "Qwen2.5-VL-7B",
    "qwen3_vl": "Qwen3-VL-8B",
    "qwen3_vl_moe": "Qwen3-VL-8B",  # with the decoder of Qwen3-30B-A3B
}
# The catalogue has none of these yet: their sizes are the defaults of Transformers' classes.
REAL = {**dict.fromkeys(FAMILIES, ""), **REAL}
RULES = (*layout.RULES, *pipeline.RULES, *layout.EXPERT_RULES, *memory.RULES)


def real_model(family: str, **changes: Any) -> RealModel:
    config, where = model_config(REAL[family], asks_hub=False) if REAL[family] else (default_config(family), "")
    if family == "qwen3_vl_moe":
        experts, _ = model_config(REAL["qwen3_moe"], asks_hub=False)
        text = {**config["text_config"], **experts, "model_type": "qwen3_vl_moe_text"}
        vision = {**config["vision_config"], "out_hidden_size": text["hidden_size"]}
        config = {**config, "model_type": family, "text_config": text, "vision_config": vision}
    # The published models, unlike the defaults of Transformers' classes, have these biases, and not this head.
    published = {"internvl": {"attention_bias": True}, "gemma3": {"vision_use_head": False}}
    if family in published:
        config = {**config, "vision_config": {**config["vision_config"], **published[family]}}
    config = {**config, **changes}
    return RealModel(family, config, where, read_architecture(config, where))


@cache
def default_config(family: str) -> dict[str, Any]:
    config: dict[str, Any] = AutoConfig.for_model(family).to_dict()
    # Transformers has no number of chosen experts where nothing is said.
    config |= {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    if family == "dots1":  # nor numbers of experts; as dots.llm1
        config |= {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "norm_topk_prob": True}
    if family == "phi3":  # a factor for each of 36 pairs of channels, as Phi-4-mini has
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
        config["rope_parameters"] = rope | {"short_factor": [1.0] * 36, "long_factor": [2.0] * 36}
    if family.startswith("gemma4"):  # as 31B, which shares no keys and has no embeddings of each layer
        (config if family == "gemma4_text" else config["text_config"]).update(
            hidden_size_per_layer_input=0, num_kv_shared_layers=0
        )
    if family == "gemma4":
        config["vision_config"] = AutoConfig.for_model("gemma4_vision").to_dict()
    if config.get("vision_config"):  # nor encoders and decoders that fit
        config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    return json.loads(json.dumps(config))


def valid(parallel: ParallelSettings, real: RealModel, world: int) -> bool:
    return not check_rules(settings_of(parallel), real.architecture, world, rules=RULES)


def settings_of(parallel: ParallelSettings) -> Settings:
    before = Settings()
    batch = before.batch.model_copy(update={"gradient_accumulation_steps": 16 * parallel.pipeline_model_parallel_size})
    return before.model_copy(update={"parallel": parallel, "batch": batch})


_sizes = some.sampled_from([1, 2, 4, 8])
_layouts = some.fixed_dictionaries(
    {
        "tensor_model_parallel_size": _sizes,
        "pipeline_model_parallel_size": some.sampled_from([1, 2, 3, 4, 7, 8]),
        "virtual_pipeline_model_parallel_size": some.sampled_from([None, None, 2, 3]),
        "context_parallel_size": some.sampled_from([1, 1, 2, 4]),
        "cp_comm_type": some.sampled_from(["p2p", "a2a"]),
        "expert_model_parallel_size": some.sampled_from([1, 2, 3, 4, 8, 16]),
        "expert_tensor_parallel_size": some.sampled_from([None, 1, 2]),
        "account_for_embedding_in_pipeline_split": some.booleans(),
        "account_for_loss_in_pipeline_split": some.booleans(),
    }
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@pytest.mark.parametrize("family", REAL)
@given(values=_layouts)
def test_a_layout_that_splits_the_real_model_splits_the_small_one(family: str, values: dict[str, Any]) -> None:
    hold_small_model(family, values)


@pytest.mark.extended
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("family", REAL)
@given(values=_layouts)
def test_many_layouts_split_small_models(family: str, values: dict[str, Any]) -> None:
    hold_small_model(family, values)


def hold_small_model(family: str, values: dict[str, Any]) -> None:
    """A small model keeps the rules of a layout that the real one keeps, and what sets the real one apart."""
    real = real_model(family)
    if real.architecture.moe is None:
        values |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    pp = values["pipeline_model_parallel_size"]
    if pp == 1:
        values |= dict.fromkeys(values.keys() & {key for key in values if key.startswith("account")}, False)
        values["virtual_pipeline_model_parallel_size"] = None
    parallel = ParallelSettings(**values, sequence_parallel=values["tensor_model_parallel_size"] > 1)
    world = 2 * parallel.smallest_world
    assume(valid(parallel, real, world))
    small = shrink(real, parallel)
    changed, _ = shrink_settings(settings_of(parallel), small.architecture, small.layout, "model", "out")
    rehearsed = rehearsal_world_size(parallel, world)
    assert not check_rules(changed, small.architecture, rehearsed, rules=RULES)
    assert rehearsed > parallel.model_parallel_size or 2 * parallel.smallest_world > MOST_PROCESSES
    before, now = real.architecture, small.architecture
    assert now.num_layers <= max(4 * pp * (parallel.virtual_stages or 1), 4)
    for kind in ("moe", "mla", "vision", "mrope", "rope_scaling"):
        assert (getattr(before, kind) is None) == (getattr(now, kind) is None)
    for name in ("add_qkv_bias", "qk_layernorm", "tie_word_embeddings", "model_type", "max_position_embeddings"):
        assert getattr(before, name) == getattr(now, name)
    assert (before.num_query_groups < before.num_attention_heads) == (now.num_query_groups < now.num_attention_heads)
    assert (before.num_query_groups < parallel.tensor_model_parallel_size) == (
        now.num_query_groups < parallel.tensor_model_parallel_size
    )
    if before.moe is not None and now.moe is not None:
        assert set(before.moe.layers) == set(now.moe.layers)
        assert (
            now.moe.num_experts >= 2 * parallel.expert_model_parallel_size
            or now.moe.num_experts == before.moe.num_experts
        )
        assert (before.moe.num_groups > 1) == (now.moe.num_groups > 1)
        assert bool(before.moe.shared_expert_intermediate_size) == bool(now.moe.shared_expert_intermediate_size)


@pytest.mark.parametrize(
    ("layout_keys", "real_counts", "small_counts"),
    [
        ({"decoder_first_pipeline_num_layers": 7, "decoder_last_pipeline_num_layers": 9}, [7, 10, 10, 9], [1, 2, 2, 1]),
        ({"decoder_first_pipeline_num_layers": 6}, [6, 10, 10, 10], [1, 2, 2, 2]),
        ({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
         [9, 10, 9, 8], [1, 2, 2, 1]),
        ({"pipeline_model_parallel_layout": "Et*8|t*10|t*10|t*8L"}, [8, 10, 10, 8], [1, 2, 2, 1]),
        ({}, [9, 9, 9, 9], [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_unequal_stages_stay_unequal(
    layout_keys: dict[str, Any], real_counts: list[int], small_counts: list[int]
) -> None:
    parallel = ParallelSettings(pipeline_model_parallel_size=4, **layout_keys)
    real = real_model("qwen3")
    assert [chunk.num_layers for chunk in pipeline_chunks(parallel, 36)] == real_counts
    small = shrink(real, parallel)
    chunks = pipeline_chunks(parallel.model_copy(update=small.layout), small.architecture.num_layers)
    assert [chunk.num_layers for chunk in chunks] == small_counts


def test_the_first_part_has_the_layers_that_deepstack_feeds() -> None:
    parallel = ParallelSettings(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    small = shrink(real_model("qwen3_vl"), parallel)
    assert small.architecture.vision is not None
    assert small.architecture.vision.num_deepstack_mergers == 2
    assert small.architecture.num_layers == 8


def test_dense_layers_stay_among_sparse_ones() -> None:
    named = shrink(real_model("qwen3_moe", mlp_only_layers=[3, 20]), ParallelSettings())
    assert named.architecture.moe is not None
    assert set(named.architecture.moe.layers) == {True, False}
    stepped = shrink(real_model("qwen3_moe", decoder_sparse_step=3), ParallelSettings())
    assert stepped.architecture.moe is not None
    assert stepped.architecture.moe.layers == (False, False, True)


@pytest.mark.parametrize(
    ("sizes", "world", "rehearsed"),
    [
        ({"tensor_model_parallel_size": 4}, 32, 8),
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, 8, 8),
        ({"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2}, 8, 8),
        ({"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2}, 64, 16),
        ({"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}, 64, 32),
        ({"expert_model_parallel_size": 8}, 8, 8),
        ({}, 1, 1),
    ],
)
def test_copies_are_two_where_there_are_some(sizes: dict[str, int], world: int, rehearsed: int) -> None:
    assert rehearsal_world_size(ParallelSettings(**sizes), world) == rehearsed


@pytest.mark.parametrize("family", REAL)
def test_another_layout_trains_the_same_rows(family: str) -> None:
    real = real_model(family)
    parallel = ParallelSettings(tensor_model_parallel_size=2, sequence_parallel=True)
    small = shrink(real, parallel)
    values = Settings.model_validate(
        {
            "parallel": parallel,
            "batch": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
            "data": {"dataset": ["x"], "cutoff_len": 64},
            "run": {"output_dir": "out"},
            "model": {"model_name_or_path": "model"},
        }
    )
    found = other_layout(values, 4, small.architecture)
    assert found is not None
    changed, world = found
    assert changed.parallel.sizes(world) != parallel.sizes(4)
    replicas = world // changed.parallel.model_parallel_size
    assert changed.batch.gradient_accumulation_steps * replicas == 4


def test_ranks_are_processes_of_the_cpu_also_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with _environment(tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
