"""Checkpoints on a hub: what is sent, what its card says, and that nothing of it can fail a run that trained well."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import TOKEN, Hub, running

from megatune.config.load import load
from megatune.config.settings import Settings
from megatune.errors import MegatuneError
from megatune.hub.upload import OWN_CARD, prepare_repository
from megatune.training.callbacks import publishing
from megatune.training.callbacks.base import TrainSummary
from megatune.training.callbacks.publishing import Card, HubPush
from megatune.training.start import use_secrets
from megatune.training.storage.store import CheckpointStore

MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "training/state.json": b"{}", "iter_1/a.distcp": b""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(
        Hub(models={"team/mine": {"README.md": "written by hand", "model-00001-of-00002.safetensors": "old"}})
    ) as found:
        for name, value in found.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HTTP_PROXY", raising=False)
        yield found


def checkpoint(output: Path, step: int) -> Path:
    """A committed one; its weights say of which step."""
    store = CheckpointStore(output)
    folder = store.begin(step)
    for name, content in MODEL.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content + str(step).encode() * name.endswith("safetensors"))
    return store.commit(step)


def pusher(output: Path, **changes: Any) -> HubPush:
    settings = Settings(checkpoint={"push_to_hub": True, **changes}, run={"output_dir": str(output)})
    output.mkdir(exist_ok=True)
    return HubPush(settings, output, output / "logs", lambda path: path.write_text(OWN_CARD), lambda: False)


def summary(outcome: Any) -> TrainSummary:
    return TrainSummary(outcome=outcome, step=3, total_steps=3, seconds=1.0)


def wait(push: HubPush) -> None:
    """Let steps go by until nothing is under way."""
    deadline = time.monotonic() + 60
    while push._process is not None and time.monotonic() < deadline:
        push.on_step_end(None)  # type: ignore[arg-type]
        time.sleep(0.02)
    assert push._process is None


def test_the_newest_of_the_waiting_checkpoints_is_sent_and_the_final_model(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tuned"
    push = pusher(output)
    for step in (1, 2, 3):
        push.on_save(checkpoint(output, step))
    wait(push)
    assert [(repo, message) for repo, message, _ in hub.commits] == [
        ("team/tuned", "Model of checkpoint-1"), ("team/tuned", "Model of checkpoint-3")
    ]  # fmt: skip
    push.on_train_end(summary("finished"))
    push.on_final_model(output / "checkpoint-2")  # the best
    assert hub.commits[-1] == (
        "team/tuned", "Model of checkpoint-2", ["README.md", "config.json", "model.safetensors"]
    )  # fmt: skip
    assert hub.repositories["models"]["team/tuned"]["model.safetensors"] == b"weights2"
    assert "pushed checkpoint-2 to team/tuned on 127.0.0.1" in capsys.readouterr().out
    assert caplog.records == []
    assert not (output / ".push").exists()


def test_what_is_not_the_runs_stays_in_a_repository(hub: Hub, tmp_path: Path) -> None:
    """A card that somebody wrote stays, weights of another model go."""
    push = pusher(tmp_path / "tuned", hub_model_id="team/mine", hub_strategy="end")
    push.on_save(checkpoint(tmp_path / "tuned", 1))
    assert push._process is None
    push.on_final_model(tmp_path / "tuned" / "checkpoint-1")
    files = hub.repositories["models"]["team/mine"]
    assert files["README.md"] == b"written by hand"
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]


def test_on_modelscopes_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert prepare_repository("ms", "tuned", None) == ("team/tuned", "")
    push = pusher(tmp_path / "tuned", hub_model_id="team/tuned")
    push.on_final_model(checkpoint(tmp_path / "tuned", 1))
    files = hub.repositories["models"]["team/tuned"]
    assert {name: files[name] for name in ("config.json", "model.safetensors")} == {
        "config.json": b"{}", "model.safetensors": b"weights1"
    }  # fmt: skip
    assert OWN_CARD.encode() in files["README.md"]


def test_a_push_that_fails_or_hangs_is_a_warning_with_the_command(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "tuned twice"
    hub.refuses = [403, 0, 0]
    push = pusher(output, hub_model_id="team/tuned")
    push.on_save(checkpoint(output, 1))
    wait(push)
    monkeypatch.setattr(publishing, "PUSH_TIMEOUT", 2.0)
    push.on_save(checkpoint(output, 2))
    wait(push)  # it hangs, and is the second to fail: nothing is said again
    began = time.monotonic()
    push.on_final_model(output / "checkpoint-2")
    assert time.monotonic() - began < 10
    command = 'hf upload team/tuned \'{}\' . --exclude "training/*" --exclude "iter_*"'
    first, last = (record.message for record in caplog.records)
    assert first.startswith("pushing checkpoint-1 to team/tuned failed: it answered HTTP 403; later: ")
    assert first.endswith(command.format(output / "checkpoint-1"))
    assert last.startswith("pushing checkpoint-2 to team/tuned failed: it hangs; later: ")
    assert TOKEN not in caplog.text + (output / "logs" / "push.log").read_text()


def test_access_is_looked_at_before_anything_starts(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_repository("hf", "fresh", True) == ("team/fresh", "")
    assert "team/fresh" in hub.repositories["models"]
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(MegatuneError) as caught:
        prepare_repository("hf", "team/fresh", None)
    (finding,) = caught.value.findings
    assert (caught.value.exit_code, finding.why) == (66, "it answered HTTP 401")
    assert "HF_TOKEN" in finding.fix
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    name, note = prepare_repository("hf", "fresh", None)
    assert name == "fresh"
    assert note.startswith("cannot push to fresh on 127.0.0.1:9 so far: it refuses the connection")


def test_secrets_go_where_libraries_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "SWANLAB_API_KEY"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr("sys.argv", ["megatune", "sft", "--hub_token=hf_secret"])
    use_secrets(load(overrides=["hub_token=hf_secret", "swanlab_api_key=sk_secret"]).secrets)
    assert (os.environ["HF_TOKEN"], os.environ["SWANLAB_API_KEY"]) == ("hf_secret", "sk_secret")
    import sys

    assert sys.argv == ["megatune", "sft", "--hub_token=***"]


# --- the card ---------------------------------------------------------------------------------------------------------


def card(output: Path, source: Path, **changes: Any) -> Card:
    values = {
        "model_name_or_path": "Qwen/Qwen3-0.6B", "dataset": "hf::team/chats#500,identity", "template": "qwen3",
        "output_dir": str(output), "dataset_dir": "/srv/of-me/data", "learning_rate": 1e-5, **changes,
    }  # fmt: skip
    settings = load(None, [f"{key}={value}" for key, value in values.items()]).settings
    return Card(settings, output, source)


def test_a_card_says_what_a_model_was_made_of(tmp_path: Path, model_dir: Any) -> None:
    import shutil

    source = tmp_path / "base"
    shutil.copytree(model_dir("qwen3"), source)
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    lines = [{"step": step, "loss": 3.0 - step / 8, "num_tokens": 900} for step in (1, 2)] + [
        {"step": 2, "eval_loss": 2.5}
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "training_loss.png").write_bytes(b"")
    card(tmp_path, source).on_final_model(tmp_path)
    text = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front == {
        "library_name": "transformers", "base_model": "Qwen/Qwen3-0.6B", "base_model_relation": "finetune",
        "license": "apache-2.0", "datasets": ["team/chats"], "pipeline_tag": "text-generation",
        "tags": ["megatune", "sft"],
    }  # fmt: skip
    for said in (
        "| learning_rate | `1e-05` |", "| dataset_dir | `data` |", "![loss](training_loss.png)",
        "2.8750 at first, 2.7500 at last", "| trained tokens | 1,800 |", "2.5000 at last", "| torch | 2.",
    ):  # fmt: skip
        assert said in text
    assert str(tmp_path) not in text
    assert "of-me" not in text
    # What a user writes stays.
    (tmp_path / "README.md").write_text("mine")
    card(tmp_path, source).on_final_model(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
