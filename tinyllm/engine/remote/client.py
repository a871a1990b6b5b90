"""The rollout client: completions from servers, with the same contract as the embedded engine.

    client = HTTPRolloutClient.connect(["http://127.0.0.1:8000"])
    completions = client.sample(prompts, SamplingParams(max_new_tokens=24, n=8, stop_token_ids=(2,)))

Every (prompt, draw, sample) is one request with its own random key and id, and ends as exactly one completion: accepted
or failed with a reason. A request that is tried again has a new id; the attempt before it was cut off with its
connection, so its answer cannot arrive late, and one that carries another id than was asked is refused.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyllm.engine.remote.capabilities import ask_capabilities, require_fit
from tinyllm.engine.remote.dialects import CompletionRequest, CompletionResponse, InvalidResponse, require_sound
from tinyllm.engine.remote.http import Http, RequestFailed, RetryPolicy, gather, retry, run
from tinyllm.engine.remote.servers import Server, Servers, api_key
from tinyllm.engine.sampling import seed_key
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, RevisionSpan, SamplingParams

log = logging.getLogger("tinyllm")


@dataclass
class Accounting:
    """What became of every completion asked for: requested == accepted + sum of failed, after every call."""

    requested: int = 0
    accepted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By kind of reason."""
    attempts: int = 0
    """Requests sent."""
    cut_off: int = 0
    """Of these, cut off by their deadline with their connection: an answer that comes late finds nobody."""
    strangers: int = 0
    """Answers that carried another id than was asked (late, doubled or mixed up on the way); never used."""

    @property
    def closed(self) -> bool:
        return self.requested == self.accepted + sum(self.failed.values())


@dataclass(frozen=True)
class _Wanted:
    """One completion of one call."""

    prompt: Prompt
    sample: int
    key: int
    name: str


class HTTPRolloutClient:
    """Samples on one or several servers; fits the RolloutClient protocol by shape.

    tokenizer: decodes the ids, so that a text does not depend on the server; without one the server's text is taken.
    vocab_size: ids beyond it are refused.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        max_concurrent: int = 64,
        patience: RetryPolicy | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> None:
        assert max_concurrent >= 1, max_concurrent
        self.servers, self.max_concurrent, self.patience = servers, max_concurrent, patience or RetryPolicy()
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.accounting = Accounting()
        self.run: Callable[[Callable[[Http], Coroutine[Any, Any, Any]]], Any] = run
        """Runs the requests of a call; a pool puts its own event loop here."""
        self.max_lag = 0
        """More than 0: an update may come while a completion is sampled."""
        self._name = uuid.uuid4().hex[:8]
        self._calls = 0

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        model: str | None = None,
        *,
        max_concurrent: int = 64,
        deadline_s: float = 600.0,
        attempts: int = 4,
        probe_prompt: Sequence[int] = (1, 2, 3, 4),
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> HTTPRolloutClient:
        """Ask every server what it can give. Raises EngineError for what cannot be trained on.

        probe_prompt: token ids of the questions.
        """
        urls = [clean_url(url) for url in urls]
        if len(set(urls)) != len(urls) or not urls:
            raise EngineError(f"engine.urls = {', '.join(urls) or 'nothing'}: give each server once")
        patience = RetryPolicy(attempts, deadline_s)

        async def ask_all(http: Http) -> list[Any]:
            questions = [
                ask_capabilities(
                    http,
                    url,
                    model=model,
                    prompt=tuple(probe_prompt),
                    key=api_key(),
                    patience=patience,
                )
                for url in urls
            ]
            return await gather(questions)

        servers = Servers([Server(facts, facts.model) for facts in run(ask_all)])
        return cls(
            servers, max_concurrent=max_concurrent, patience=patience, tokenizer=tokenizer, vocab_size=vocab_size
        )

    def capabilities(self) -> list[dict[str, Any]]:
        """What each server gives, for the run's manifest."""
        return [server.facts.as_dict() for server in self.servers.all]

    def require(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raises EngineError before any work for what a server cannot give: its distribution, or the length."""
        for server in self.servers.all:
            require_fit(server.facts, params)
            limit = server.facts.max_length
            for prompt in prompts:
                if limit is not None and len(prompt.token_ids) + params.max_new_tokens > limit:
                    raise EngineError(
                        f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens and may grow by "
                        f"{params.max_new_tokens}, more than the {limit} of {server.url}; lower "
                        "sampling.max_new_tokens or data.max_prompt_tokens, or start the server with more"
                    )

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt; what failed says why.

        Raises EngineError before any work for what no server can give, and when no server is left.
        """
        self.require(prompts, params)
        wanted, done, call = self._begin(prompts, params)
        try:
            self.run(lambda http: call.whole(http, wanted))
        finally:
            self._settle(wanted, done)
        return [done[index] for index in range(len(wanted))]

    async def sample_within(
        self, http: Http, slots: asyncio.Semaphore, prompt: Prompt, params: SamplingParams
    ) -> list[Completion]:
        """The same for one prompt, in an event loop that has other calls under way; slots bounds the requests of all.

        With max_lag, tokens may be of several revisions that the server has confirmed.
        """
        self.servers.enter_loop()
        wanted, done, call = self._begin([prompt], params)
        try:
            await gather([call.one(http, slots, index, want) for index, want in enumerate(wanted)])
        finally:
            self._settle(wanted, done)
        return [done[index] for index in range(len(wanted))]

    def _begin(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[list[_Wanted], dict[int, Completion], _Call]:
        self._calls += 1
        wanted = [self._want(prompt, params, sample) for prompt in prompts for sample in range(params.n)]
        self.accounting.requested += len(wanted)
        done: dict[int, Completion] = {}
        return wanted, done, _Call(self, params, done)

    def _want(self, prompt: Prompt, params: SamplingParams, sample: int) -> _Wanted:
        key = seed_key(params.seed, params.step, prompt.id, prompt.draw, sample)
        return _Wanted(prompt, sample, key, f"{self._name}-{self._calls}-{params.step}-{key:016x}-{sample}")

    def _settle(self, wanted: Sequence[_Wanted], done: dict[int, Completion]) -> None:
        """Close the books: what an exception left open failed with it."""
        self.accounting.accepted += sum(c.finish_reason != "error" for c in done.values())
        if missing := len(wanted) - len(done):
            self.accounting.failed["the call was stopped"] += missing
        failed = [c for c in done.values() if c.finish_reason == "error"]
        if failed:
            first = failed[0]
            log.warning(
                "%d of %d completions failed, the first that of prompt %r, sample %d: %s",
                len(failed), len(wanted), first.prompt_id, first.sample, first.error,
            )  # fmt: skip


class _Call:
    """The state of one `sample` call."""

    def __init__(self, client: HTTPRolloutClient, params: SamplingParams, done: dict[int, Completion]) -> None:
        self.client, self.params, self.done = client, params, done
        self.sent_by: dict[int, Server] = {}

    async def one(self, http: Http, slots: asyncio.Semaphore, index: int, want: _Wanted) -> None:
        async with slots:  # the deadline begins when its turn has come
            self.done[index] = await self._complete(http, index, want)

    async def whole(self, http: Http, wanted: Sequence[_Wanted]) -> None:
        client = self.client
        client.servers.enter_loop()
        slots = asyncio.Semaphore(client.max_concurrent)
        await gather([self.one(http, slots, index, want) for index, want in enumerate(wanted)])
        await self._require_same_weights(http, wanted)

    async def _complete(self, http: Http, index: int, want: _Wanted) -> Completion:
        client, server = self.client, None

        async def attempt(number: int, seconds: float) -> Completion:
            nonlocal server
            server = client.servers.pick(avoid=server)
            ask = CompletionRequest(
                f"{want.name}.{number}", server.model, want.prompt.token_ids, want.key, self.params, server.facts.seeds
            )
            sent_under = server.revision
            answer = await exchange(http, server, ask, seconds, client.accounting)
            self.sent_by[index] = server
            answer = require_sound(answer, ask, client.vocab_size)
            if client.max_lag == 0:
                return self._accept(want, answer, revision_of(answer, server))
            await server.settled()
            spans = spans_of(answer, server, sent_under)
            return self._accept(want, answer, spans[0].revision, spans if len(spans) > 1 else ())

        try:
            return await retry(client.patience, attempt)
        except (RequestFailed, InvalidResponse) as error:
            where = f" ({server.url})" if server else ""
            client.accounting.failed[error.kind] += 1
            return _failed(want, f"{error}{where}")

    def _accept(
        self, want: _Wanted, answer: CompletionResponse, revision: Revision, spans: tuple[RevisionSpan, ...] = ()
    ) -> Completion:
        ids = tuple(answer.token_ids)
        text = answer.text
        if self.client.tokenizer is not None:
            text = _cut(self.client.tokenizer.decode(list(ids), skip_special_tokens=True), self.params.stop_strings)
        return Completion(
            prompt_id=want.prompt.id,
            draw=want.prompt.draw,
            sample=want.sample,
            token_ids=ids,
            logprobs=tuple(float(x) for x in answer.logprobs),
            finish_reason=answer.finish_reason,  # type: ignore[arg-type]
            seed_key=want.key,
            revision=revision,
            text=text,
            spans=spans,
        )

    async def _require_same_weights(self, http: Http, wanted: Sequence[_Wanted]) -> None:
        """Where answers carry no revision, the server is asked again afterwards: weights that changed in between."""
        for server in {id(s): s for s in self.sent_by.values() if s.read_label is not None}.values():
            assert server.read_label is not None
            try:
                label = await server.read_label(http)
            except RequestFailed as error:
                label = f"unknown: {error}"
            if label == server.label:
                continue
            server.quarantine(f"its weights are {label!r}, not the published {server.label!r}")
            for index, by in self.sent_by.items():
                if by is server and self.done[index].finish_reason != "error":
                    kind = "unconfirmed revision"
                    self.client.accounting.failed[kind] += 1
                    self.done[index] = _failed(wanted[index], f"{kind}: {server.quarantined}")


async def exchange(
    http: Http, server: Server, ask: CompletionRequest, seconds: float, accounting: Accounting | None = None
) -> CompletionResponse:
    """One request to one server, its answer read but not yet judged. Raises Failed and Bad."""
    books = accounting or Accounting()
    books.attempts += 1
    server.outstanding += 1
    try:
        body = await http.ask(
            "POST", server.url + server.dialect.path, server.dialect.write(ask), timeout_s=seconds, key=api_key()
        )
    except RequestFailed as error:
        books.cut_off += error.kind == "no answer in time"
        await server.suspect(http, error)
        raise
    finally:
        server.outstanding -= 1
    answer = server.dialect.read(body)
    if server.facts.echoes_id and not (answer.id or "").endswith(ask.id):
        books.strangers += 1
        raise RequestFailed("another request's answer", f"id {answer.id!r}, asked {ask.id!r}", again=True)
    return answer


def revision_of(answer: CompletionResponse, server: Server) -> Revision:
    """The revision that the server confirmed for these tokens. Raises Bad when it is several, or not the published."""
    if answer.spans is None:
        return server.revision or Revision(-1, "")
    versions = list(dict.fromkeys(version for version, _, _ in answer.spans))
    covered = sum(end - start for _, start, end in answer.spans)
    if len(versions) != 1 or covered != len(answer.token_ids):
        raise InvalidResponse("mixed revisions", f"tokens of {versions or 'no revision'}, of {covered} tokens said")
    if server.label is None:
        return parse_label(versions[0])
    if versions[0] != server.label:
        raise InvalidResponse("unconfirmed revision", f"sampled by {versions[0]!r}, published was {server.label!r}")
    assert server.revision is not None
    return server.revision


def spans_of(answer: CompletionResponse, server: Server, sent_under: Revision | None) -> tuple[RevisionSpan, ...]:
    """Which revisions drew these tokens, each confirmed by the server. Raises Bad for one that is not, and for gaps.

    sent_under: the server's when the request was sent; a server whose answers name none goes on with these weights.
    """
    count = len(answer.token_ids)
    if answer.spans is None:
        return (RevisionSpan(sent_under or Revision(-1, ""), 0, count),)
    found: list[RevisionSpan] = []
    for version, start, end in answer.spans:
        revision = server.confirmed.get(version)
        if revision is None:
            raise InvalidResponse("unconfirmed revision", f"sampled by {version!r}, published was {server.label!r}")
        if start != (found[-1].end if found else 0) or end <= start:
            raise InvalidResponse(
                "mixed revisions", f"tokens {start} to {end} are said to be of {version!r}, after {found}"
            )
        if found and found[-1].revision == revision:
            found[-1] = RevisionSpan(revision, found[-1].start, end)
        else:
            found.append(RevisionSpan(revision, start, end))
    if not found or found[-1].end != count:
        raise InvalidResponse(
            "mixed revisions", f"revisions of {found[-1].end if found else 0} of {count} tokens were said"
        )
    return tuple(found)


def parse_label(label: str) -> Revision:
    """A weight version as a revision: "12:1a2b" or "12"; another label stands as the hash of step -1."""
    step, _, digest = label.partition(":")
    return Revision(int(step), digest) if step.isascii() and step.isdigit() and len(step) < 19 else Revision(-1, label)


def clean_url(url: str) -> str:
    """A server's address without the path of its API. Raises EngineError."""
    if "@" in url:
        raise EngineError("engine.urls: an address stands in the run's records, so it has no key; set TINYLLM_API_KEY")
    cleaned = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if not cleaned.startswith(("http://", "https://")) or len(cleaned.partition("//")[2]) == 0:
        raise EngineError(f"engine.urls: {url!r} is no address; write it as in http://127.0.0.1:8000")
    return cleaned


def _failed(want: _Wanted, reason: str) -> Completion:
    prompt = want.prompt
    return Completion(
        prompt.id, prompt.draw, want.sample, (), (), "error", want.key, Revision(-1, ""), "", error=reason
    )


def _cut(text: str, stop_strings: Sequence[str]) -> str:
    found = [i for i in (text.find(s) for s in stop_strings) if i >= 0]
    return text[: min(found)] if found else text
