"""A hub that goes down in the middle of a download: what is there already is kept, and no half model is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, Hub, running

LARGE = bytes(range(250)) * 100_000  # two of the pieces of 10 MiB that the library writes
# In a process of its own, since the client reads its environment as it is imported.
CLIENT = """
import json, sys
from megatune.errors import MegatuneError
from megatune.hub.models import open_model

for line in sys.stdin:
    try:
        print(json.dumps({"folder": str(open_model(json.loads(line)).fetch())}), flush=True)
    except MegatuneError as error:
        print(json.dumps({"error": str(error), "code": int(error.exit_code)}), flush=True)
"""


def fetched(folder: Path, environment: dict[str, str], *names: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], input="\n".join(map(json.dumps, names)), env=environment, cwd=folder,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_that_is_down(tmp_path: Path, told: Callable[..., None]) -> None:
    """With nothing in the cache; what is there whole is taken without asking (tests/hub)."""
    hub = Hub()
    environment = {**hub.environment(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:1"}
    hub.server_close()
    began = time.monotonic()
    (refused,) = fetched(tmp_path, environment, "team/large")
    seconds = time.monotonic() - began
    assert refused["code"] == 69
    got = " ".join(refused["error"].split())
    expected = "cannot get team/large from 127.0.0.1:1 why: it refuses the connection fix: set HF_ENDPOINT to a mirror"
    assert expected in got
    told(case="T53", fault="the hub is down as a run starts", got=got.partition(" fix:")[0], seconds=seconds)


@pytest.mark.extended
def test_a_hub_that_breaks_off(tmp_path: Path, told: Callable[..., None]) -> None:
    models = {"team/large": {"config.json": "{}", "model.safetensors": LARGE}}
    hub = Hub(models=models)
    with running(hub):
        environment = hub.environment(tmp_path)
        hub.cuts["model.safetensors"] = 10**6  # nobody gets the whole file
        began = time.monotonic()
        (broken,) = fetched(tmp_path, environment, "team/large")
        seconds = time.monotonic() - began
        assert broken["code"] == 69
        assert "why: it closes the connection" in broken["error"]
        snapshot = tmp_path / "hf" / "hub" / "models--team--large" / "snapshots" / COMMIT
        assert not (snapshot / "model.safetensors").exists()  # half of it is nowhere that a model is read from
        hub.cuts.clear()
        (whole,) = fetched(tmp_path, environment, "team/large")
        assert (Path(whole["folder"]) / "model.safetensors").read_bytes() == LARGE
    got = " ".join(broken["error"].split()).partition(" fix:")[0]
    told(case="T53", fault="the hub breaks every connection in the middle of a file", got=got, seconds=seconds)
