"""Keeps rollout engines busy with the requests of groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from megatune.rl.pipeline.engines import Engines
from megatune.rl.pipeline.groups import Group, Sampling, place_of
from megatune.rl.samples import Request, Response


class Sampler:
    """Requests wait in the order of their groups; the engine with the fewest in flight takes the next group.

    Args:
        max_running: most requests in flight to an engine.
    """

    def __init__(self, engines: Engines, sampling: Sampling, max_running: int) -> None:
        self._engines, self._sampling, self._max_running = engines, sampling, max_running
        self._groups: dict[int, Group] = {}
        self._waiting: deque[Request] = deque()
        self._engine_of: dict[str, int] = {}  # requests in flight

    @property
    def groups(self) -> list[Group]:
        """Those that are not finished, in the order of their arrival."""
        return list(self._groups.values())

    def add(self, groups: Iterable[Group]) -> None:
        """Take groups; `pump` samples them."""
        for group in groups:
            group.longest = self._sampling.response_length
            self._groups[group.number] = group
            self._waiting.extend(self._sampling.requests(group))

    def pump(self, *, wait: bool = True) -> list[Group]:
        """Let the engines sample for a moment, and return the groups that are finished.

        Args:
            wait: for the end of this moment; otherwise a later call returns what it finishes.
        """
        self._submit()
        return self._settled(self._engines.step(wait=wait)) if self._engine_of else []

    def pause(self) -> list[Group]:
        """Leave nothing in flight, and return the groups that are finished by then. What was sampled of the others
        stays with them, and goes on with the next `pump`."""
        finished = self._settled(self._engines.settle())
        if self._engine_of:
            for response in self._engines.abort():
                self._note(response)
        self._engine_of = {}
        self._waiting = deque(request for group in self.groups for request in self._sampling.requests(group))
        return finished

    def drop(self, numbers: Iterable[int]) -> list[Group]:
        """End groups and return them; the engines are at no step."""
        chosen = [self._groups.pop(number) for number in numbers if number in self._groups]
        gone = {group.number: group for group in chosen}
        if ids := [request_id for request_id in self._engine_of if place_of(request_id)[0] in gone]:
            self._engines.abort(ids)
            self._engine_of = {key: engine for key, engine in self._engine_of.items() if key not in set(ids)}
        self._waiting = deque(request for request in self._waiting if place_of(request.id)[0] not in gone)
        return chosen

    def _submit(self) -> None:
        loads = [0] * self._engines.number
        for busy in self._engine_of.values():
            loads[busy] += 1
        chosen: list[list[Request]] = [[] for _ in loads]
        homes: dict[int, int] = {}  # the prompt of a group is computed once, by one engine
        while self._waiting and min(loads) < self._max_running:
            request = self._waiting.popleft()
            group = place_of(request.id)[0]
            engine = homes.get(group)
            if engine is None or loads[engine] == self._max_running:
                engine = homes[group] = loads.index(min(loads))
            chosen[engine].append(request)
            loads[engine] += 1
            self._engine_of[request.id] = engine
        if any(chosen):
            self._engines.submit(chosen)

    def _settled(self, responses: Iterable[Response]) -> list[Group]:
        """Note finished responses, and return the groups that have all of theirs."""
        finished = []
        for response in responses:
            self._engine_of.pop(response.id, None)
            if (group := self._note(response)) is not None and group.is_finished:
                finished.append(self._groups.pop(group.number))
        return finished

    def _note(self, response: Response) -> Group | None:
        """Note a response, or the part of one, with its group."""
        number, place = place_of(response.id)
        if (group := self._groups.get(number)) is None:
            return None
        if (before := group.parts.get(place)) is not None:  # engines know nothing of observations
            response = replace(response, observed=before.observed)
        if response.finish == "abort":
            if len(response.response_ids):
                group.parts[place] = response
        else:
            group.responses[place] = response
            group.parts.pop(place, None)
        return group
