"""What the reference hands out is Transformers' own, under the names of checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from megatune.families import FAMILIES
from megatune.verify.reference import checkpoint_tensors, load_reference_model, write_reference
from megatune.verify.results import Results
from megatune.verify.samples import random_samples


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_come_back_as_the_checkpoint_has_them(model_dir, family):
    folder = model_dir(family)
    model = load_reference_model(folder, torch.float32)
    # ERNIE's bias is a parameter there, which no gradient reaches.
    named = ((name, each) for name, each in model.named_parameters() if not name.endswith("e_score_correction_bias"))
    trained = {name: parameter.detach() for name, parameter in named}
    found = checkpoint_tensors(model, trained)
    saved = load_file(folder / "model.safetensors")
    buffers = ("e_score_correction_bias", ".mlp.expert_bias", ".layer_scalar", ".std_bias", ".std_scale")
    expected = {name: tensor for name, tensor in saved.items() if not name.endswith(buffers)}
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def test_gradients_of_experts_are_those_of_the_tensor_that_holds_them_all(model_dir, tmp_path):
    folder = model_dir("qwen3_moe")
    samples = random_samples(301, [12])
    write_reference(folder, samples, tmp_path)
    numbers = Results(tmp_path)

    model = load_reference_model(folder, torch.float32)
    labels = torch.tensor([samples[0].labels])
    model(input_ids=torch.tensor([samples[0].input_ids]), labels=labels).loss.backward()
    experts = model.model.layers[1].mlp.experts
    for expert in range(8):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up = experts.gate_up_proj.grad[expert].chunk(2)
        for part, expected in (("gate", gate), ("up", up), ("down", experts.down_proj.grad[expert])):
            torch.testing.assert_close(numbers.gradient(f"{prefix}.{part}_proj.weight"), expected)


def test_sixteen_bits_are_computed_as_transformers_does(model_dir, tmp_path):
    """Rotary frequencies and the router's bias stay in fp32 there."""
    folder = model_dir("deepseek_v3")
    samples = random_samples(301, [40])
    write_reference(folder, samples, tmp_path, weights_dtype=torch.bfloat16, dtype=torch.bfloat16)
    model = load_reference_model(folder, torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([samples[0].input_ids])).logits[0]
    assert torch.equal(Results(tmp_path).logits(0), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl"])
def test_a_gpu_computes_what_the_cpu_computes(model_dir, tmp_path, monkeypatch, family):
    folder = model_dir(family)
    samples = random_samples(301, [40])
    write_reference(folder, samples, tmp_path / "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_reference(folder, samples, tmp_path / "cpu")
    found, expected = Results(tmp_path / "gpu"), Results(tmp_path / "cpu")
    assert abs(found.loss - expected.loss) <= 1e-6 * expected.loss
    assert (found.logits(0) - expected.logits(0)).abs().max() <= 1e-4 * expected.logits(0).abs().max()


def test_the_reference_is_computed_without_the_engine():
    listing = "import sys, megatune.verify.reference; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout
    modules = loaded.splitlines()
    assert "megatune.verify.reference" in modules
    assert not [name for name in modules if name.startswith(("megatron", "megatune.engine"))]


def test_an_output_layer_that_only_a_default_ties_has_a_gradient(model_dir, tmp_path):
    """As Mistral Small 3.1 is published: config.json says nothing, and Transformers' default is tied."""
    model = tmp_path / "model"
    shutil.copytree(model_dir("mistral3"), model)
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    fp32 = {"weights_dtype": torch.float32, "dtype": torch.float32}
    write_reference(model, random_samples(296, [5]), tmp_path / "numbers", **fp32)
    assert "lm_head.weight" in Results(tmp_path / "numbers").names
