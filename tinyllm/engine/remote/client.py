"""The rollout client: completions from servers, with the same contract as the embedded engine.

    client = HTTPRolloutClient.connect(["http://127.0.0.1:8000"])
    completions = client.sample(prompts, SamplingParams(max_new_tokens=24, n=8, stop_token_ids=(2,)))

Every (prompt, draw, sample) is one request with its own random key and id, and ends as exactly one completion: accepted
or failed with a reason. A retried request has a new id; the attempt before it was cut off with its connection, so its
response cannot arrive late, and a response that carries another id than the request is refused.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyllm.engine.remote.capabilities import ask_capabilities, require_fit
from tinyllm.engine.remote.dialects import CompletionRequest, CompletionResponse, require_sound
from tinyllm.engine.remote.http import (
    FailureKind,
    Http,
    InvalidResponse,
    RequestFailed,
    RetryPolicy,
    Run,
    gather,
    retry,
    run,
)
from tinyllm.engine.remote.servers import Server, Servers, api_key
from tinyllm.engine.seeds import seed_key
from tinyllm.engine.text import cut_at_stop
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, RevisionSpan, SamplingParams

log = logging.getLogger("tinyllm")


@dataclass
class Accounting:
    """What became of every requested completion: requested == accepted + sum of failed, after every call."""

    requested: int = 0
    accepted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By label of the failure."""
    attempts: int = 0
    """Requests sent."""
    cut_off: int = 0
    """Requests cut off by their deadline with their connection: a response that comes late finds nobody."""
    strangers: int = 0
    """Responses that carried another id than the request (late, doubled or mixed up on the way); never used."""

    @property
    def closed(self) -> bool:
        return self.requested == self.accepted + sum(self.failed.values())


@dataclass(frozen=True)
class _Sample:
    """One sample of one prompt, to be requested."""

    prompt: Prompt
    number: int
    key: int
    id: str
    """What the ids of its requests begin with."""


class HTTPRolloutClient:
    """Samples on one or several servers; fits the RolloutClient protocol by shape.

    tokenizer: decodes the ids, so that a text does not depend on the server; without one the server's text is taken.
    vocab_size: ids beyond it are refused. max_lag: more than 0 where a server may be updated while it samples, and
    tokens of several confirmed revisions may stand in one completion. run: where the requests of `sample` run.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        max_concurrent: int = 64,
        retry_policy: RetryPolicy | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        max_lag: int = 0,
        run: Run = run,
    ) -> None:
        assert max_concurrent >= 1, max_concurrent
        self.servers, self.max_concurrent, self.retry_policy = servers, max_concurrent, retry_policy or RetryPolicy()
        self.tokenizer, self.vocab_size, self.max_lag = tokenizer, vocab_size, max_lag
        self.accounting = Accounting()
        self._run = run
        self._name = uuid.uuid4().hex[:8]
        self._calls = 0

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        model: str | None = None,
        *,
        probe_prompt: Sequence[int] = (1, 2, 3, 4),
        max_concurrent: int = 64,
        retry_policy: RetryPolicy | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        max_lag: int = 0,
        run: Run = run,
    ) -> HTTPRolloutClient:
        """Ask every server what it can give. Raises EngineError for a server that cannot be trained on.

        probe_prompt: token ids of the questions.
        """
        urls = [clean_url(url) for url in urls]
        if len(set(urls)) != len(urls) or not urls:
            raise EngineError(f"engine.urls = {', '.join(urls) or 'nothing'}: give each server once")

        async def ask_all(http: Http) -> list[Server]:
            questions = [
                ask_capabilities(
                    http,
                    url,
                    model=model,
                    prompt=tuple(probe_prompt),
                    key=api_key(),
                    retry_policy=retry_policy,
                )
                for url in urls
            ]
            return [Server(facts, facts.model) for facts in await gather(questions)]

        return cls(
            Servers(run(ask_all)),
            max_concurrent=max_concurrent,
            retry_policy=retry_policy,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_lag=max_lag,
            run=run,
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
        """params.n completions of every prompt, prompt after prompt; a failed one says why.

        Raises EngineError before any work for what no server can give, and when no server is left.
        """
        self.require(prompts, params)

        def work(http: Http) -> Coroutine[Any, Any, list[Completion]]:
            return self.sample_within(http, asyncio.Semaphore(self.max_concurrent), prompts, params)

        return self._run(work)

    async def sample_within(
        self, http: Http, slots: asyncio.Semaphore, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[Completion]:
        """The same in an event loop that has other calls under way; slots bounds the requests of all of them."""
        self._calls += 1
        samples = [self._sample(prompt, params, number) for prompt in prompts for number in range(params.n)]
        self.accounting.requested += len(samples)
        done: list[Completion] = []

        async def one(sample: _Sample) -> Completion:
            async with slots:  # the deadline begins when its turn has come
                completion = await self._complete(http, sample, params)
            done.append(completion)
            return completion

        try:
            return await gather([one(sample) for sample in samples])
        finally:
            self._account(len(samples), done)

    def _sample(self, prompt: Prompt, params: SamplingParams, number: int) -> _Sample:
        key = seed_key(params.seed, params.step, prompt.id, prompt.draw, number)
        return _Sample(prompt, number, key, f"{self._name}-{self._calls}-{params.step}-{key:016x}-{number}")

    def _account(self, requested: int, done: Sequence[Completion]) -> None:
        """Count what became of a call's completions; those that an exception cut off failed with it."""
        self.accounting.accepted += sum(c.finish_reason != "error" for c in done)
        if missing := requested - len(done):
            self.accounting.failed["the call was stopped"] += missing
        failed = [c for c in done if c.finish_reason == "error"]
        if failed:
            first = failed[0]
            log.warning(
                "%d of %d completions failed, the first that of prompt %r, sample %d: %s",
                len(failed), requested, first.prompt_id, first.sample, first.error,
            )  # fmt: skip

    async def _complete(self, http: Http, sample: _Sample, params: SamplingParams) -> Completion:
        server: Server | None = None

        async def attempt(number: int, seconds: float) -> Completion:
            nonlocal server
            server = self.servers.pick(avoid=server)
            request = CompletionRequest(
                f"{sample.id}.{number}", server.model, sample.prompt.token_ids, sample.key, params, server.facts.seeds
            )
            sent_under = server.revision
            response = await exchange(http, server, request, seconds, self.accounting)
            response = require_sound(response, request, self.vocab_size)
            if self.max_lag == 0:
                return self._accept(sample, params, response, revision_of(response, server))
            await server.wait_until_updated()
            spans = spans_of(response, server, sent_under)
            revision = spans[0].revision
            assert revision is not None, spans
            return self._accept(sample, params, response, revision, spans if len(spans) > 1 else ())

        try:
            return await retry(self.retry_policy, attempt)
        except RequestFailed as error:
            where = f" ({server.url})" if server else ""
            self.accounting.failed[error.label] += 1
            return Completion.failed(sample.prompt, sample.number, sample.key, f"{error}{where}")

    def _accept(
        self,
        sample: _Sample,
        params: SamplingParams,
        response: CompletionResponse,
        revision: Revision,
        spans: tuple[RevisionSpan, ...] = (),
    ) -> Completion:
        text = response.text
        if self.tokenizer is not None:
            text = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
            cut = cut_at_stop(text, params.stop_strings)
            text = text if cut is None else cut
        return Completion(
            prompt_id=sample.prompt.id,
            draw=sample.prompt.draw,
            sample=sample.number,
            token_ids=tuple(response.token_ids),
            logprobs=tuple(float(x) for x in response.logprobs),
            finish_reason=response.finish_reason,  # type: ignore[arg-type]
            seed_key=sample.key,
            revision=revision,
            text=text,
            spans=spans,
        )


async def exchange(
    http: Http, server: Server, request: CompletionRequest, seconds: float, accounting: Accounting | None = None
) -> CompletionResponse:
    """One request to one server, its response read but not yet checked. Raises RequestFailed."""
    accounting = accounting or Accounting()
    accounting.attempts += 1
    server.outstanding += 1
    url, body = server.url + server.dialect.path, server.dialect.write(request)
    try:
        answer = await http.request("POST", url, body, timeout_s=seconds, key=api_key())
    except RequestFailed as error:
        accounting.cut_off += error.kind is FailureKind.TIMED_OUT
        await server.check_after(error, http)
        raise
    finally:
        server.outstanding -= 1
    response = server.dialect.read(answer)
    if server.facts.echoes_id and not (response.id or "").endswith(request.id):
        accounting.strangers += 1
        raise RequestFailed(FailureKind.WRONG_ID, f"id {response.id!r}, asked {request.id!r}", retriable=True)
    return response


def revision_of(response: CompletionResponse, server: Server) -> Revision:
    """The revision that the server confirmed for these tokens.

    Raises InvalidResponse when they are of several revisions, or of another than the published one.
    """
    if response.spans is None:
        return server.revision or Revision(-1, "")
    versions = list(dict.fromkeys(version for version, _, _ in response.spans))
    covered = sum(end - start for _, start, end in response.spans)
    if len(versions) != 1 or covered != len(response.token_ids):
        raise InvalidResponse("mixed revisions", f"tokens of {versions or 'no revision'}, of {covered} tokens said")
    if server.label is None:
        return parse_label(versions[0])
    if versions[0] != server.label:
        raise InvalidResponse("unconfirmed revision", f"sampled by {versions[0]!r}, published was {server.label!r}")
    assert server.revision is not None
    return server.revision


def spans_of(response: CompletionResponse, server: Server, sent_under: Revision | None) -> tuple[RevisionSpan, ...]:
    """Which revisions drew these tokens, each confirmed by the server.

    sent_under: the server's revision when the request was sent; where responses name none (adapters), all tokens are
    of it. Raises InvalidResponse for a revision that was not confirmed, and for tokens left out.
    """
    count = len(response.token_ids)
    if response.spans is None:
        return (RevisionSpan(sent_under or Revision(-1, ""), 0, count),)
    found: list[RevisionSpan] = []
    for version, start, end in response.spans:
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
