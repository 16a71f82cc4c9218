"""Rotary embeddings that config.json has stretched."""

from __future__ import annotations

import pytest
from computing import LENGTHS, differences, failures
from layouts import LAYOUTS, SEQUENCE_LAYOUTS, Layout

from megatune.config.load import load
from megatune.config.model import open_changed
from megatune.families import load_architecture, read_config
from megatune.verify.samples import random_samples

# Shorter than the rows of the test. YaRN's factor of cosine and sine is left to be derived.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR, DYNAMIC = ({"rope_type": name, "rope_theta": 10000.0, "factor": 4.0} for name in ("linear", "dynamic"))
FUSED = Layout(1, performance={"apply_rope_fusion": True})

# Two documents of the test are longer than the original context. Heads have 16 channels, of which 12 are turned.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
}
LONG_LAYOUTS = {
    "1": LAYOUTS["1"],
    "tp2 sp, fused": Layout(2, LAYOUTS["tp2 sp"].parallel, performance={"apply_rope_fusion": True}),
    "pp2": LAYOUTS["pp2"],
    "packed": SEQUENCE_LAYOUTS["packed"],
    "cp2": SEQUENCE_LAYOUTS["cp2 p2p"],
    "cp2, packed": SEQUENCE_LAYOUTS["cp2, packed"],
}


@pytest.mark.extended("mixtral")  # experts are not turned
@pytest.mark.covering
@pytest.mark.parametrize("layout", [LAYOUTS["tp2 sp"], FUSED], ids=["tp2 sp", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_yarn_agrees(pool, model_dir, reference, tmp_path, family, layout):
    # As Qwen's README says, config.json keeps the unscaled max_position_embeddings.
    model = model_dir(family, rope_parameters=YARN, max_position_embeddings=16)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, layout, samples, reference(model, samples), tmp_path)
    assert not failures(found)


@pytest.mark.extended("mistral", "qwen3_moe")  # as llama and qwen3
@pytest.mark.covering
@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, DYNAMIC], ids=["llama3", "linear", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_any_scaling_agrees(pool, model_dir, reference, tmp_path, family, rope):
    model = model_dir(family, rope_parameters=rope)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, LAYOUTS["1"], samples, reference(model, samples), tmp_path)
    assert not failures(found)


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_a_scaling_of_the_settings_agrees(pool, model_dir, reference, tmp_path, kind):
    """The longest row has 30 tokens, and the model 16 positions: Transformers loads the config.json of the run."""
    settings = load(None, [f"rope_scaling={kind}", "cutoff_len=30"]).settings
    model = open_changed(settings, str(model_dir("qwen3", max_position_embeddings=16))).fetch()
    rope = read_config(model)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 2.0, 10000.0)
    assert load_architecture(model).max_position_embeddings == 32
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, LAYOUTS["1"], samples, reference(model, samples), tmp_path)
    assert not failures(found)


@pytest.mark.extended(1)  # rows side by side in a micro-batch are harder
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("layout", LONG_LAYOUTS)
def test_longrope_agrees(pool, model_dir, reference, table, tmp_path, layout, micro_batch_size):
    """As Phi-4-mini has it. Long and short documents are in one packed row, or side by side in a micro-batch: each is
    turned as if it were alone."""
    model = model_dir("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    samples, case = random_samples(301, LENGTHS), LONG_LAYOUTS[layout]
    truth = reference(model, samples)
    found = differences(pool, model, case, samples, truth, tmp_path, micro_batch_size=micro_batch_size)
    assert not failures(found)
    if micro_batch_size > 1:
        table.add("phi3, LongRoPE", layout, found)
