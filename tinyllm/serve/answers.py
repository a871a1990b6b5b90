"""Answers in OpenAI's form: whole, or as a stream of chunks. Beside OpenAI's fields there are

seed             of the request, drawn by the server when the request has none (top level)
weight_versions  of each choice: [{version, start, end}], which revision sampled its tokens [start, end)
token_ids        of each choice, the stop token included, and prompt_token_ids, with return_token_ids
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from tinyllm.records import Completion, Revision
from tinyllm.serve.fields import to_json
from tinyllm.serve.protocol import CompletionParams
from tinyllm.serve.text import TextStream
from tinyllm.serve.worker import Drawn, Finished

DONE = b"data: [DONE]\n\n"


class TokenNames:
    """The text of single tokens, special ones included; each is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._names: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return name


class AnswerWriter:
    """What one request is answered with."""

    def __init__(
        self,
        asked: CompletionParams,
        prompts: Sequence[tuple[int, ...]],
        model: str,
        names: TokenNames,
        label: Callable[[Revision], str],
    ) -> None:
        self.asked, self.prompts, self.names, self.label = asked, prompts, names, label
        kind = "chat.completion" if asked.chat else "text_completion"
        self.id = asked.request_id or ("chatcmpl-" if asked.chat else "cmpl-") + secrets.token_hex(12)
        self.head: dict[str, Any] = {
            "id": self.id,
            "object": kind + (".chunk" if asked.chat and asked.stream else ""),
            "created": int(time.time()),
            "model": model,
            "seed": asked.seed,
        }
        self._lead = b"data: " + to_json(self.head)[:-1]  # of every chunk, written once
        self._streams: dict[int, _ChoiceStream] = {}

    # -- whole ----------------------------------------------------------------------------------------------------

    def whole(self, done: dict[int, Finished]) -> bytes:
        """The body, given every choice."""
        choices = [self._choice(index, done[index]) for index in range(len(done))]
        return to_json({**self.head, "choices": choices, "usage": self.usage(done)})

    def _choice(self, index: int, done: Finished) -> dict[str, Any]:
        completion = done.completion
        choice: dict[str, Any] = {"index": index}
        if self.asked.chat:
            choice["message"] = {"role": "assistant", "content": completion.text}
        else:
            choice["text"] = completion.text
        logprobs = None
        if self.asked.logprobs:
            top = done.top or [[]] * len(completion.token_ids)
            tokens = zip(completion.token_ids, completion.logprobs, top, strict=True)
            drawn = [Drawn(token, logprob, others) for token, logprob, others in tokens if logprob is not None]
            logprobs = self.logprobs(drawn, 0)[0]
        choice |= {"logprobs": logprobs, "finish_reason": completion.finish_reason, **self.versions(completion)}
        if self.asked.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = self.prompt(index)
        return choice

    def prompt(self, index: int) -> tuple[int, ...]:
        return self.prompts[index // self.asked.n]

    def versions(self, completion: Completion) -> dict[str, Any]:
        spans = [
            {"version": self.label(s.revision), "start": s.start, "end": s.end}
            for s in completion.all_spans
            if s.revision
        ]
        return {"weight_versions": spans}

    def usage(self, done: dict[int, Finished]) -> dict[str, int]:
        """Each prompt counts once; the stop token counts."""
        prompt = sum(map(len, self.prompts))
        completion = sum(len(d.completion.token_ids) for d in done.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    # -- in chunks ------------------------------------------------------------------------------------------------

    def chunk(self, index: int, drawn: Sequence[Drawn], done: Finished | None) -> bytes:
        """What further tokens of a choice, and perhaps its end, bring; empty when there is nothing to say yet."""
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = _ChoiceStream(self, index)
        choice = stream.next(drawn, done)
        return b'%s,"choices":[%s]}\n\n' % (self._lead, to_json(choice)) if choice else b""

    def last_chunks(self, done: dict[int, Finished]) -> bytes:
        """Usage, if asked for, and the end mark."""
        usage = event({**self.head, "choices": [], "usage": self.usage(done)}) if self.asked.include_usage else b""
        return usage + DONE

    # -- log-probabilities ----------------------------------------------------------------------------------------

    def logprobs(self, drawn: Sequence[Drawn], offset: int) -> tuple[dict[str, Any], int]:
        """The block of a choice, and where in its text the next token begins."""
        if self.asked.chat:
            content = [
                {
                    **self._entry(d.token, d.logprob),
                    "top_logprobs": [self._entry(*alternative) for alternative in d.top],
                }
                for d in drawn
            ]
            return {"content": content, "refusal": None}, offset
        offsets = []
        for d in drawn:
            offsets.append(offset)
            offset += 0 if d.token in self.names.special else len(self.names(d.token))
        top = None
        if self.asked.top_logprobs:
            # The drawn token too, as OpenAI has it. Tokens with one text (parts of characters) share an entry.
            top = [
                {**{self._name(token): value for token, value in reversed(d.top)}, self._name(d.token): d.logprob}
                for d in drawn
            ]
        return {
            "text_offset": offsets,
            "token_logprobs": [d.logprob for d in drawn],
            "tokens": [self._name(d.token) for d in drawn],
            "top_logprobs": top,
        }, offset

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.asked.name_tokens_by_id else self.names(token)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self.names(token)
        return {"token": name, "logprob": logprob, "bytes": None if "\ufffd" in name else list(name.encode())}


class _ChoiceStream:
    """One choice, growing."""

    def __init__(self, answer: AnswerWriter, index: int) -> None:
        self.answer, self.index = answer, index
        self.text = TextStream(answer.names.tokenizer, answer.asked.stop)
        self.offset = 0
        self.begun = False

    def next(self, drawn: Sequence[Drawn], done: Finished | None) -> dict[str, Any] | None:
        asked = self.answer.asked
        if done is None:
            text = self.text.push([d.token for d in drawn])
            if not text and not asked.return_token_ids and not asked.logprobs:
                return None
        else:
            text = self.text.finish(done.completion.text)
        choice: dict[str, Any] = {"index": self.index}
        if asked.chat:
            delta: dict[str, Any] = {"content": text} if text or done is None else {}
            choice["delta"] = delta if self.begun else {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = None
        if asked.logprobs and drawn:
            choice["logprobs"], self.offset = self.answer.logprobs(drawn, self.offset)
        choice["finish_reason"] = done.completion.finish_reason if done else None
        if asked.return_token_ids:
            choice["token_ids"] = [d.token for d in drawn]
            if not self.begun:
                choice["prompt_token_ids"] = self.answer.prompt(self.index)
        if done:
            choice |= self.answer.versions(done.completion)
        self.begun = True
        return choice


def event(obj: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(obj) + b"\n\n"
