"""What is called of SGLang, which cannot be installed beside this project: a stand-in with the same interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatune.errors import MegatuneError
from megatune.rl.rollout.sglang_engine import SglangEngine
from megatune.rl.transport import Route, Sender

Answer = tuple[bool, str]


class StandIn:
    """Refuses, as SGLang 0.5.23, weights outside of an update, and an update inside of another one."""

    def __init__(self) -> None:
        self.is_open, self.weights = False, dict[str, torch.Tensor]()

    def begin_weight_update(self) -> Answer:
        was_open, self.is_open = self.is_open, True
        return not was_open, "already open"

    def update_weights_from_tensor(self, named: list[tuple[str, torch.Tensor]], flush_cache: bool) -> Answer:
        self.weights |= dict(named)
        return self.is_open and not flush_cache, "none is open"

    def end_weight_update(self) -> Answer:
        was_open, self.is_open = self.is_open, False
        return was_open, "none is open"

    def flush_cache(self) -> Any:
        return SimpleNamespace(success=not self.is_open, message="")


def test_updates() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7, 8])}
    theirs, sender = StandIn(), Sender(Route("file"), torch.device("cpu"))
    engine = SglangEngine(theirs, {name: tuple(each.shape) for name, each in weights.items()}, seeds=False,
                          has_weights=False)  # fmt: skip
    engine.connect(Route("file"), 0)
    for version in (1, 2):
        engine.begin_update(version, len(weights))
        engine.begin_update(version, len(weights))  # anew, after a broadcast that broke off
        for name, each in weights.items():
            assert engine.update(sender.pack({name: each}))
        engine.commit_update(version)
        assert engine.version == version
    # Its processes open what they are given, and memory of a third process cannot be handed on.
    sender.pack({name: torch.zeros_like(each) for name, each in weights.items()})
    sender.pack({name: torch.zeros_like(each) for name, each in weights.items()})
    for name, each in weights.items():
        torch.testing.assert_close(theirs.weights[name], each)
        assert theirs.weights[name].untyped_storage().nbytes() == each.nbytes, "a view of the bucket"


@pytest.mark.parametrize("missing", ["begin_weight_update", "end_weight_update"])
def test_what_sglang_refuses_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = StandIn()
    monkeypatch.setattr(theirs, missing, lambda: (False, "not now"))
    engine = SglangEngine(theirs, {}, seeds=False, has_weights=False)

    def update() -> None:
        engine.begin_update(1, 0)
        engine.commit_update(1)

    with pytest.raises(MegatuneError, match="not now"):
        update()
