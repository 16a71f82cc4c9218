"""Families that take an option of a layer or a name in files, but no mixer of their own: logits, loss and gradients
against Transformers, where their weights are cut."""

from __future__ import annotations

import pytest
from computing import LENGTHS, MORE_LENGTHS, differences, failures, measure_in_layout, parameter_names, together
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, SEQUENCE_LAYOUTS
from mxfp4_kit import as_published

from megatune.verify.results import Results, check_errors, compare
from megatune.verify.samples import random_samples

TWO_ROWS = LENGTHS[2:]  # layouts are proved with other families, in more micro-batches
ALL = {**LAYOUTS, **MORE_LAYOUTS, **SEQUENCE_LAYOUTS, **EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}
DENSE = (
    "mistral",
    "ministral3",
    "seed_oss",
    "granite",
    "smollm3",
    "phi3",
    "gemma3_text",
    "olmo3",
    "qwen3_5_text",
    "glm",
    "glm4",
    "olmo2",
    "ernie4_5",
    "exaone4",
)
SPARSE = (
    "deepseek_v2",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "ernie4_5_moe",
    "minimax_m2",
    "qwen3_5_moe_text",
    "gpt_oss",
    "kimi_k2",
    "olmoe",
    "dots1",
)
CASES = [
    *((family, layout) for family in (*DENSE, *SPARSE) for layout in ("1", "tp2 sp", "pp2", "packed")),
    *((family, layout) for family in SPARSE for layout in ("ep2 etp1 tp2 sp", "ep2 pp2")),
    # Without sequence parallelism, and with fewer keys than ranks.
    *(("olmo3", layout) for layout in ("tp2", "tp4 sp")),
    # Layers without a window have no rotary embedding.
    ("exaone4", "cp2, packed"),
    # Queries grow by their positions in the document, whoever holds them.
    ("ministral3", "cp2, packed"),
    # Sinks, and biases that are added once, where heads, experts and sequences are cut.
    *(("gpt_oss", layout) for layout in ("tp4 sp", "ep2 etp2 tp2 sp", "cp2 p2p", "cp2 a2a", "cp2 ep2, packed")),
]

# With experts, and where layers without a window have values of their own.
GEMMA4 = [
    *(("experts", layout) for layout in ("1", "tp2 sp", "pp2", "packed", "ep2 etp1 tp2 sp", "ep2 pp2", "cp2 tp2 sp")),
    *(("values", layout) for layout in ("1", "tp2 sp")),
    *(
        ("keys", layout)
        for layout in ("1", "tp2", "tp2 sp", "tp4 sp", "pp2", "packed", "cp2 p2p", "cp2 a2a", "cp2, packed")
    ),
]
# Every layer of these has one in some files, and a layer of gemma3_text.
WINDOWS = [
    *((family, layout) for family in ("mistral", "phi3") for layout in ("1", "packed")),
    *(("gemma3_text", layout) for layout in ("cp2 p2p", "cp2 a2a", "cp2 tp2 sp", "cp2, packed")),
]


@pytest.mark.extended("ep2 etp2 tp2 sp")  # the same model in MXFP4 has it below
@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_family_agrees(pool, model_dir, reference, table, tmp_path, family, layout):
    model = model_dir(family)
    samples = random_samples(301, TWO_ROWS)
    found = differences(pool, model, ALL[layout], samples, reference(model, samples), tmp_path)
    # As many gradients as the checkpoint has trained tensors: none is left out.
    assert len(found) - 3 == len(parameter_names(model))
    assert not failures(found)
    table.add(f"{family}, untied", layout, found)


@pytest.mark.covering
@pytest.mark.parametrize(("kind", "layout"), GEMMA4)
def test_heads_of_two_sizes_agree(pool, model_dir, reference, table, tmp_path, kind, layout):
    family = "gemma4_text" + "_moe" * kind.endswith("experts")
    model = model_dir(family, attention_k_eq_v=kind != "values")
    samples = random_samples(300, TWO_ROWS)
    found = differences(pool, model, ALL[layout], samples, reference(model, samples), tmp_path)
    names = parameter_names(model)  # gates and ups are one tensor there, and two here
    assert len(found) - 3 == len(names) + sum(".gate_up_proj" in name for name in names)
    assert not failures(found)
    table.add(f"{family.removesuffix('_moe')}, {kind}", layout, found)


@pytest.mark.extended("cp2 tp2 sp")  # gpt_oss and gemma4_text have windows where sequences are cut, too
@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout"), WINDOWS)
def test_windows_agree(pool, model_dir, reference, table, tmp_path, family, layout):
    """Rows are longer than a window. With p2p, layers with one gather keys and values."""
    model = model_dir(family, sliding_window=6)
    samples = random_samples(301, TWO_ROWS)
    found = differences(pool, model, ALL[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add(f"{family}, windows", layout, found)


def test_a_model_in_mxfp4_agrees(pool, model_dir, reference, table, tmp_path):
    """Experts' matrices are dequantized by both sides, and cut here."""
    model = as_published(model_dir("gpt_oss"), tmp_path / "model")
    samples, layout = random_samples(301, TWO_ROWS), "ep2 etp2 tp2 sp"
    found = differences(pool, model, ALL[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add("gpt_oss, MXFP4", layout, found)


# Every token goes to all experts. Of two experts of eight, Transformers' own logits are 60 to 80 % off in bf16, as
# tokens go to others: a ratio says nothing.
@pytest.mark.extended("ep2 etp2 tp2 sp")  # in fp32 above; tests/parity/test_vision.py adds up parts of ranks in bf16
@pytest.mark.parametrize("layout", ["1", "ep2 etp2 tp2 sp"])
def test_bf16_rounds_no_worse_than_transformers(pool, model_dir, reference, table, tmp_path, layout):
    """As the proof of text models, tests/parity/test_parity.py, in several batches."""
    model, settings = model_dir("gpt_oss", num_experts_per_tok=8), ALL[layout].settings(precision={"bf16": True})
    ours, stock = [], []
    for seed in range(4):
        samples, folder = random_samples(301, MORE_LENGTHS, seed), tmp_path / str(seed)
        folder.mkdir()
        pool.run(ALL[layout].world_size, measure_in_layout, model, settings, samples, folder)
        truth = reference(model, samples, "bfloat16")
        ours.append(compare(Results(folder), truth, experts_together=True))
        stock.append(compare(reference(model, samples, "bfloat16", "bfloat16"), truth, experts_together=True))
    found = check_errors(together(ours), together(stock))
    assert not failures(found)
    table.add_sixteen_bits("gpt_oss, all experts", layout, found)
