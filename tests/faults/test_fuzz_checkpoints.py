"""Checkpoints with random damage: where there are digests every change is named; where there are none, what a file says
of itself is held against what the others say, and nothing of another shape, and no half of a model, is loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import Tensors, lora, random_adapter
from damage import BYTES, DAMAGES, TEXTS, Damage, copied, edited
from fuzzing import JSON, fuzz
from hypothesis import strategies as st
from model_sizes import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_dist_kit import to_mcore

from megatune.bridge.adapter_files import open_adapter, write_adapter, write_adapter_config
from megatune.bridge.assemble import open_checkpoint
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorSource
from megatune.config.groups.run import ModelSettings, RunSettings
from megatune.config.settings import Settings
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_architecture
from megatune.families.weights import hf_shapes, layers_of
from megatune.training.checks import check_files
from megatune.training.storage.manifest import digest_files, problem_of, read_manifest
from megatune.training.storage.store import CheckpointStore
from megatune.training.train_state import read_state

Loaded = dict[str, Any]


def _tensors(source: TensorSource, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    found = {name: source.whole(name) for name in shapes}
    for name, shape in shapes.items():
        assert tuple(found[name].shape) == tuple(source.shape(name)) == shape, name
        assert found[name].dtype.is_floating_point, name
    return found


def _model(folder: Path) -> Loaded:
    """A model's folder as a run reads it."""
    architecture = load_architecture(folder, "sft")
    opened, _ = open_checkpoint(folder, architecture)
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    shapes = {
        name: shape
        for weight in weights
        for layer in layers_of(weight, architecture)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }
    return {"architecture": architecture, **_tensors(opened, shapes)}


def _whole_model(folder: Path) -> Loaded:
    found = _model(folder)
    tokenizer = load_tokenizer(folder)
    return {**found, "tokens": tokenizer("Who are you? 你好").input_ids}


def _adapter(folder: Path, architecture: Any) -> Loaded:
    source = open_adapter(folder, architecture, lora())
    return dict(_tensors(source, {name: each.shape for name, each in source.adapter.tensors.items()}))


def _training(folder: Path) -> Loaded:
    """A training checkpoint: first its digests, then all that a resumed run reads."""
    if problems := _problems(folder):
        raise MegatuneError(problems, ExitCode.INPUT)
    assert read_manifest(folder).resumable
    optimizer = SafetensorsFolder(folder / "training", "optimizer")
    shapes = {name: optimizer.file_shape(name) for name in optimizer.names()}
    return {**_model(folder), "state": read_state(folder), **_tensors(optimizer, shapes)}


def _same(found: Loaded, expected: Loaded) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) if isinstance(value, Tensor) else value == expected[name]
        for name, value in found.items()
    )


class _Checked:
    """Damages copies of a folder, and reads them."""

    def __init__(self, folder: Path, other: Path, work: Path, load: Callable[[Path], Loaded], digests: bool) -> None:
        self.folder, self.other, self.work, self.load, self.digests = folder, other, work, load, digests
        self.whole, self.counts = load(folder), Counter[str]()
        assert not _same(load(other), self.whole)

    def __call__(self, damage: Damage) -> None:
        folder = copied(self.folder, self.work / "damaged")
        path, changed = damage.do(folder, self.other)
        for error in check_files(self._settings(folder)).errors:
            _told(error)
        try:
            found = self.load(folder)
        except MegatuneError as error:
            self.counts["named"] += 1
            return _told(error)
        same = _same(found, self.whole)
        self.counts["as it was" if same else "other values"] += 1
        if same:
            assert not (changed and self.digests and path.name != "manifest.json"), f"{path} is {damage.kind}, unseen"
            return None
        assert not self.digests, f"{path} is {damage.kind}, and was loaded"
        # Without digests nobody can tell other numbers from those that were meant.
        assert damage.kind in (*BYTES, *TEXTS, "another run's"), f"{path} is {damage.kind}, and was loaded"
        return None

    def _settings(self, folder: Path) -> Settings:
        run = RunSettings(
            output_dir=str(self.work / "out"), resume_from_checkpoint=str(folder) if self.digests else None
        )
        return Settings(run=run, model=ModelSettings(model_name_or_path=str(folder)))


def _told(error: MegatuneError) -> None:
    assert error.exit_code in (64, 65, 66), error.exit_code
    for finding in error.findings:
        assert finding.what
        assert len(f"{finding}") < 20_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of other weights, in several files each."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 400}
    return [make_checkpoint("qwen3", folder / f"{seed}", seed=seed, max_shard_size="60KB", **sizes) for seed in (0, 1)]


def _as_training(model: Path, output: Path, step: int) -> Path:
    """A checkpoint as a run commits it."""
    store = CheckpointStore(output)
    folder = copied(model, store.begin(step))
    (folder / "training").mkdir()
    torch.manual_seed(step)
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    kinds = ("main", "exp_avg")
    optimizer = {f"{kind}/{name}": torch.rand(each.shape) for kind in kinds for name, each in tensors.items()}
    save_file(optimizer, folder / "training" / "optimizer.safetensors")
    save_file({"cpu": torch.get_rng_state()}, folder / "training" / "rng-00000.safetensors")
    (folder / "training" / "state.json").write_text(json.dumps({"step": step, "seed": 1, "global_batch_size": 4}))
    return store.commit(step, digest_files(folder, [folder / "config.json"]), {"layout": {"tp": 1}})


def _as_adapter(model: Path, folder: Path, factor: float) -> Path:
    architecture = load_architecture(model)
    folder.mkdir()
    values = {name: each * factor for name, each in random_adapter(architecture, lora()).items()}
    write_adapter(folder / "adapter_model.safetensors", Tensors(values), architecture, lora())
    write_adapter_config(folder, architecture, lora(), str(model))
    return folder


def _problems(checkpoint: Path) -> list[Finding]:
    try:
        files = read_manifest(checkpoint).files
    except MegatuneError as error:
        return list(error.findings)
    return [Finding(problem, str(checkpoint)) for file in files if (problem := problem_of(checkpoint, file))]


@pytest.mark.extended(200)
@pytest.mark.parametrize("examples", [40, 200])
def test_a_training_checkpoint(examples: int, models: list[Path], tmp_path: Path, told: Callable[..., None]) -> None:
    one, other = (_as_training(model, tmp_path / f"{n}", 3) for n, model in enumerate(models))
    checked = _Checked(one, other, tmp_path, _training, digests=True)
    fuzz(DAMAGES, checked, examples)
    print(f"{examples} checkpoints: {dict(checked.counts)}")
    assert checked.counts["other values"] == 0
    assert checked.counts["named"] > examples // 2
    got = f"{checked.counts['named']} named, {checked.counts['as it was']} that changed nothing; none loaded"
    told(case="T13", fault=f"{examples} random damages of a checkpoint's files", got=got)


@pytest.mark.extended(200)
@pytest.mark.parametrize("examples", [30, 200])
def test_a_model(examples: int, models: list[Path], tmp_path: Path) -> None:
    _assert_named(examples, models, tmp_path, _whole_model)


@pytest.mark.extended(100)
@pytest.mark.parametrize("examples", [40, 100])
def test_an_adapter(examples: int, models: list[Path], tmp_path: Path) -> None:
    load = partial(_adapter, architecture=load_architecture(models[0]))
    folders = [_as_adapter(models[0], tmp_path / f"{factor}", factor) for factor in (1, 2)]
    _assert_named(examples, folders, tmp_path, load)


@pytest.mark.extended(100)
@pytest.mark.parametrize("examples", [40, 100])
def test_a_checkpoint_of_megatron(examples: int, models: list[Path], tmp_path: Path) -> None:
    folders = [to_mcore(model, tmp_path / f"{number}", 50_000) for number, model in enumerate(models)]
    _assert_named(examples, folders, tmp_path, _model)


def _assert_named(examples: int, folders: Sequence[Path], tmp_path: Path, load: Callable[[Path], Any]) -> None:
    """Damage what has no digests: what of it can be found is named."""
    checked = _Checked(*folders, tmp_path, load, digests=False)
    fuzz(DAMAGES, checked, examples)
    print(f"{examples} examples: {dict(checked.counts)}")
    assert checked.counts["named"] > examples // 3


_CHANGES = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), JSON | DAMAGES.map(lambda damage: damage.value)), max_size=3
)


@pytest.mark.extended(3_000)
@pytest.mark.parametrize("examples", [100, 3_000])
def test_configurations(examples: int, tmp_path: Path) -> None:
    """config.json of every family with anything for any of its values: refused by key, or a model with shapes."""
    configs = [json.loads(tiny_config(model_type).to_json_string(use_diff=False)) for model_type in FAMILIES]
    counts = Counter[str]()

    def check(drawn: tuple[int, list[tuple[float, Any]]]) -> None:
        config = configs[drawn[0]]
        for place, value in drawn[1]:
            config = edited(config, place, value)
        if not isinstance(config, dict):
            return None
        try:
            architecture = read_architecture(config, "config.json")
        except MegatuneError as error:
            counts["refused"] += 1
            return _told(error)
        counts["read"] += 1
        for weight in FAMILIES[architecture.model_type].weight_map(architecture):
            for layer in layers_of(weight, architecture):
                for name, shape in hf_shapes(weight, architecture, layer).items():
                    assert all(isinstance(size, int) and size > 0 for size in shape), (name, shape)
        return None

    fuzz(st.tuples(st.integers(0, len(configs) - 1), _CHANGES), check, examples)
    print(f"{examples} configurations: {dict(counts)}")
    assert min(counts["refused"], counts["read"]) > examples // 10
