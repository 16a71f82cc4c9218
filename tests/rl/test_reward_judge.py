"""Answers that another model judges."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from digits import settings
from layouts import Layout
from local_roles import LocalGroup
from worker_kit import settings_of

from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import InferRole, RewardRole
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.pipeline.roles import EngineGroup
from megatune.rl.pipeline.startup import evaluation_settings
from megatune.rl.rewards import answer
from megatune.rl.rewards.answer import Answer, RewardError
from megatune.rl.rewards.judge import Judge, read_judgement
from megatune.rl.rewards.judge_client import JudgeClient
from megatune.rl.rollout.server import EngineServer, engine_server, load_engine

ANSWER = Answer(
    "<think>hm</think>4 {reference}",
    messages=({"role": "system", "content": "s"}, {"role": "user", "content": "2+2? {response}"}),
    row={"ground_truth": "four"},
)


@pytest.mark.parametrize(
    ("said", "is_number", "score"),
    [
        ("YES", False, 1),
        ("Unknown, so no.", False, 0),  # ROLL also finds the "no" of "unknown"
        ("<think>yes</think>NO", False, 0),
        ("Score: 7", True, 0.7),
        ("**Score:** 10 of 10, Score: 2.5", True, 0.25),
        ("nothing", False, None),
        ("YES", True, None),
        ("Score: 70", True, None),
    ],
)
def test_judgements_are_read_by_the_rule_of_their_prompt(said: str, is_number: bool, score: float | None) -> None:
    if score is None:
        with pytest.raises(RewardError, match="of the judge, which answered"):
            read_judgement(said, is_number)
    else:
        assert read_judgement(said, is_number) == score


def test_a_reward_model_is_no_judge(tmp_path: Path) -> None:
    """Its word embedding would serve as output layer: it would write, and nothing that can be read."""
    model, scores = tmp_path / "model", tmp_path / "scores"
    for folder in (model, scores):
        make_checkpoint("qwen3", folder, num_layers=1, hidden_size=32, num_attention_heads=2, num_query_groups=1)
    config = json.loads((scores / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (scores / "config.json").write_text(json.dumps(config))
    role = InferRole(name="reward_model", device_mapping=[1], model_name_or_path=str(scores))
    settings = replace(settings_of(model, Layout(1, {})), reward_model=role)
    with pytest.raises(MegatuneError, match="it is a reward model") as caught:
        evaluation_settings(settings, model)
    assert caught.value.exit_code == ExitCode.INPUT
    assert "fix: write worker_cls: reward_model in rewards.DOMAIN" in str(caught.value)


def test_an_evaluation_of_a_dense_model_replays_no_experts(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path, num_layers=1, hidden_size=32, num_attention_heads=2, num_query_groups=1)
    settings = settings_of(model, Layout(1, {}))
    replayed = settings.actor_infer.model_copy(update={"return_routing": True, "dtype": "fp32"})
    role = evaluation_settings(replace(settings, actor_infer=replayed), model).actor_infer
    load_engine(role, seed=0, max_running=1, context=8)  # which refuses to return the experts of a dense model


def test_a_model_of_the_run_is_asked() -> None:
    asked: list[Any] = []

    async def ask(messages: list[dict[str, str]]) -> str:
        asked.extend(messages)
        return "Score: 9"

    judge = Judge("{question}|{response}|{reference}|Score: n", "inference", ask=ask)
    assert asyncio.run(judge(ANSWER)).score == 0.9
    assert asked == [{"role": "user", "content": "2+2? {response}|4 {reference}|four|Score: n"}]


@contextmanager
def api(replies: list[tuple[int, Any]], asked: list[Any]) -> Iterator[str]:
    """Serve an API as OpenAI's, which gives these replies in turn."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers.get("Authorization"), json.loads(body)))
            code, said = replies.pop(0)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_an_api_is_asked_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setenv("OPENAI_API_KEY", "key of the environment")
    asked: list[Any] = []
    replies = [(429, ""), (200, "YES"), (200, None), (401, ""), (200, "never asked")]
    with api(replies, asked) as url:
        judge = Judge(
            "Qwen2.5-7B-Instruct-RLVR-prompt",
            "api",
            "m",
            url,
            generating=Generating(temperature=0.5, top_p=0.9, top_k=5, max_new_tokens=100),
        )
        assert asyncio.run(judge(ANSWER)).score == 1
        with pytest.raises(RewardError, match="empty judgement"):
            asyncio.run(judge(ANSWER))
        with pytest.raises(RewardError, match="answers 401"):
            asyncio.run(judge(ANSWER))
    path, key, message = asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer key of the environment")
    assert {name: message[name] for name in message if name != "messages"} == {
        "model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 100
    }  # fmt: skip
    assert len(replies) == 1
    with pytest.raises(RewardError, match="refused"):  # nobody is there any more
        asyncio.run(judge(ANSWER))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"judge_prompt": "Qwen2.5-7B"}, "judge_prompt: 'Qwen2.5-7B' is unknown"),
        ({"judge_model_type": "api", "judge_api_url": "http://x"}, "judge_model_name"),
        ({"judge_model_type": "vllm"}, "one of api, inference, cluster"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(MegatuneError, match=said):
        Judge(**arguments)


def _engines(judge: InferRole) -> EngineGroup:
    def server(rank: int) -> EngineServer:
        context = RankContext(RankEnv(rank, 0, 1, 1, "127.0.0.1", 1, 0), Path(judge.model_name_or_path))
        return engine_server(context, judge, seed=0, max_running=4, length=300)

    return EngineGroup(judge, LocalGroup(*map(server, range(len(judge.devices)))), 4)  # type: ignore[arg-type]


async def _asked(ask: JudgeClient, texts: list[str]) -> list[str]:
    return await asyncio.gather(*(ask([{"role": "user", "content": text}]) for text in texts))


def test_a_model_of_the_run_judges_many_at_once(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "judge", num_layers=2, hidden_size=32, seed=1)
    generating = Generating(max_new_tokens=4, do_sample=False)
    judge = InferRole(
        device_mapping=[0, 1],
        model_name_or_path=str(folder),
        dtype="fp32",
        generating_args=generating,
        name="rewards.a",
    )
    engines = _engines(judge)
    ask = JudgeClient(engines, load_tokenizer(folder), generating, context=300)
    texts = [f"Is {number} right?" for number in range(10)]

    async def slept() -> list[str]:
        """Have the engines end what they do in the middle, and sleep for a while."""
        asked = asyncio.create_task(_asked(ask, texts))
        while not engines._calls:
            await asyncio.sleep(0)
        engines._asleep = {"cache"}
        await engines.abort()
        await asyncio.sleep(0.1)
        assert not engines._calls
        engines.wake()
        return await asked

    alone = [engines.run(_asked(ask, [text]))[0] for text in texts]
    assert engines.run(_asked(ask, texts)) == alone
    assert engines.run(slept()) == alone
    assert len(set(alone)) > 1
    with pytest.raises(RewardError, match="its context is 300"):
        engines.run(_asked(ask, ["long " * 300]))


def test_judges_are_found_by_domain(tmp_path: Path) -> None:
    own, shared = (
        InferRole(device_mapping=[0], model_name_or_path="m", name=name) for name in ("rewards.a", "reward_model")
    )
    rewards = {
        "a": RewardRole("a", "llm_judge", judge=own),
        "b": RewardRole("b", "llm_judge", arguments={"judge_model_type": "cluster"}),
        "c": RewardRole("c", "math_rule"),
    }
    found = replace(settings(tmp_path, tmp_path), rewards=rewards, reward_model=shared)
    assert found.judges == {"a": own, "b": shared}
    assert found.samplers == [found.actor_infer, shared, own]
