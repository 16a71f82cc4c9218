"""Weight maps: against Transformers, and every element of every tensor in the slice of exactly one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_sizes import model_class

from megatune.architecture import Architecture, MixtureOfExperts, MultiLatentAttention
from megatune.encoders import Vision, VisionLayers
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.forms import find_form
from megatune.families.table import Box, rows_of
from megatune.families.weights import (
    Slice,
    TensorLayout,
    Weight,
    by_expert,
    engine_shape,
    hf_shapes,
    layers_of,
    padded_vocab_size,
)

# Members of the families whose maps differ from the usual ones.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen2_moe without biases": ("qwen2_moe", {"qkv_bias": False}),
    "deepseek_v3 without a query latent": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3, sparse only": ("deepseek_v3", {"first_k_dense_replace": 0}),
    "deepseek_v3, dense only": ("deepseek_v3", {"first_k_dense_replace": 4}),
}


def trained_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    return {
        name: shape
        for weight in FAMILIES[architecture.model_type].weight_map(architecture)
        if not weight.is_buffer
        for layer in layers_of(weight, architecture)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_map_names_what_transformers_saves(model_dir, variant, tied):
    """Names and shapes of all tensors, no more and no fewer."""
    from safetensors import safe_open

    family, sizes = VARIANTS[variant]
    folder = model_dir(family, tied=tied, **sizes)
    with safe_open(folder / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    architecture, version = load_architecture(folder), str(read_config(folder)["transformers_version"])
    weights = FAMILIES[family].weight_map(architecture)
    form = find_form(FAMILIES[family].forms, weights, architecture, saved, saved.__getitem__, version)
    assert form.all_shapes(weights, architecture) == saved


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_transformers_parameters(model_dir, variant):
    """What is declared to be trained is all that Transformers would train."""
    family, sizes = VARIANTS[variant]
    folder = model_dir(family, **sizes)
    trained = trained_shapes(load_architecture(folder)).values()
    named = model_class(family).from_pretrained(folder).named_parameters()
    # Transformers loads ERNIE's bias as a parameter, which no gradient reaches.
    theirs = [each.numel() for name, each in named if not name.endswith("e_score_correction_bias")]
    assert sum(element_count(shape) for shape in trained) == sum(theirs)


def element_count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@st.composite
def encoders(draw: st.DrawFn) -> Vision:
    sizes = {
        name: draw(st.integers(1, 6))
        for name in ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size",
                     "spatial_merge_size", "temporal_patch_size", "num_position_embeddings")
    }  # fmt: skip
    sizes["hidden_size"] *= sizes["num_heads"]  # a head has channels
    layers = VisionLayers(norm_epsilon=1e-6, num_positions=draw(st.integers(1, 6)))
    return Vision(**sizes, layers=layers, deepstack_visual_indexes=tuple(range(draw(st.integers(0, 3)))))


@st.composite
def architectures(draw: st.DrawFn) -> tuple[Architecture, Slice, Slice]:
    """A decoder, the ranks that its dense weights and its experts are cut over."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    groups = draw(st.sampled_from([n for n in range(1, 13) if n % tp_size == 0 or tp_size % n == 0]))
    # Both the key/value heads and tp divide the query heads.
    heads = groups * tp_size * draw(st.integers(1, 2))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    architecture = Architecture(
        model_type=family,
        num_layers=2,
        hidden_size=draw(st.integers(1, 40)),
        ffn_hidden_size=tp_size * draw(st.integers(1, 20)),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=2 * draw(st.integers(1, 9)) * tp_size,
        vocab_size=draw(st.integers(1, 700)),
        max_position_embeddings=16,
        norm_epsilon=1e-6,
        rotary_base=1e4,
        add_qkv_bias=family in ("qwen2", "qwen2_moe"),
        qk_layernorm=family in ("qwen3", "qwen3_moe"),
        tie_word_embeddings=draw(st.booleans()),
        vision=draw(encoders()) if FAMILIES[family].vision else None,
    )
    weights = FAMILIES[family].weights
    if not any(weight.per_expert for weight in weights):
        return architecture, Slice(tp_size), Slice()
    ep_size, etp_size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    moe = MixtureOfExperts(
        layers=(draw(st.booleans()), True),
        num_experts=ep_size * draw(st.integers(1, 4)),
        router_topk=1,
        moe_ffn_hidden_size=etp_size * draw(st.integers(1, 9)),
        shared_expert_intermediate_size=tp_size * draw(st.integers(1, 9)),
        expert_bias=any(weight.is_buffer for weight in weights),
    )
    latent = MultiLatentAttention(
        q_lora_rank=draw(st.one_of(st.none(), st.integers(1, 9))),
        kv_lora_rank=draw(st.integers(1, 9)),
        qk_head_dim=draw(st.integers(1, 9)),
        qk_pos_emb_head_dim=2,
        v_head_dim=draw(st.integers(1, 9)),
        softmax_scale=1.0,
    )
    is_latent = any("kv_layernorm" in weight.engine for weight in weights)
    architecture = replace(architecture, moe=moe, mla=latent if is_latent else None)
    return architecture, Slice(tp_size), Slice(etp_size, 0, ep_size, 0)


def all_slices(cut: Slice) -> list[Slice]:
    return [
        replace(cut, tp_rank=tp_rank, ep_rank=ep_rank)
        for ep_rank in range(cut.ep_size)
        for tp_rank in range(cut.tp_size)
    ]


@given(architectures())
def test_rows_cover_every_element_exactly_once(case):
    architecture, dense_cut, expert_cut = case
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        for layer in layers_of(weight, architecture):
            shapes = hf_shapes(weight, architecture, layer)
            covered: Counter[tuple[str, int, int]] = Counter()
            cut = expert_cut if weight.per_expert else dense_cut
            for part in all_slices(cut):
                size = add_covered(covered, weight, architecture, part, layer)
                # Padding of the vocabulary is in no row; everything else is full.
                room = element_count(engine_shape(weight, architecture, part))
                assert size <= room if weight.layout is TensorLayout.VOCABULARY else size == room
            copies = cut.tp_size if weight.layout is TensorLayout.REPLICATED else 1
            dim = 1 if weight.layout is TensorLayout.COLUMNS else 0
            assert covered == {(name, dim, i): copies for name, shape in shapes.items() for i in range(shape[dim])}


def add_covered(
    covered: Counter[tuple[str, int, int]],
    weight: Weight,
    architecture: Architecture,
    part: Slice,
    layer: int,
) -> int:
    """Count the rows or columns of one slice, and return how many elements they hold."""
    size = 0
    dim = 1 if weight.layout is TensorLayout.COLUMNS else 0
    for row in rows_of(weight, architecture, part, layer):
        assert row.start == size
        cut = row.box.slices[dim]
        covered.update((row.name, dim, i) for i in range(cut.start, cut.stop))
        size += row.box.numel
    return size


@given(architectures())
def test_a_slice_is_its_experts_one_after_the_other(case):
    """What is written expert by expert is what is loaded as one tensor."""
    architecture, _, expert_cut = case
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        for part in all_slices(expert_cut) if weight.per_expert else [Slice()]:
            pieces = by_expert(weight, architecture, part)
            whole = [row[:-1] for row in rows_of(weight, architecture, part)]
            assert [row[:-1] for piece in pieces for row in rows_of(weight, architecture, piece)] == whole
            names = [name for piece in pieces for name in hf_shapes(weight, architecture, 0, piece)]
            assert names == list(hf_shapes(weight, architecture, 0, part))


def test_an_experts_slice_is_its_gate_rows_then_its_up_rows(model_dir):
    """Expert parallelism shards experts in blocks; expert tensor parallelism cuts each of them."""
    architecture = load_architecture(model_dir("mixtral"))  # 4 experts of 96 channels
    weights = {weight.engine.rpartition(".")[2]: weight for weight in FAMILIES["mixtral"].weights if weight.per_expert}
    part = Slice(tp_size=2, tp_rank=1, ep_size=2, ep_rank=1)
    assert engine_shape(weights["weight1"], architecture, part) == (2, 96, 64)
    assert engine_shape(weights["weight2"], architecture, part) == (2, 64, 48)
    expert = "model.layers.3.block_sparse_moe.experts"
    rows = Box(48, 96, 0, 64)
    assert [(row.name, row.box) for row in rows_of(weights["weight1"], architecture, part, 3)] == [
        (f"{expert}.2.w1.weight", rows),
        (f"{expert}.2.w3.weight", rows),
        (f"{expert}.3.w1.weight", rows),
        (f"{expert}.3.w3.weight", rows),
    ]
    assert [(row.name, row.box) for row in rows_of(weights["weight2"], architecture, part, 3)] == [
        (f"{expert}.2.w2.weight", rows.transposed()),
        (f"{expert}.3.w2.weight", rows.transposed()),
    ]


@given(vocab_size=st.integers(1, 300_000), tp_size=st.integers(1, 64))
def test_padded_vocabulary_is_equal_on_every_rank(vocab_size, tp_size):
    padded = padded_vocab_size(vocab_size, tp_size)
    assert padded >= vocab_size
    assert padded % tp_size == 0
    assert padded - vocab_size < 128 * tp_size
    assert padded % 128 == 0
