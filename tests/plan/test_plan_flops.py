"""Counts against Transformers' models: their elements, and the products that torch counts while they compute."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest
import torch
from model_sizes import model_class
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families import FAMILIES, load_architecture
from megatune.plan.catalogue.models import find_model
from megatune.plan.flops import num_matmul_parameters, num_parameters, train_flops

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@EVERY_FAMILY
def test_parameters_are_the_elements_of_the_checkpoint(model_dir, family, tied):
    folder = model_dir(family, tied=tied)
    architecture = load_architecture(folder)
    carried = FAMILIES[family].carried(architecture)  # an encoder's, where the decoder alone is computed
    tensors = load_file(folder / "model.safetensors").items()
    elements = sum(tensor.numel() for name, tensor in tensors if not any(re.fullmatch(key, name) for key in carried))
    assert num_parameters(architecture) == elements


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@EVERY_FAMILY
def test_operations_are_those_that_transformers_computes(model_dir, monkeypatch, family, tied):
    folder = model_dir(family, tied=tied)
    architecture = load_architecture(folder)
    length = min((12, *filter(None, architecture.windows)))  # windows cut nothing
    if architecture.delta is not None:
        # It is counted token by token, and Transformers computes whole chunks: left out on both sides.
        module = importlib.import_module(model_class(family).from_pretrained(folder).__module__)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", lambda query, key, value, **unused: (value, None))
    # Eager: torch counts matrix products and no fused kernels.
    model = model_class(family).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None], use_cache=False)
    # Rotary embeddings aside: until 5.18 Transformers multiplies positions and frequencies as matrices.
    angles = sum(
        sum(flops.values()) for name, flops in counter.get_flop_counts().items() if name.endswith("rotary_emb")
    )
    matmuls = 2 * num_matmul_parameters(architecture) * length
    # Nothing is left out where the mask is: twice the attention that a causal one needs.
    rest = train_flops(architecture, [length]) / 3 - matmuls
    if (delta := architecture.delta) is not None:
        rule = 8 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
        convolution = 2 * delta.conv_kernel_size * delta.conv_size
        rest -= sum(delta.layers) * length * (rule + convolution)
        angles += sum(delta.layers) * (length + 3) / length * length * convolution  # it computes 3 tokens more
    attention = 2 * rest
    assert counter.get_total_flops() - angles == matmuls + attention


def test_documents_attend_to_themselves(model_dir):
    architecture = load_architecture(model_dir("deepseek_v3"))
    apart, together = train_flops(architecture, [8, 8]), train_flops(architecture, [16])
    channels = 4 * (16 + 8) + 4 * 12  # of all heads' queries, and values
    assert together - apart == 3 * 4 * channels * (16**2 - 2 * 8**2)


def test_windows_leave_out_what_no_query_sees() -> None:
    """Every second layer of gpt-oss has one of 128 tokens: twelve, of which two are among the last four."""
    windowed = find_model("gpt-oss-20b").architecture
    whole = replace(windowed, windows=())
    last = FinetuningSettings(finetuning_type="freeze", freeze_trainable_layers=4)
    unseen = 1000**2 / 2 - (128 * 1000 - 128**2 / 2)  # of the longer document
    for trainable, passes in ((None, 12 * 3), (last, 10 + 2 * 3)):
        saved = train_flops(whole, [100, 1000], trainable) - train_flops(windowed, [100, 1000], trainable)
        assert saved == pytest.approx(passes * 2 * (2 * 64 * 64) * unseen)


def test_frozen_parts_save_what_they_do_not_compute() -> None:
    """A frozen decoder passes gradients on, and one whose last layers are trained ends them before those."""
    architecture = find_model("Qwen2.5-7B").architecture
    lengths = [1000, 24]
    whole, products = train_flops(architecture, lengths), 2 * num_matmul_parameters(architecture) * sum(lengths)
    assert train_flops(architecture, lengths, FinetuningSettings()) == whole
    frozen = FinetuningSettings(freeze_language_model=True)
    assert train_flops(architecture, lengths, frozen) == pytest.approx(whole - products)
    last = FinetuningSettings(finetuning_type="freeze", freeze_trainable_layers=2)
    forward = whole / 3
    of_layers = forward - 2 * architecture.vocab_size * architecture.hidden_size * sum(lengths)
    trained = 2 * of_layers * 2 / architecture.num_layers
    # The frozen output layer, and beyond the forward pass the two layers alone.
    assert train_flops(architecture, lengths, last) == pytest.approx(forward + (forward - of_layers) + trained)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_further_token_takes_one_more_layer_a_projection_and_the_output_layer_again(model_dir, family):
    plain = load_architecture(model_dir(family))
    sparse = replace(plain.moe, layers=(*plain.moe.layers, True))
    longer, length = replace(plain, num_layers=plain.num_layers + 1, moe=sparse), 12
    around = plain.hidden_size * (2 * plain.hidden_size + plain.vocab_size)
    expected = train_flops(longer, [length]) + 3 * 2 * length * around
    assert train_flops(replace(plain, mtp_num_layers=1), [length]) == expected
    more = num_parameters(longer) + plain.hidden_size * (2 * plain.hidden_size + 3)
    assert num_parameters(replace(plain, mtp_num_layers=1)) == more
