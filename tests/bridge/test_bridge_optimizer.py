"""The optimizer's state, saved in one layout and loaded in another."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridging import move, resave_all
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_LAYOUTS
from safetensors import safe_open

from megatune.errors import ExitCode, MegatuneError

ALL = {**LAYOUTS, **MORE_LAYOUTS}
KINDS_OF_MUON = ("momentum_buffer", "exp_avg", "exp_avg_sq")


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tp2 pp2 dp2 sp", "1"),
        ("1", "tp2 pp2 dp2 sp"),
        ("dp2", "tp2 pp2 vpp2"),
        ("dp2, no distributed optimizer", "dp4"),
        ("tp4 sp", "dp2, no distributed optimizer"),
    ],
)
def test_state_moves_between_layouts_bit_for_bit(pool, model_dir, tmp_path, one, other, precision):
    settings = {"precision": {} if precision == "fp32" else {precision: True}}
    model = model_dir("qwen3", tied=True)
    saved, moved = move(pool, model, ALL[one], ALL[other], tmp_path, **settings)
    kinds = {name.partition("/")[0] for name in saved}
    # Master weights of an fp32 model are the model.
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"main"} if precision == "bf16" else set())
    with safe_open(model / "model.safetensors", "pt") as file:
        assert {name.partition("/")[2] for name in saved} == set(file.keys())
    assert saved.keys() == moved.keys()
    assert not [name for name, tensor in saved.items() if tensor.numpy().tobytes() != moved[name].numpy().tobytes()]
    assert all(tensor.abs().max() > 0 for tensor in saved.values())


def test_momentum_moves(pool, model_dir, tmp_path):
    sgd = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}}
    saved, moved = move(pool, model_dir("qwen2"), ALL["dp2"], ALL["tp2"], tmp_path, **sgd)
    assert {name.partition("/")[0] for name in saved} == {"momentum_buffer"}
    assert not [name for name, tensor in saved.items() if tensor.numpy().tobytes() != moved[name].numpy().tobytes()]


def test_state_of_muon_moves(pool, model_dir, tmp_path):
    model = model_dir("qwen3_moe")
    muon = {"optimizer": {"optimizer": "muon"}}
    saved, moved = move(pool, model, EXPERT_LAYOUTS["ep2 etp1 tp2 sp"], ALL["dp2"], tmp_path, **muon)
    names = {kind: {name.partition("/")[2] for name in saved if name.startswith(f"{kind}/")} for kind in KINDS_OF_MUON}
    with safe_open(model / "model.safetensors", "pt") as file:
        assert names["momentum_buffer"] | names["exp_avg"] == set(file.keys())
    assert names["exp_avg"] == names["exp_avg_sq"]
    assert not names["momentum_buffer"] & names["exp_avg"]
    others = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    assert names["exp_avg"] == {name for name in names["exp_avg"] | names["momentum_buffer"] if name.endswith(others)}
    assert saved.keys() == moved.keys()
    assert not [name for name, tensor in saved.items() if tensor.numpy().tobytes() != moved[name].numpy().tobytes()]


def load_with_sgd(checkpoint: Path) -> tuple[str, int]:
    try:
        resave_all(checkpoint, ALL["1"].settings(optimizer={"optimizer": "sgd"}), checkpoint)
    except MegatuneError as error:
        return str(error), error.exit_code
    return "", 0


def test_state_of_another_optimizer_is_refused(pool, model_dir, tmp_path):
    move(pool, model_dir("qwen2"), ALL["1"], ALL["1"], tmp_path)
    text, code = pool.run(1, load_with_sgd, tmp_path / "one")[0]
    assert code == ExitCode.INPUT
    assert "has exp_avg, exp_avg_sq, but this run's optimizer needs momentum_buffer" in text
