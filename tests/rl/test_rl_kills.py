"""`megatune rl` is struck in every phase, at every process: it ends in seconds, names what was struck, leaves nothing,
and the same command comes to the same end as a run that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import local_roles
import numpy as np
import pytest
from digits import CHARACTERS
from kill_kit import Ended, Strike, curve, prepare, run, settings, weights, write

from megatune.config.rl.settings import RLSettings
from megatune.rl.pipeline.run import watch_for_stop
from megatune.rl.reading import read_file
from megatune.rl.samples import Problem

SECONDS = 120.0  # from the signal to the end of the last process, on a machine that others use
# What ends otherwise than with 76.
CODES = {
    ("driver", signal.SIGKILL): -signal.SIGKILL,
    ("driver", signal.SIGINT): 130,
    ("driver", signal.SIGTERM): 75,
    ("terminal", signal.SIGHUP): 75,
}
STOPPED = "its process is stopped"
# name -> (settings, strikes). A chain is short, because a busy machine takes minutes for a run.
CHAINS: dict[str, tuple[str, list[Strike]]] = {
    "one rank": (
        "small",
        [
            *(Strike(phase, "actor_train-0") for phase in ("load", "sync", "train", "save")),
            Strike("train", "actor_train-0", signal.SIGSTOP),
        ],
    ),
    "one engine": (
        "small",
        [
            *(Strike(phase, "actor_infer-0", is_idle=phase == "train") for phase in ("sync", "rollout", "train")),
            Strike("rollout", "actor_infer-0", signal.SIGSTOP),
            Strike("rollout", "reward"),  # the run goes on
        ],
    ),
    "the driver": (
        "small",
        [
            *(Strike(phase, "driver") for phase in ("rollout", "train", "save")),
            Strike("rollout", "driver", signal.SIGINT),
            Strike("train", "driver", signal.SIGTERM),
            Strike("rollout", "terminal", signal.SIGHUP),
        ],
    ),
    "two ranks with a critic": (
        "ppo",
        [
            *(Strike(phase, "actor_train-1") for phase in ("train", "sync", "save", "old_log_probs")),
            *(Strike(phase, "critic-0") for phase in ("values", "critic", "save")),
        ],
    ),
    "a reference and an engine on the same devices": (
        "ppo",
        [
            *(Strike(phase, "reference-0", is_idle=phase == "rollout") for phase in ("load", "reference", "rollout")),
            Strike("validation", "actor_infer-0"),
            Strike("train", "reference-0", signal.SIGSTOP, is_idle=True),
        ],
    ),
    "a judge, a reference of Transformers, all apart": (
        "apart",
        [
            *(Strike(phase, "reward_model-0", is_idle=phase == "train") for phase in ("rollout", "train")),
            Strike("reference", "reference-0", held_from="rollout"),
            Strike("rollout", "reward_model-0", signal.SIGSTOP),
        ],
    ),
}


def check(strike: Strike, ended: Ended) -> None:
    """Assert that a run ended as it should."""
    assert ended.struck, ended.errors
    goes_on = strike.victim == "reward"
    code = 0 if goes_on else CODES.get((strike.victim, strike.number), 76)
    assert ended.code == code, ended.printed + ended.errors
    assert not ended.left
    assert "Traceback" not in ended.errors
    if goes_on or strike.victim in ("driver", "terminal"):
        return
    assert ended.seconds < SECONDS
    first = ended.errors.strip().splitlines()[0]
    assert strike.victim in first
    if not strike.is_early:
        assert strike.is_idle or f"({strike.phase}" in first
        assert "at step " in first
    assert (STOPPED if strike.number == signal.SIGSTOP else "kill -9") in ended.errors
    assert "resume from the last checkpoint" in ended.errors


@pytest.mark.extended
@pytest.mark.parametrize("name", CHAINS)
def test_every_process_in_every_phase(tmp_path: Path, name: str) -> None:
    kind, strikes = CHAINS[name]
    steps = 3 * len(strikes) + 4
    prepare(tmp_path)
    outputs = [tmp_path / folder for folder in ("struck", "whole")]
    struck, whole = (write(tmp_path / f"{each.name}.yaml", settings(tmp_path, each, steps, kind)) for each in outputs)
    for strike in strikes:
        check(strike, run(struck, outputs[0], strike))
    for file, output in zip((struck, whole), outputs, strict=True):
        ended = run(file, output)
        assert ended.code == 0, ended.errors
        assert not ended.left
    assert curve(outputs[0]) == curve(outputs[1])
    assert weights(outputs[0]) == weights(outputs[1])


# name -> (settings, the strike)
LOSSES = {
    "one of two": ("two", Strike("rollout", "actor_infer-1")),
    "one of two is stopped": ("two", Strike("rollout", "actor_infer-1", signal.SIGSTOP)),
    "the only one": ("small", Strike("rollout", "actor_infer-0")),
    "the only one, with weights on their way": ("small", Strike("sync", "actor_infer-0")),
    "while it has left its device to the trainer": ("ppo", Strike("train", "actor_infer-0")),
    "a judge": ("apart", Strike("rollout", "reward_model-0")),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", LOSSES)
def test_an_engine_is_started_again(tmp_path: Path, name: str) -> None:
    """While it is, the others sample what it had begun, or the run waits for the only one; the run comes to the same
    end as one that nothing happened to."""
    kind, strike = LOSSES[name]
    prepare(tmp_path)
    steps = 30 if kind == "two" else 6
    changes = {"max_engine_restarts": 1, "enable_old_logprobs_recompute": True, "save_steps": steps}
    struck, whole = outputs = [tmp_path / folder for folder in ("struck", "whole")]
    files = [write(tmp_path / f"{each.name}.yaml", settings(tmp_path, each, steps, kind) | changes) for each in outputs]
    ended, other = run(files[0], struck, strike), run(files[1], whole)
    for each in (ended, other):
        assert (each.code, each.left) == (0, []), each.errors
    assert ended.struck
    line = next(line for line in ended.errors.splitlines() if line.startswith(f"warning: {strike.victim} on host "))
    assert (STOPPED if strike.number == signal.SIGSTOP else "kill -9") in line
    assert "no more restarts of it: max_engine_restarts" in line
    assert f"{strike.victim} was started again, has the weights, and samples" in ended.printed
    assert "warning: " not in other.errors
    assert curve(struck) == curve(whole)
    assert weights(struck) == weights(whole)


@pytest.mark.extended
def test_an_engine_that_was_started_again_as_often_as_it_may(tmp_path: Path) -> None:
    prepare(tmp_path)
    output = tmp_path / "struck"
    content = settings(tmp_path, output, 400, "two") | {"max_engine_restarts": 1}
    ended = run(write(tmp_path / "struck.yaml", content), output, Strike("rollout", "actor_infer-1", repeats=2))
    check(Strike("rollout", "actor_infer-1", is_idle=True), ended)
    assert "warning: actor_infer-1 on host" in ended.errors


@pytest.mark.extended
def test_an_engine_that_is_ahead(tmp_path: Path) -> None:
    """It samples while the trainer works, is killed then, and the same command resumes."""
    prepare(tmp_path)
    output = tmp_path / "struck"
    content = settings(tmp_path, output, 12, "ahead")
    content["rewards"]["digits"]["query_filter_config"] = {"type": "std_filter", "filter_args": {"std_threshold": 0}}
    file = write(tmp_path / "struck.yaml", {**content, "is_use_additional_prompts": True})
    strike = Strike("train", "actor_infer-0", steps=3, is_idle=True)
    check(strike, run(file, output, strike))
    again = run(file, output)
    assert (again.code, again.left) == (0, []), again.errors
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert max(record["staleness"] for record in steps) == 1


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_process_of_rays_own(tmp_path: Path, victim: str) -> None:
    """All actors end with it; the run says which one died, and the same command resumes."""
    prepare(tmp_path)
    output = tmp_path / "struck"
    file = write(tmp_path / "struck.yaml", settings(tmp_path, output, 8, "small"))
    ended = run(file, output, Strike("train", victim, steps=4))
    check(Strike("train", victim, is_idle=True), ended)
    assert f"Ray's {victim} (process " in ended.errors
    report = json.loads((output / "launch" / "report.json").read_text())
    assert (report["culprit"], report["exit_code"]) == (victim, 76)
    again = run(file, output)
    assert (again.code, again.left) == (0, []), again.errors
    assert "resumed after step" in again.printed
    assert [step for step, *_ in curve(output)] == list(range(1, 9))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_is_asked_to_stop_and_then_told_to(tmp_path: Path, number: int) -> None:
    with watch_for_stop(tmp_path / "STOP") as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        os.kill(os.getpid(), signal.SIGHUP)  # a terminal that is closed sends two
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with watch_for_stop(tmp_path / "STOP") as stop:
        (tmp_path / "STOP").touch()
        assert stop()


def _here(settings: RLSettings, rows: Path) -> int:
    """On one rank of the pool: run to the end, without Ray."""
    lines = map(json.loads, rows.read_text().splitlines())
    ids = {character: number for number, character in enumerate(CHARACTERS)}
    own = [
        Problem(row["id"], "digits", "digits", [], np.array([ids[each] for each in row["prompt"]]), row, row["prompt"])
        for row in lines
    ]
    local_roles.problems = lambda: {"digits": own}
    return local_roles.run(settings, Path(str(settings.actor_train.settings.model.model_name_or_path)))


def test_a_trainer_that_is_killed(pool: Any, tmp_path: Path) -> None:
    """The same, of the commonest case; resumed and uninterrupted runs are those of one process, without Ray."""
    prepare(tmp_path)
    outputs = [tmp_path / folder for folder in ("struck", "whole")]
    files = [write(tmp_path / f"{each.name}.yaml", settings(tmp_path, each, 5, "small")) for each in outputs]
    strike = Strike("train", "actor_train-0")
    ended = run(files[0], outputs[0], strike)
    check(strike, ended)
    assert "at step 3 (train" in ended.errors
    report = json.loads((outputs[0] / "launch" / "report.json").read_text())
    assert (report["culprit"], report["exit_code"]) == ("actor_train-0", 76)
    for file in files:
        assert pool.run(1, _here, read_file(str(file), []).require_valid(), tmp_path / "rows.jsonl", limit=120) == [0]
    assert len(curve(outputs[1])) == 5
    assert curve(outputs[0]) == curve(outputs[1])
    assert weights(outputs[0]) == weights(outputs[1])
