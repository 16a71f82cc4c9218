"""Responses of several turns: what an environment says is in the context, and is never trained."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from digits import make_model, settings
from local_roles import run, run_file
from script_kit import run_script

from megatune.config.dialects.roll import read_roll
from megatune.config.rl.rollout import PromptData, RolloutSettings
from megatune.config.rl.settings import RewardRole, RLSettings
from megatune.demo.family import demo_family
from megatune.demo.tokenizer import make_tokenizer
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.environments import OBSERVATION
from megatune.rl.pipeline.groups import Group, RequestBuilder, group_from_record, group_record
from megatune.rl.pipeline.sampler import Sampler, observation_writer
from megatune.rl.problems import read_problems
from megatune.rl.rewards.answer import Answer
from megatune.rl.rewards.kinds import load_reward
from megatune.rl.rollout.engine import SequenceState
from megatune.rl.samples import Problem, Request, Response, Sample

LIMIT = 120.0
EXAMPLE = Path(__file__).parents[2] / "examples/rl/game.yaml"


def playing(name: str = "tests.rl.digits_reward:Countdown", turns: int = 8, **arguments: Any) -> dict[str, Any]:
    return {"environment": {"name": name, "arguments": arguments, "max_turns": turns}}


@pytest.mark.parametrize("family", ["qwen3", "llama", "deepseek_v3"])
def test_the_next_turn_begins_as_the_chat_template_begins_it(tmp_path, family):
    tokenizer = make_tokenizer(demo_family(family), 600)
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"tag": "game", "messages": question}))
    data = PromptData(file_name=[str(tmp_path / "rows.jsonl")], template="native", messages="messages")
    rewards = {"game": RewardRole("game", "environment", ("game",))}
    (problem,) = read_problems(data, rewards, tokenizer, 600).all()
    write = observation_writer(SimpleNamespace(rollout=RolloutSettings(), data=data), tokenizer)  # type: ignore[arg-type]
    said, response = question, np.zeros(0, np.int64)
    for number, guess in enumerate(("4", "7"), 1):
        turn = [*tokenizer(guess, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        found = write(problem, _response(np.concatenate([response, turn])), "It is higher.")
        said = [*said, {"role": "assistant", "content": guess}, {"role": "user", "content": "It is higher."}]
        expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode([*problem.prompt_ids, *found.response_ids]) == expected
        assert [found.response_ids[start] for start, _ in found.observed[-1:]] != [tokenizer.eos_token_id], number
        response = found.response_ids


@pytest.mark.parametrize("template", ["base", "native"])
def test_a_prompt_that_is_text_goes_on_as_text(template):
    tokenizer = make_tokenizer(demo_family("qwen3"), 600)
    asked = SimpleNamespace(rollout=RolloutSettings(), data=PromptData(template=template))
    problem = Problem("0", "", "game", [{"role": "user", "content": "2="}], np.array([1]), {}, "2=")
    found = observation_writer(asked, tokenizer)(problem, _response([5, 6]), "and on")  # type: ignore[arg-type]
    assert tokenizer.decode(found.response_ids[2:]) == "and on"
    assert (found.observed, found.finish) == (((2, len(found.response_ids)),), "abort")
    assert found.sampled.tolist() == [0, 1]
    assert found.log_probs[2:].tolist() == [0] * (len(found.response_ids) - 2)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}!", "it leaves messages out"),
        ("{{ raise_exception('one question') if messages|length > 1 }}{{ messages[0].content }}!", "one question"),
    ],
)
def test_a_template_of_one_question_is_refused(template, said):
    tokenizer = make_tokenizer(demo_family("qwen3"), 600)
    tokenizer.chat_template = template
    asked = SimpleNamespace(rollout=RolloutSettings(), data=PromptData(template="native"))
    problem = Problem("0", "", "game", [{"role": "user", "content": "Guess."}], np.array([1]), {}, "Guess.!")
    with pytest.raises(MegatuneError, match=said) as caught:
        observation_writer(asked, tokenizer)(problem, _response([5, 6]), "higher")  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.INPUT


def _response(ids: Sequence[int], observed: Any = (), finish: Any = "stop", key: str = "train-0-0-0") -> Response:
    log_probs = np.full(len(ids), -1.0, np.float32)
    return Response(key, np.array(ids, np.int64), log_probs, finish, ((0, 1),), observed=observed)


class Engines:
    """Samples a token, and is aborted the first time."""

    asked = 0

    async def generate(self, requests: Sequence[Request]) -> list[Response]:
        self.asked += 1
        finish = "abort" if self.asked == 1 else "stop"
        return [SequenceState(request, 1, [9], [-1.0]).response(finish) for request in requests]  # type: ignore[arg-type]


class Turns:
    """Answers the first two turns with an observation, then scores."""

    async def score(self, sample: Sample) -> None:
        sample.score = float(len(sample.turns))
        sample.details = {OBSERVATION: "more"} if len(sample.turns) < 3 else {}


def test_observations_are_kept_by_parts_and_in_checkpoints():
    """A turn is one call to an engine, whatever its tokens are."""

    def extend(problem: Problem, response: Response, observation: str) -> Response:
        begun = len(response.response_ids)
        ids = np.concatenate([response.response_ids, [4, 5]])
        return replace(_response(ids, (*response.observed, (begun, begun + 2)), "abort"), id=response.id)

    group = Group(Problem("0", "", "game", [], np.array([1, 2]), {}), 0, 0, 1)
    group.responses[0] = _response([3, 4, 5], ((1, 3),), "abort")
    engines, sampling = Engines(), RequestBuilder(settings(Path(), Path()).actor_infer.generating_args, 0, 16)
    sampler = Sampler(engines, Turns(), sampling, str, extend)  # type: ignore[arg-type]
    asyncio.run(sampler.finish(group))
    assert [turn.tolist() for turn in group.responses[0].turns] == [[3], [9, 9], [9]]
    assert group.scores.tolist() == [3]
    assert engines.asked == 3
    again = group_from_record(json.loads(json.dumps(group_record(group, {}))), group.problem, {})
    assert (again.responses[0].observed, again.longest) == (((1, 3), (5, 7)), 16)


def test_the_score_is_the_environments_or_a_rewards():
    own = load_reward("environment", None, playing(turns=2))
    asked = Answer("7", row={"digit": "7"}, turns=("7",))
    assert own(asked).details == {OBSERVATION: "2"}
    last = own(replace(asked, text="x", turns=("7", "x")))
    assert (last.score, last.correct, last.details) == (pytest.approx(1 / 3), 0.0, {"length": 1, "turns": 2})
    cut = own(replace(asked, finish="length"))  # nothing goes on after it
    assert (cut.score, OBSERVATION in cut.details) == (pytest.approx(1 / 3), False)
    done = load_reward("environment", None, playing(turns_=1) | playing(turns=1))(replace(asked, turns=("7",)))
    assert done.details["turns"] == 1
    scored = load_reward("multiple_choice", None, playing("python"))
    found = scored(Answer("\\boxed{A}", row={"ground_truth": "A"}, turns=("```python\n1\n```", "\\boxed{A}")))
    assert (found.score, found.details["turns"]) == (1.0, 2)


def test_a_program_is_run_and_texts_are_searched(tmp_path):
    python = load_reward("environment", None, playing("python", seconds=20.0, max_characters=60))

    def said(reward: Any, turn: str) -> Any:
        return reward(Answer(turn, turns=(turn,))).details.get(OBSERVATION)

    assert said(python, "<think>```python\n1\n```</think>\n```python\nprint(6 * 7)\n```") == "42"
    call = json.dumps({"name": "python", "arguments": {"code": "print('a' * 100)"}})
    assert said(python, f"<tool_call>\n{call}\n</tool_call>") == "a" * 30 + " … " + "a" * 30
    assert "ZeroDivisionError" in said(python, "```python\n1 / 0\n```")
    assert said(python, '<tool_call>{"name": "ls"}</tool_call>') == "Error: there is no tool 'ls', only python"
    assert said(python, "<tool_call>print</tool_call>").startswith("Error: write {")
    assert said(python, "The answer is 42.") is None
    rows = [{"title": "Tuna", "text": "A fish that swims fast."}, {"text": "A bird that sings."}, {"text": "Bread."}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    search = load_reward("environment", None, playing("search", file=str(tmp_path / "texts.jsonl"), results=1))
    assert said(search, "<search>which bird is it?</search>") == "A bird that sings."
    assert said(search, "<search>fast</search>") == "Tuna: A fish that swims fast."
    assert said(search, "<search>zebra</search>") == "(nothing found)"
    (tmp_path / "wrong.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    broken = load_reward("environment", None, playing("search", file=str(tmp_path / "wrong.jsonl")))
    with pytest.raises(ValueError, match=r"wrong.jsonl, line 2: not a JSON object with a column text"):
        said(broken, "<search>a</search>")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (playing("tests.rl.digits_reward:repeats"), "is not a class with reset"),
        (playing("tests.rl.nothing:There"), "environment 'tests.rl.nothing:There': No module named"),
        (playing(size=3), "unexpected keyword argument 'size'"),
        (playing("search", file="nowhere.jsonl"), "file nowhere.jsonl is missing"),
    ],
)
def test_environments_that_cannot_be_made_are_refused(environment, said):
    with pytest.raises(MegatuneError, match=said) as caught:
        load_reward("environment", None, environment)
    assert caught.value.exit_code == ExitCode.SETTINGS


def test_what_a_file_says_wrong_is_found_at_its_place():
    found = read_roll(
        EXAMPLE,
        [
            "rewards.game.environment=Guess",
            "actor_train.data_args.conversation_rules=ms_swift_4",
            "rewards.other={worker_cls: format, tag_included: [other], max_turns: 3}",
            "rewards.asked={worker_cls: LLMJudgeRewardWorker, environment: python, tag_included: [a], max_turns: 0}",
        ],
    )
    said = [finding.what for finding in found.findings]
    assert "rewards.game.environment is 'Guess'" in said
    assert "rewards.game has an environment, and data_args has conversation_rules" in said
    assert "rewards.asked has an environment and a judge" in said
    assert "rewards.asked.max_turns is 0" in said
    assert any("rewards.other.max_turns" in line for line in found.lines)
    assert not read_roll(EXAMPLE).findings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("digits"))


def _settings(model: Path, output: Path, steps: int, ratio: float, **run_part: Any) -> RLSettings:
    found = settings(model, output, steps=steps)
    role = RewardRole("digits", "environment", ("digits",), arguments=playing())
    rollout = {"async_generation_ratio": ratio, "sequence_length": 16}
    changed = {"logging_steps": 1, "rollout_dump_dir": str(output / "dump"), "max_log_prob_gap": 1e-4, **run_part}
    beside = found.actor_infer.model_copy(update={"device_mapping": [1] if ratio else [0]})
    return replace(
        found,
        actor_infer=beside,
        run=found.run.model_copy(update=changed),
        rollout=found.rollout.model_copy(update=rollout),
        rewards={"digits": role},
    )


def _curve(output: Path) -> list[tuple[float, ...]]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    names = ("step", "reward", "loss", "grad_norm", "response_length")
    return [tuple(record[name] for name in names) for record in records if "reward" in record]


def test_a_run_of_turns_trains_what_was_sampled_and_resumes_exactly(pool, model, tmp_path):
    """Log-probabilities of trainer and engine are compared at every token that was sampled: max_log_prob_gap."""
    whole, parts, ahead = (tmp_path / name for name in ("whole", "parts", "ahead"))
    pool.run(1, run, _settings(model, whole, 4, 0.0), model, limit=LIMIT)
    pool.run(1, run, _settings(model, parts, 1, 0.0), model, limit=LIMIT)
    pool.run(1, run, _settings(model, parts, 4, 0.0, resume_from_checkpoint=True), model, limit=LIMIT)
    assert _curve(parts) == _curve(whole)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    pool.run(1, run, _settings(model, ahead, 2, 1.0), model, limit=LIMIT)
    for folder in (whole, ahead):
        lines = [json.loads(line) for path in folder.glob("dump/*.jsonl") for line in path.read_text().splitlines()]
        several = [line for line in lines if line["reward/turns"] > 1]
        assert len(several) > len(lines) / 4
        for line in several:
            assert line["score"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
        assert max(line["tokens"] for line in lines) <= 14


def test_the_example_of_a_game_runs(pool, tmp_path):
    run_script(EXAMPLE.with_name("game.py"), tmp_path)
    model, rows = tmp_path / "model", tmp_path / "digits.jsonl"
    changed = {
        "pretrain": model,
        "output_dir": tmp_path / "out",
        "rollout_dump_dir": tmp_path / "dump",
        "actor_train.data_args.file_name": f"[{rows}]",
        "validation.data_args.file_name": f"[{rows}]",
        "max_steps": 1,
        "logging_steps": 1,
    }
    asked = read_roll(EXAMPLE, [f"{key}={value}" for key, value in changed.items()]).require_valid()
    pool.run(1, run_file, asked, limit=LIMIT)
    lines = [json.loads(line) for line in (tmp_path / "dump/step-000001.jsonl").read_text().splitlines()]
    assert len(lines) == 256
    # A model of random weights seldom writes a digit and its end; those that do are answered.
    several = [line for line in lines if line["reward/turns"] > 1]
    assert several
    for line in several:
        first, sign = re.match(r"(\d+)([<>])", line["response"]).groups()
        assert sign == ("<" if int(line["id"]) < int(first) else ">"), line
