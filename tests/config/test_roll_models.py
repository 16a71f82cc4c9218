"""What a file of ROLL's says that does not fit the models that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_model_defaults import SPARSE
from test_roll import SMALL

from megatune.architecture import DeltaNet
from megatune.config.dialects.roll import read_roll


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SMALL, encoding="utf-8")


def test_a_model_without_experts_has_none_to_replay():
    word = "actor_train.router_replay.mode=R3"
    (finding,) = read_roll("run.yaml", [word], lambda settings, stage: replace(SPARSE, moe=None)).findings
    assert finding.what.startswith("actor_train.router_replay.mode is R3, and ")
    assert finding.where == word
    assert not read_roll("run.yaml", [word], lambda settings, stage: SPARSE).findings


def test_adapters_are_of_layers_that_the_model_has():
    words = ["actor_train.model_args.lora_target=foo"]
    (finding,) = read_roll("run.yaml", words, lambda settings, stage: SPARSE).findings
    assert (finding.what, finding.where) == ("lora_target has foo", words[0])


def test_the_built_in_engine_samples_from_no_layers_of_linear_attention():
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16, "conv_kernel_size": 4}
    model = replace(SPARSE, model_type="qwen3_next", delta=DeltaNet(layers=(True,) * SPARSE.num_layers, **sizes))
    word = "actor_infer.strategy_args.strategy_name="
    (finding,) = read_roll("run.yaml", [f"{word}builtin"], lambda settings, stage: model).findings
    assert (finding.what, finding.where) == (
        "actor_infer: the built-in engine cannot sample from qwen3_next", f"{word}builtin",
    )  # fmt: skip
    assert not read_roll("run.yaml", [f"{word}vllm"], lambda settings, stage: model).findings
