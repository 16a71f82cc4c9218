"""Nothing that is read runs code: pickles are refused wherever they lie, and a repository's code is left alone."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatune.bridge.torch_dist.table import load_metadata
from megatune.data.encode import load_tokenizer
from megatune.data.rows import TokenRows
from megatune.data.sources import resolve_datasets
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.families.peft_config import read_peft_config
from megatune.generation.inputs import find_model
from megatune.generation.transformers_backend import TransformersBackend
from megatune.training.checks import check_weights
from megatune.verify.reference import load_reference_model

Tell = Callable[..., None]


class Bomb:
    """Makes a folder when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture
def bomb(canary: Path) -> bytes:
    """The pickle; it works."""
    content = pickle.dumps(Bomb(canary))
    pickle.loads(content)
    canary.rmdir()
    return content


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "m"))


def refused(load: Callable[[], object], code: ExitCode = ExitCode.INPUT) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(MegatuneError) as caught:
        load()
    assert caught.value.exit_code == code
    return f"{caught.value.findings[0].what}; {caught.value.findings[0].why}", time.monotonic() - began


PICKLES = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "tokenizer.pkl")


def test_weights_that_are_pickles_are_refused(model: Path, bomb: bytes, canary: Path, told: Tell) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(bomb)
    for load in (lambda: check_weights(model), lambda: find_model(model)):
        got, seconds = refused(load)
        assert (
            got == "there is no model.safetensors; pytorch_model.bin is a pickle, which can run code when it is loaded"
        )
    with pytest.raises(OSError, match="safetensors"):
        load_reference_model(model, torch.float32)
    assert not canary.exists()
    told(case="T49", fault="the weights are a pickle that runs code", got=got, seconds=seconds)


def test_an_index_of_pickles_is_refused(model: Path, bomb: bytes, canary: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "a.bin").write_bytes(bomb)
    index = {"weight_map": {"model.norm.weight": "a.bin"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(lambda: TransformersBackend.load(model, load_tokenizer(model)))
    assert not canary.exists()


def test_pickles_beside_safetensors_are_left_alone(model: Path, bomb: bytes, canary: Path, told: Tell) -> None:
    for name in PICKLES:
        (model / name).write_bytes(bomb)
    check_weights(model)
    backend = TransformersBackend.load(find_model(model), load_tokenizer(model))
    load_reference_model(model, torch.float32)
    assert backend.context == 4096
    assert not canary.exists()
    told(
        case="T49", fault=f"pickles that run code next to the weights: {', '.join(PICKLES)}", got="the model is loaded"
    )


def test_an_adapter_that_is_a_pickle_is_refused(tmp_path: Path, bomb: bytes, canary: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]})
    )
    (tmp_path / "adapter_model.bin").write_bytes(bomb)
    assert "adapter_model.bin is a pickle" in refused(lambda: read_peft_config(tmp_path))[0]
    assert not canary.exists()


def test_the_metadata_of_megatrons_checkpoint_runs_nothing(bomb: bytes, canary: Path, told: Tell) -> None:
    got, seconds = refused(lambda: load_metadata(bomb, "iter_0000001/.metadata"))
    assert not canary.exists()
    told(case="T49", fault="`.metadata` of a checkpoint of Megatron-Core runs code", got=got, seconds=seconds)


def test_a_data_set_that_is_a_pickle_is_refused(tmp_path: Path, bomb: bytes, canary: Path, told: Tell) -> None:
    for name in ("rows.pkl", "rows.pt", "rows.npy"):
        (tmp_path / name).write_bytes(bomb)
        got, seconds = refused(lambda name=name: resolve_datasets([str(tmp_path / name)], tmp_path, "sft"))
        assert got.endswith("files are not supported; loading one may run code that it contains")
    assert not canary.exists()
    told(case="T49", fault="a data set is a pickle that runs code", got=got, seconds=seconds)


def test_prepared_rows_with_objects_are_not_loaded(tmp_path: Path, bomb: bytes, canary: Path) -> None:
    part = tmp_path / "train"
    part.mkdir()
    (part / "manifest.json").write_text('{"arrangement": "single"}')
    for name in ("documents.npy", "rows.npy"):
        np.save(part / name, np.array([Bomb(canary)], dtype=object), allow_pickle=True)
    refused(lambda: TokenRows(part))
    assert not canary.exists()


def test_code_of_a_model_is_never_run(model: Path, canary: Path, told: Tell) -> None:
    """With a supported model_type ours is built; any other one is refused. No flag changes that."""
    code = f"import os\nos.mkdir({str(canary)!r})\nclass X: pass\n"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "modeling_llama.py"):
        (model / name).write_text(code)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (model / "config.json").write_text(json.dumps(config))
    of_tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    of_tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    (model / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    load_architecture(model)
    TransformersBackend.load(find_model(model), load_tokenizer(model))
    load_reference_model(model, torch.float32)
    (model / "config.json").write_text(json.dumps({**config, "model_type": "x"}))
    got, seconds = refused(lambda: load_architecture(model))
    assert "it needs code from its repository, which is never run" in got
    assert not canary.exists()
    told(case="T50", fault="a model's repository asks for its own code (auto_map)", got=got, seconds=seconds)
