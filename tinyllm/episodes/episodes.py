"""Multi-turn sampling over any engine: sample a turn of every rollout, ask the environment, sample the next.

    engine = Episodes(EmbeddedEngine(policy, tokenizer), Calculator(), render, tokenizer, vocab_size=policy.vocab_size)
    completions = engine.sample(prompts, params)

It is an engine itself, so whatever takes one (a source, an evaluation) takes multi-turn rollouts too.

Simplified: all running rollouts sample their turn k together, then the environment is asked for one after the other. A
later turn is a prompt of its own with n = 1: the engine computes equal beginnings of one call once, but keeps no keys
and values from one turn to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic

from tinyllm.engine.scheduler import Detokenizer
from tinyllm.engine.seeds import seed_key
from tinyllm.episodes.environment import Environment, Render, State
from tinyllm.episodes.turns import Key, Turns, cut_turn
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, SamplingParams, fault_of
from tinyllm.seams import Engine


class Episodes(Engine, Generic[State]):
    """Wraps an engine and an environment; both are closed with it.

    A rollout ends when the environment says so, when a length limit cuts a turn, or after a whole turn when there have
    been max_turns, when params.max_new_tokens tokens are sampled in all turns together, or when the reply would bring
    the given tokens above max_given_tokens: then that reply is dropped. So a rollout ends with sampled tokens and has
    the finish reason of its last turn. The engine and the model have room for prompt + params.max_new_tokens +
    max_given_tokens positions.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment[State],
        render: Render,
        tokenizer: Detokenizer,
        *,
        vocab_size: int,
        max_turns: int = 8,
        max_given_tokens: int = 1024,
    ) -> None:
        assert max_turns >= 1 and max_given_tokens >= 0, (max_turns, max_given_tokens)
        self.engine, self.environment, self.render, self.tokenizer = engine, environment, render, tokenizer
        self.vocab_size, self.max_turns, self.max_given_tokens = vocab_size, max_turns, max_given_tokens

    def publish(self, revision: Revision) -> None:
        self.engine.publish(revision)

    def facts(self) -> Mapping[str, Any]:
        """Those of the engine, the environment's class and the limits."""
        kind = type(self.environment)
        limits = {"max_turns": self.max_turns, "max_given_tokens": self.max_given_tokens}
        return {**self.engine.facts(), "episodes": {"environment": f"{kind.__module__}.{kind.__qualname__}", **limits}}

    def close(self) -> None:
        try:
            self.environment.close()
        finally:
            self.engine.close()

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n rollouts of each prompt, in the order in which they end.

        A rollout whose environment raised, or replied with something else than text or token ids, has failed with the
        reason (finish_reason "error"). Raises EngineError as the engine does, every episode ended.
        """
        states: dict[Key, State] = {}
        try:
            results = [self._begin(Turns(p, sample), states, params) for p in prompts for sample in range(params.n)]
            done, running = _split(results)
            while running:
                turns = self._sample_turn(running, params)
                results = [self._step(rollout, turns.get(rollout.key), states, params) for rollout in running]
                ended, running = _split(results)
                done += ended
        finally:
            for state in states.values():
                with suppress(Exception):  # what ended this call is the error to see
                    self.environment.end(state)
        return done

    # -- the environment ------------------------------------------------------------------------------------------

    def _begin(self, rollout: Turns, states: dict[Key, State], params: SamplingParams) -> Turns | Completion:
        """The rollout before its first turn, its episode's state in `states`."""
        try:
            states[rollout.key] = self.environment.reset(rollout.prompt, rollout.sample)
        except Exception as error:  # noqa: BLE001 - not hidden: the recorded reason of the failed rollout
            return _failed(rollout, params, f"reset: {_raised(error)}")
        return rollout

    def _step(
        self, rollout: Turns, turn: Completion | None, states: dict[Key, State], params: SamplingParams
    ) -> Turns | Completion:
        """The rollout with its next turn and the reply, or, its episode ended, the completion that it comes to."""
        result = self._advance(rollout, turn, states[rollout.key], params)
        if isinstance(result, Turns):
            return result
        try:
            self.environment.end(states.pop(rollout.key))
        except Exception as error:  # noqa: BLE001 - not hidden: the recorded reason of the failed rollout
            if result.finish_reason != "error":
                return _failed(rollout, params, f"end: {_raised(error)}")
        return result

    def _advance(
        self, rollout: Turns, turn: Completion | None, state: State, params: SamplingParams
    ) -> Turns | Completion:
        """The rollout with its next turn and the reply to it, or the completion that it comes to."""
        where = f"turn {len(rollout.sampled) + 1}"
        if turn is None:
            return _failed(rollout, params, f"{where}: the engine returned no completion")
        if rollout.sampled:
            turn = cut_turn(turn, params.max_new_tokens - rollout.sampled_tokens, self.tokenizer)
        if fault := _fault(turn, params, self.vocab_size):
            # A first turn is what the engine gives without an environment: who checks completions sees it unchanged
            return _failed(rollout, params, f"{where}: {fault}") if rollout.sampled else turn
        rollout = rollout.with_turn(turn)
        if turn.finish_reason == "length":
            return rollout.completion(self.tokenizer)
        try:
            given = self._reply(state, turn, params)
        except Exception as error:  # noqa: BLE001 - not hidden: the recorded reason of the failed rollout
            return _failed(rollout, params, f"{where}: {_raised(error)}")
        if given is None or self._at_limit(rollout, given, params):
            return rollout.completion(self.tokenizer)
        return rollout.with_given(given)

    def _reply(self, state: State, turn: Completion, params: SamplingParams) -> tuple[int, ...] | None:
        """The token ids of the environment's reply; None: the episode is over. Raises ValueError for a bad reply."""
        reply = self.environment.respond(state, turn.text, turn.token_ids)
        if reply is None:
            return None
        ids = tuple(self.render(turn.token_ids, reply) if isinstance(reply, str) else reply)
        if not ids:
            raise ValueError("an empty reply: return None when the episode is over")
        none = (None,) * len(ids)
        fault = fault_of(ids, none, "length", params, vocab_size=self.vocab_size, sampled=(False,) * len(ids))
        if fault is not None:
            raise ValueError(f"the reply is no token ids: {fault[1]}")
        return tuple(map(int, ids))

    def _at_limit(self, rollout: Turns, given: Sequence[int], params: SamplingParams) -> bool:
        return (
            len(rollout.sampled) >= self.max_turns
            or rollout.sampled_tokens >= params.max_new_tokens
            or rollout.given_tokens + len(given) > self.max_given_tokens
        )

    # -- the engine -----------------------------------------------------------------------------------------------

    def _sample_turn(self, running: Sequence[Turns], params: SamplingParams) -> dict[Key, Completion]:
        """The next turn of every rollout that the engine returned one for. All of them have had equally many turns.

        A call of the engine has one max_new_tokens: that of the rollout with the most left, and turns are cut to what
        is left of their own. Rollouts that would so ask for more positions than one can have wait for a further call.
        """
        if not running[0].sampled:
            prompts = {rollout.key[:2]: rollout.prompt for rollout in running}
            return self._ask(list(prompts.values()), params)
        left = {r.key: params.max_new_tokens - r.sampled_tokens for r in running}
        asked = {r.key: r.next_prompt(self.tokenizer) for r in running}
        longest = max(len(rollout.prompt.token_ids) for rollout in running)
        positions = longest + params.max_new_tokens + self.max_given_tokens
        turns: dict[Key, Completion] = {}
        while asked:
            most = max(left[key] for key in asked)
            now = {key: prompt for key, prompt in asked.items() if len(prompt.token_ids) + most <= positions}
            found = self._ask(list(now.values()), replace(params, n=1, max_new_tokens=most))
            turns |= {key: found[p.id, p.draw, 0] for key, p in now.items() if (p.id, p.draw, 0) in found}
            asked = {key: prompt for key, prompt in asked.items() if key not in now}
        return turns

    def _ask(self, prompts: Sequence[Prompt], params: SamplingParams) -> dict[Key, Completion]:
        """What the engine returns, by key. Raises EngineError for what was not asked for or is there twice."""
        asked = {(p.id, p.draw, sample) for p in prompts for sample in range(params.n)}
        found: dict[Key, Completion] = {}
        for completion in self.engine.sample(prompts, params):
            key = (completion.prompt_id, completion.draw, completion.sample)
            if key not in asked or key in found:
                what = "twice" if key in found else "without being asked"
                raise EngineError(
                    f"the engine returned prompt {key[0]!r} draw {key[1]} sample {key[2]} {what}: fix its ids"
                )
            found[key] = completion
        return found


def _split(results: Sequence[Turns | Completion]) -> tuple[list[Completion], list[Turns]]:
    """(those that are over, those that go on)"""
    return [r for r in results if isinstance(r, Completion)], [r for r in results if isinstance(r, Turns)]


def _fault(turn: Completion, params: SamplingParams, vocab_size: int) -> str | None:
    """Why nothing can be sampled after a turn, or None."""
    if turn.finish_reason == "error":
        return turn.error or "the sampler failed without a reason"
    fault = fault_of(turn.token_ids, turn.logprobs, turn.finish_reason, params, vocab_size=vocab_size)
    return None if fault is None else fault[1]


def _failed(rollout: Turns, params: SamplingParams, reason: str) -> Completion:
    key = seed_key(params.seed, params.step, *rollout.key)
    return Completion.failed(rollout.prompt, rollout.sample, key, reason)


def _raised(error: Exception) -> str:
    return f"the environment raised {type(error).__name__}: {' '.join(str(error).split())}"
