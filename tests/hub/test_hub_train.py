"""`megatune train` with the id of a model on a hub, in processes of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from hub_server import COMMIT, OLDER, TOKEN, Hub, running

from megatune.demo.checkpoint import make_checkpoint
from megatune.launch.world import find_free_port

DEMO = Path(__file__).parents[2] / "examples" / "demo"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "tiny", num_layers=2, hidden_size=32)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with running(Hub(models={"team/tiny": {**files, "modeling.py": "code", "pytorch_model.bin": b"pickle"}})) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_asked(hub: Hub) -> None:
    hub.asked.clear()
    hub.sent.clear()


def start(
    hub: Hub, folder: Path, *words: str, module: Sequence[str] = ("-m", "megatune"), **environment: str
) -> subprocess.Popen[str]:
    """A run of one step, unless `words` say otherwise."""
    path = folder / "run.yaml"
    values = {
        "model_name_or_path": "team/tiny",
        "output_dir": "out",
        "dataset_dir": str(DEMO),
        "dataset": "identity",
        "template": "qwen3_nothink",
        "cutoff_len": 64,
        "model_name": "Tuna",
        "model_author": "the team",
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "report_to": "none",
        "plot_loss": False,
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return subprocess.Popen(
        [sys.executable, *module, "train", "run.yaml", *words],
        env=hub.environment(folder, OMP_NUM_THREADS="1", **environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert TOKEN not in output
    return process.returncode, output


def sent(hub: Hub) -> list[str]:
    return [path for path, _ in hub.sent]


def test_a_run_fetches_what_it_needs_and_resumes_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    # What is wrong is said before the weights come.
    code, output = finish(start(hub, tmp_path, "cutoff_len=1000000"))
    assert code == 64, output
    assert sent(hub) == ["config.json"]

    code, output = finish(start(hub, tmp_path, "max_steps=2", "push_to_hub=true", f"hub_token={TOKEN}", HF_TOKEN=""))
    assert code == 0, output
    assert f"model      team/tiny at {COMMIT[:12]}: qwen3" in output
    assert output.index("fetching ") < output.index("model   ") < output.index("plan  ")
    assert sent(hub).count(WEIGHTS) == sent(hub).count("tokenizer.json") == 1
    assert not [path for path in sent(hub) if path.endswith((".py", ".bin"))]
    written = (tmp_path / "out" / "run.yaml").read_text()
    assert yaml.safe_load(written)["model_revision"] == COMMIT
    assert f"# main on {hub.url.removeprefix('http://')}" in written

    # It is on the hub, the final model last, and the token in no file.
    assert hub.commits[-1][:2] == ("team/out", "Model of checkpoint-2")
    pushed = hub.repositories["models"]["team/out"]
    assert sorted(pushed) == sorted(
        ["README.md", *(path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir() if path.is_file())]
    )
    assert pushed[WEIGHTS] == (tmp_path / "out" / WEIGHTS).read_bytes()
    assert pushed["README.md"] == (tmp_path / "out" / "README.md").read_bytes()
    assert "base_model: team/tiny" in pushed["README.md"].decode()
    assert "time of a step" in pushed["README.md"].decode()
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]

    # The checkpoint has all of it; it is deleted on the way.
    asked = len(hub.asked)
    shutil.rmtree(tmp_path / "hf")
    code, output = finish(start(hub, tmp_path, "max_steps=4", HF_HUB_OFFLINE="1"))
    assert code == 0, output
    assert "resume     out/checkpoint-2" in output
    assert len(hub.asked) == asked
    manifest = json.loads((tmp_path / "out" / "checkpoint-4" / "training" / "manifest.json").read_text())
    assert manifest["metadata"]["model_name_or_path"] == "team/tiny"
    assert manifest["metadata"]["model_revision"] == COMMIT
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["model_revision"] == COMMIT
    assert (tmp_path / "out" / "checkpoint-4" / "tokenizer.json").is_file()


@pytest.mark.extended
def test_adapters_go_on_beside_the_commit_that_they_began_with(hub: Hub, tmp_path: Path) -> None:
    """Their checkpoint has no model: the base comes from the hub's cache, at the run's own commit, or once more."""
    lora = "finetuning_type=lora", "lora_rank=4", "merge_lora=true"
    code, output = finish(start(hub, tmp_path, "max_steps=2", *lora))
    assert code == 0, output
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "team/tiny"
    assert (tmp_path / "out" / "merged" / WEIGHTS).is_file()
    asked = len(hub.asked)
    code, output = finish(start(hub, tmp_path, "max_steps=4", *lora, HF_HUB_OFFLINE="1"))
    assert code == 0, output
    assert "resume     out/checkpoint-2" in output
    assert f"team/tiny at {COMMIT[:12]}" in output
    assert len(hub.asked) == asked
    shutil.rmtree(tmp_path / "hf")
    hub.sent.clear()
    code, output = finish(start(hub, tmp_path, "max_steps=5", *lora))
    assert code == 0, output
    assert f"team/tiny at {COMMIT[:12]}" in output
    assert sent(hub).count(WEIGHTS) == 1


@pytest.mark.extended
def test_of_torchruns_ranks_one_fetches(hub: Hub, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "megatune")
    code, output = finish(start(hub, tmp_path, "tensor_model_parallel_size=2", module=torchrun))
    assert code == 0, output
    assert len(sent(hub)) == len(set(sent(hub)))
    assert WEIGHTS in sent(hub)
    assert len([path for path in hub.asked if path.startswith("api/models/")]) == 2  # the commit, and its list of files


@pytest.mark.extended
def test_machines_with_other_versions_of_a_model(hub: Hub, tmp_path: Path) -> None:
    """The branch moves after the first machine has asked for its commit."""
    port, processes = str(find_free_port()), []
    with running(Hub(models=hub.repositories["models"])) as later:
        later.main = OLDER
        for rank, asked in enumerate((hub, later)):
            folder = tmp_path / str(rank)
            folder.mkdir()
            machine = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            processes.append(start(asked, folder, "num_processes=2", **machine))
        results = [finish(process) for process in processes]
    assert 66 in {code for code, _ in results}, results
    assert 0 not in {code for code, _ in results}
    text = f"machine 0 has {COMMIT} of team/tiny, and machine 1 {OLDER}"
    assert any(text in output for _, output in results), results
    assert sent(hub).count(WEIGHTS) == sent(later).count(WEIGHTS) == 1  # each machine for itself
