"""The rollout client: completions from servers, with the same contract as the embedded engine.

    client = HTTPRolloutClient(["http://127.0.0.1:8000"])
    completions = client.sample(prompts, SamplingParams(max_new_tokens=24, n=8, stop_token_ids=(2,)))

Every (prompt, draw, sample) is one request with its own random key and id, and ends as exactly one completion: accepted
or failed with a reason. A retried request has a new id; the attempt before it was cut off with its connection, so its
response cannot arrive late, and a response that carries another id than the request is refused.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from tinyllm.engine.remote.capabilities import Capabilities, ask_capabilities, require_fit
from tinyllm.engine.remote.dialects import CompletionRequest, CompletionResponse, require_sound
from tinyllm.engine.remote.http import (
    FailureKind,
    Http,
    InvalidResponse,
    RequestFailed,
    RetryPolicy,
    RunRequests,
    api_key,
    gather,
    retry,
    run,
)
from tinyllm.engine.remote.servers import Server, Servers
from tinyllm.engine.seeds import seed_key
from tinyllm.engine.text import cut_at_stop
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, RevisionSpan, SamplingParams

log = logging.getLogger("tinyllm")


class HTTPRolloutClient:
    """Samples on one or several servers; fits the RolloutClient protocol by shape.

    Every server is asked for its properties first. Raises EngineError for a server that cannot be trained on. urls: as
    in http://127.0.0.1:8000, or http://127.0.0.1:8000#NAME where a server has several models. probe_prompt: token ids
    of the questions. tokenizer: decodes the ids, so that a text does not depend on the server; without one the server's
    text is taken. vocab_size: ids beyond it are refused. max_lag: more than 0 where a server may be updated while it
    samples, so that tokens of several confirmed revisions may stand in one completion. run: where the requests run
    (http.py).
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        probe_prompt: tuple[int, ...] = (1, 2, 3, 4),
        max_concurrent: int = 64,
        retry_policy: RetryPolicy | None = None,
        tokenizer: Any = None,
        vocab_size: int = 2**31,
        max_lag: int = 0,
        run: RunRequests = run,
    ) -> None:
        assert max_concurrent >= 1, max_concurrent
        self.max_concurrent, self.retry_policy = max_concurrent, retry_policy or RetryPolicy()
        self.tokenizer, self.vocab_size, self.max_lag = tokenizer, vocab_size, max_lag
        self._run = run
        self._name = uuid.uuid4().hex[:8]
        self._calls = 0
        addresses, model = read_urls(urls)

        def ask_all(http: Http) -> Coroutine[Any, Any, list[Capabilities]]:
            return gather([ask_capabilities(http, url, model, probe_prompt, self.retry_policy) for url in addresses])

        self.servers = Servers([Server(facts, facts.model) for facts in run(ask_all)])

    def capabilities(self) -> list[dict[str, Any]]:
        """The properties of each server, for the run's manifest."""
        return [asdict(server.facts) for server in self.servers.all]

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
        """`sample` in an event loop that has other calls under way; slots bounds the requests of all of them."""
        self._calls += 1
        call = self._calls

        async def one(prompt: Prompt, sample: int) -> Completion:
            key = seed_key(params.seed, params.step, prompt.id, prompt.draw, sample)
            name = f"{self._name}-{call}-{params.step}-{key:016x}-{sample}"
            async with slots:  # the deadline begins when its turn has come
                return await self._complete(http, prompt, sample, key, name, params)

        done = await gather([one(prompt, sample) for prompt in prompts for sample in range(params.n)])
        failed = [completion for completion in done if completion.finish_reason == "error"]
        if failed:
            first = failed[0]
            log.warning(
                "%d of %d completions failed, the first that of prompt %r, sample %d: %s",
                len(failed), len(done), first.prompt_id, first.sample, first.error,
            )  # fmt: skip
        return done

    async def _complete(
        self, http: Http, prompt: Prompt, sample: int, key: int, name: str, params: SamplingParams
    ) -> Completion:
        """One completion, or a failed one with its reason. name: what the ids of its requests begin with."""
        server: Server | None = None

        async def attempt(number: int, seconds: float) -> Completion:
            nonlocal server
            server = self.servers.pick(avoid=server)
            request = CompletionRequest(
                f"{name}.{number}", server.model, prompt.token_ids, key, params, server.facts.seeds
            )
            sent_under = server.revision
            response = require_sound(await exchange(http, server, request, seconds), request, self.vocab_size)
            if self.max_lag:
                await server.wait_until_updated()
            spans = spans_of(response, server, sent_under, self.max_lag)
            revision = spans[0].revision
            assert revision is not None, spans
            return Completion(
                prompt_id=prompt.id,
                draw=prompt.draw,
                sample=sample,
                token_ids=tuple(response.token_ids),
                logprobs=tuple(float(x) for x in response.logprobs),
                finish_reason=response.finish_reason,  # type: ignore[arg-type]
                seed_key=key,
                revision=revision,
                text=self._text(response, params),
                spans=spans if len(spans) > 1 else (),
            )

        try:
            return await retry(self.retry_policy, attempt)
        except RequestFailed as error:
            where = f" ({server.url})" if server else ""
            return Completion.failed(prompt, sample, key, f"{error}{where}")

    def _text(self, response: CompletionResponse, params: SamplingParams) -> str:
        if self.tokenizer is None:
            return response.text
        text: str = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        cut = cut_at_stop(text, params.stop_strings)
        return text if cut is None else cut


async def exchange(http: Http, server: Server, request: CompletionRequest, seconds: float) -> CompletionResponse:
    """One request to one server, its response read but not yet checked. Raises RequestFailed."""
    server.outstanding += 1
    url, body = server.url + server.dialect.path, server.dialect.write(request)
    try:
        answer = await http.request("POST", url, body, timeout_s=seconds, key=api_key())
    except RequestFailed as error:
        await server.check_after(error, http)
        raise
    finally:
        server.outstanding -= 1
    response = server.dialect.read(answer)
    if server.facts.echoes_id and not (response.id or "").endswith(request.id):
        raise RequestFailed(FailureKind.WRONG_ID, f"id {response.id!r}, asked {request.id!r}", retriable=True)
    return response


def spans_of(
    response: CompletionResponse, server: Server, sent_under: Revision | None, max_lag: int
) -> tuple[RevisionSpan, ...]:
    """Which revisions drew these tokens. With max_lag 0 that is the published one alone.

    sent_under: the server's revision when the request was sent; where responses name none (adapters), all tokens are
    of it. Raises InvalidResponse for a revision that was not confirmed, for several of them with max_lag 0, and for
    tokens left out.
    """
    count = len(response.token_ids)
    if response.spans is None:
        return (RevisionSpan(sent_under or Revision(-1, ""), 0, count),)
    confirmed = server.confirmed if max_lag else {server.label: server.revision}
    found: list[RevisionSpan] = []
    for version, start, end in response.spans:
        revision = parse_label(version) if server.label is None else confirmed.get(version)
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
    covered = found[-1].end if found else 0
    if covered != count or (max_lag == 0 and len(found) > 1):
        raise InvalidResponse("mixed revisions", f"{covered} of {count} tokens are of {len(found)} revisions: {found}")
    return tuple(found)


def parse_label(label: str) -> Revision:
    """A weight version as a revision: "12:1a2b" or "12"; another label stands as the hash of step -1."""
    step, _, digest = label.partition(":")
    return Revision(int(step), digest) if step.isascii() and step.isdigit() and len(step) < 19 else Revision(-1, label)


def read_urls(urls: Sequence[str]) -> tuple[list[str], str | None]:
    """The servers' addresses without the path of their API, and the name of the model behind a #, where there is one.

    Raises EngineError.
    """
    addresses, names = [], []
    for url in urls:
        address, _, name = url.partition("#")
        if "@" in address:
            raise EngineError(
                "engine.urls: addresses stand in the run's records, so they hold no key; set TINYLLM_API_KEY"
            )
        address = address.rstrip("/").removesuffix("/v1").rstrip("/")
        if not address.startswith(("http://", "https://")) or not address.partition("//")[2]:
            raise EngineError(f"engine.urls: {url!r} is no address; write it as in http://127.0.0.1:8000")
        addresses.append(address)
        names += [name] if name and name not in names else []
    if len(set(addresses)) != len(addresses) or not addresses:
        raise EngineError(f"engine.urls = {', '.join(addresses) or 'nothing'}: give each server once")
    if len(names) > 1:
        raise EngineError(f"engine.urls name several models ({', '.join(names)}), and a run samples one; give one")
    return addresses, names[0] if names else None
