"""What the tests of the engine, the bridge and the proof share: a pool of ranks, and tiny checkpoints."""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import left_out
from hypothesis import settings
from model_sizes import MakeModel, model_class, tiny_config
from pool import RankPool
from pool_launch import CommandLine

# Devices and calibrations that a user keeps must not change what is planned here.
_NO_USER = tempfile.TemporaryDirectory()
os.environ["XDG_CONFIG_HOME"] = _NO_USER.name
# Nor does a run that is tested keep what it measured for the next one: a file is where the folder would be.
(Path(_NO_USER.name) / "megatune").mkdir()
(Path(_NO_USER.name) / "megatune" / "calibration").touch()
os.environ.pop("MEGATUNE_DEVICES", None)

# Started in a shell's background, or by nohup, this process ignores signals, and what it starts would, too.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A machine that others use, too, may take a second over what takes milliseconds; pools and runs have their own limits.
settings.register_profile("megatune", deadline=None)
settings.load_profile("megatune")


# Files of few, long tests. Begun last, one process would still be at them when the others have nothing left.
_LONGEST = ("test_train.py", "test_verify.py", "test_run.py", "test_plan_activations.py", "test_plan_parameters.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of tests over products only as many cases as hold every value, and none marked extended"
    parser.addoption("--covering", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first; the Makefile tells xdist to keep this order."""
    if config.getoption("--covering"):
        config.hook.pytest_deselected(items=(out := left_out(items)))
        items[:] = [item for item in items if item not in set(out)]
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))


@pytest.fixture(scope="module")
def computing_device() -> Iterator[None]:
    """Make tensors where this machine computes: of kernels for GPUs there are none for a CPU's."""
    from megatune.engine import device

    with device.current():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among thousands of tests and all that their modules import, which stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks."""
    ranks = RankPool(8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """model_dir("qwen3", tied=True, vocab_size=130): a checkpoint as Transformers saves it, made once a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(model_type: str, *, tied: bool = False, max_shard_size: str = "5GB", **sizes: Any) -> Path:
        key = (model_type, tied, max_shard_size, repr(sorted(sizes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            _save_random_model(made[key], model_type, max_shard_size, {"tie_word_embeddings": tied, **sizes})
        return made[key]

    return make


def _save_random_model(folder: Path, model_type: str, max_shard_size: str, sizes: dict[str, Any]) -> None:
    import torch
    from transformers.utils import logging

    from megatune.families import FAMILIES

    logging.disable_progress_bar()
    config = tiny_config(model_type, **sizes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(model_type).from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # a state that is gone after a token has hardly a gradient, but its rounding
                parameter.uniform_(-3, 0)
            elif name.endswith("proj_bias"):  # of experts: some of what they make is clamped
                parameter.normal_(std=3 if name.endswith("gate_up_proj_bias") else 0.3)
            elif name.endswith(("mm_input_projection_weight", "cls_token", "position_embeddings")):  # 0 at first
                parameter.normal_(std=0.2)
            elif parameter.dim() == 1:  # norms are 1 and biases 0 at first: nothing would show that they are used
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if model_type.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(len(parameter) ** -0.25)  # its scores are not divided by √d: norms learn to do so
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
            elif name.endswith(("layer_scalar", "std_scale")):
                buffer.uniform_(0.7, 1.1)
            elif name.endswith("std_bias"):
                buffer.normal_(std=0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    said = json.loads((folder / "config.json").read_text())
    if said["model_type"] != model_type and model_type in FAMILIES:  # Transformers computes it as another
        (folder / "config.json").write_text(json.dumps({**said, "model_type": model_type}, indent=2))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads of processes that share few cores wait for each other: references take six times as long."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture
def command_line(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """command_line("train", "run.yaml"): a command in this process, its ranks those of the pool."""
    return CommandLine(pool, monkeypatch)
