"""What a plan says of a base in few bits; tests/parity holds it against what ranks hold."""

from __future__ import annotations

import pytest
from activation_cases import DENSE, EVEN, LATENT, SHARED, SPARSE, Measured
from layouts import Layout
from measured_memory import measure_step
from test_plan_activations import predicted
from test_plan_lora import LLAMA_3_8B, LORA, planned

from megatune.plan.memory.parameters import StateConfig, stage_state

QUANTIZED = LORA.model_copy(update={"quantization_bit": 4})
# Of each layer: q and o, k and v, gate and up and down.
MATRICES = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
ROWS = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, MATRICES // 2 + MATRICES // 64 + 4 * ROWS + 8 * MATRICES // (64 * 256)),
        ({"double_quantization": False}, MATRICES // 2 + 4 * MATRICES // 64),
        ({"quantization_bit": 8}, MATRICES + 4 * ROWS),
    ],
)
def test_matrices_of_layers_take_as_many_bytes_as_they_have(keys, expected):
    few = stage_state(StateConfig.of(planned(LLAMA_3_8B, Layout(1), QUANTIZED.model_copy(update=keys))), 0)
    full = stage_state(StateConfig.of(planned(LLAMA_3_8B, Layout(1), LORA)), 0)
    assert full.weights - few.weights == 2 * MATRICES - expected
    assert few._replace(weights=full.weights) == full


def test_tensor_parallelism_cuts_them():
    layout = Layout(2, {"tensor_model_parallel_size": 2})
    few, full = (stage_state(StateConfig.of(planned(LLAMA_3_8B, layout, keys)), 0) for keys in (QUANTIZED, LORA))
    # Statistics are kept whole; those of the output projections and down, all rows.
    rows = (ROWS - 32 * 2 * 4096) // 2 + 32 * 2 * 4096
    expected = MATRICES // 4 + MATRICES // 128 + 4 * rows + 8 * MATRICES // (64 * 256)
    assert full.weights - few.weights == MATRICES - expected


@pytest.mark.covering
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("architecture", "layout", "bf16"),
    [
        (DENSE, Layout(1), False),
        (DENSE, Layout(1), True),
        (DENSE, Layout(1, recompute={"recompute_granularity": "full"}), True),
        (SPARSE, Layout(1, experts=EVEN), True),
        (SHARED, Layout(1, experts=EVEN), False),
        (LATENT, Layout(1), True),
    ],
)
def test_predicted_activations_are_those_that_are_measured(pool, architecture, layout, bf16, bits):
    trainable = LORA.model_copy(update={"quantization_bit": bits})
    # Short rows: most of the memory is that of matrices which are made.
    one = Measured("model", architecture, layout, bf16=bf16, length=32, trainable=trainable)
    (measured,) = pool.run(1, measure_step, one.architecture, one.settings, one.trainable, one.images)
    assert abs(predicted(one, 0) / measured - 1) <= 0.05
