"""The embedded engine: what it draws, from what, and that nothing else in the batch can change it."""

import math

import pytest
import torch
import transformers as hf
from scipy import stats as scipy_stats

from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.head import pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.engine.probe import probe
from tinyllm.engine.sampling import draw, normalize, restrict
from tinyllm.engine.seeds import seed_key, uniform
from tinyllm.errors import EngineError
from tinyllm.records import Prompt, Revision, SamplingParams

VOCAB = 61


class Letters:
    """A tokenizer with one character per token."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("A") + i) for i in ids if not (skip_special_tokens and i == 0))


def make_policy(seed=0, dtype=torch.float32, sharp=3.0, **settings):
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, **settings,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(sharp if p.dim() > 1 else 1)
    return Policy(model)


def make_prompts(count, lengths=(5, 63, 64, 65, 130, 12)):
    prompts = []
    for i in range(count):
        n = lengths[i % len(lengths)]
        ids = [1, 2, 3] + [(7 * i + 3 * j + j * j) % VOCAB for j in range(n - 3)]
        prompts.append(Prompt(f"p{i}", tuple(ids), ""))
    return prompts


def engine(policy=None, **options):
    return EmbeddedEngine(policy or make_policy(), Letters(), **options)


def params(**options):
    return SamplingParams(**{"max_new_tokens": 12, "n": 3, "seed": 5, "step": 2} | options)


def test_a_completion_is_the_same_alone_and_among_63_others():
    policy = make_policy()
    prompts = make_prompts(64)
    together = engine(policy, max_batch=96).sample(prompts, params(max_new_tokens=70, n=2))
    for i in (0, 2, 4, 63):
        assert engine(policy).sample([prompts[i]], params(max_new_tokens=70, n=2)) == together[2 * i : 2 * i + 2]


def test_order_batch_size_and_threads_change_nothing():
    policy, prompts = make_policy(), make_prompts(7)
    expected = engine(policy).sample(prompts, params())
    backwards = engine(policy, max_batch=5).sample(prompts[::-1], params())
    key = lambda c: (c.prompt_id, c.sample)  # noqa: E731
    assert sorted(backwards, key=key) == sorted(expected, key=key)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            assert engine(policy).sample(prompts, params()) == expected
    finally:
        torch.set_num_threads(threads)


def test_completions_come_back_prompt_after_prompt_with_their_keys_and_revision():
    e = engine()
    e.publish(Revision(3, "abc"))
    done = e.sample(make_prompts(4), params())
    assert [(c.prompt_id, c.sample) for c in done] == [(f"p{i}", s) for i in range(4) for s in range(3)]
    assert {c.revision for c in done} == {Revision(3, "abc")}
    assert done[4].seed_key == seed_key(5, 2, "p1", 0, 1)
    assert len({c.seed_key for c in done}) == 12


@pytest.mark.parametrize("changed", [{"seed": 6}, {"step": 3}, {"draw": 1}])
def test_seed_step_and_draw_each_change_what_is_drawn(changed):
    prompts = make_prompts(3)
    first = engine().sample(prompts, params())
    if "draw" in changed:
        prompts, changed = [Prompt(p.id, p.token_ids, "", draw=1) for p in prompts], {}
    second = engine().sample(prompts, params(**changed))
    assert [c.token_ids for c in first] != [c.token_ids for c in second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_log_probabilities_are_equal_bit_for_bit(dtype, temperature):
    policy, prompts = make_policy(dtype=dtype), make_prompts(12)
    done = engine(policy).sample(prompts, params(max_new_tokens=80, temperature=temperature))
    sequences = [(prompts[i // 3].token_ids, c.token_ids) for i, c in enumerate(done)]
    logp, _ = score(policy, pack_targets(sequences, "cpu"), temperature)
    sampled = torch.tensor([x for c in done for x in c.logprobs])
    assert len(sampled) > 1000
    assert torch.equal(logp.detach(), sampled)


def test_log_probabilities_are_those_of_the_model_alone():
    """Against transformers' own forward pass, one sequence at a time (the by-hand check of masks and shifts)."""
    policy = make_policy()
    prompts = make_prompts(4)
    for c in engine(policy).sample(prompts, params(n=2, temperature=0.5)):
        prompt = next(p for p in prompts if p.id == c.prompt_id).token_ids
        twin = make_policy()
        twin.causal.set_attn_implementation("eager")
        logits = twin.causal(torch.tensor([[*prompt, *c.token_ids]])).logits[0].float() / 0.5
        expected = logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt) + len(c.token_ids) - 1), list(c.token_ids)]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected.detach(), atol=1e-4, rtol=1e-4)


def test_greedy_takes_the_most_probable_token():
    policy = make_policy()
    (prompt,) = make_prompts(1)
    (done,) = engine(policy).sample([prompt], params(n=1, temperature=0.0))
    policy.causal.set_attn_implementation("eager")
    ids = list(prompt.token_ids)
    for token in done.token_ids:
        assert policy.causal(torch.tensor([ids])).logits[0, -1].argmax() == token
        ids.append(token)


def test_stop_tokens_end_a_completion_and_stay_in_it():
    stop = tuple(range(0, VOCAB, 3))
    for c in engine().sample(make_prompts(8), params(stop_token_ids=stop, max_new_tokens=40)):
        assert c.finish_reason == ("stop" if c.token_ids[-1] in stop else "length")
        assert not set(c.token_ids[:-1]) & set(stop)
        assert len(c.logprobs) == len(c.token_ids) <= 40


def test_a_stop_string_ends_the_text_before_it_and_keeps_its_tokens():
    plain = engine().sample(make_prompts(1), params(n=1, max_new_tokens=20))[0]
    stop = plain.text[6:8]
    (cut,) = engine().sample(make_prompts(1), params(n=1, max_new_tokens=20, stop_strings=(stop,)))
    first = plain.text.index(stop)
    assert (cut.finish_reason, cut.text) == ("stop", plain.text[:first])
    assert cut.token_ids == plain.token_ids[: first + 2]


def test_nothing_is_inherited_from_the_generation_config():
    policy = make_policy()
    expected = engine(policy).sample(make_prompts(2), params())
    policy.causal.generation_config = hf.GenerationConfig(
        temperature=0.6, top_k=2, top_p=0.8, repetition_penalty=1.5, do_sample=True, eos_token_id=list(range(40))
    )
    assert engine(policy).sample(make_prompts(2), params()) == expected


def test_new_weights_are_used_at_once_and_no_cache_survives_them():
    policy = make_policy()
    running = engine(policy)
    before = running.sample(make_prompts(3), params())
    with torch.no_grad():
        policy.causal.model.layers[0].self_attn.v_proj.weight.add_(0.5)
    after = running.sample(make_prompts(3), params())
    assert after != before
    assert after == engine(policy).sample(make_prompts(3), params())


def test_tied_embedding_and_head_stay_one():
    policy = make_policy(tie_word_embeddings=True)
    assert policy.head_weight is policy.causal.model.embed_tokens.weight
    before = engine(policy).sample(make_prompts(2), params(temperature=0.0))
    with torch.no_grad():
        policy.causal.model.embed_tokens.weight[5] *= 4
    assert engine(policy).sample(make_prompts(2), params(temperature=0.0)) != before


def count_rows(policy):
    rows = []
    original = policy.hidden

    def hidden(ids, positions, plan):
        rows.append(ids.shape[1])
        return original(ids, positions, plan)

    policy.hidden = hidden
    return rows


def test_a_prompt_is_computed_once_per_group_and_equal_histories_once():
    policy = make_policy()
    rows = count_rows(policy)
    engine(policy).sample([Prompt("a", tuple(range(1, 41)), "")], params(n=16, max_new_tokens=1))
    assert rows == [40]
    rows.clear()
    policy.head_weight.data[7] *= 50  # nearly one token only: sixteen samples share one history
    engine(policy).sample([Prompt("a", (7,) * 40, "")], params(n=16, max_new_tokens=9, temperature=0.01))
    assert rows == [40] + [4] * 8


def test_a_prefix_shared_by_prompts_is_computed_once():
    policy = make_policy()
    rows = count_rows(policy)
    system = tuple(range(1, 31))
    engine(policy).sample([Prompt(str(i), (*system, 40 + i, i), "") for i in range(5)], params(n=1, max_new_tokens=1))
    assert rows == [30 + 5 * 2]


def test_a_group_larger_than_the_batch_is_sampled_in_parts():
    policy = make_policy()
    assert engine(policy, max_batch=4).sample(make_prompts(2), params(n=10)) == engine(policy).sample(
        make_prompts(2), params(n=10)
    )


def test_more_tokens_than_positions_is_an_error_before_any_work():
    policy = make_policy()
    rows = count_rows(policy)
    with pytest.raises(EngineError, match=r"'p4' has 130 tokens and may grow by 400, more than the model's 512"):
        engine(policy).sample(make_prompts(5), params(max_new_tokens=400))
    assert rows == []


def test_an_empty_prompt_is_an_error_and_no_prompts_are_fine():
    assert engine().sample([], params()) == []
    with pytest.raises(EngineError, match="'e' has no tokens"):
        engine().sample([Prompt("e", (), "")], params())


# -- drawing -------------------------------------------------------------------------------------------------------


def uniforms(n, members=1):
    return torch.tensor([[uniform(seed_key(0, 0, "x", 0, m), i) for m in range(members)] for i in range(n)])


@pytest.mark.parametrize("temperature", [0.02, 1.0, 30.0], ids=["peaked", "middle", "flat"])
def test_draws_follow_the_distribution(temperature):
    torch.manual_seed(0)
    vocabulary, n = 700, 40_000
    logits = torch.randn(1, vocabulary) / temperature / 10
    tokens, logprobs = draw(logits.expand(n, -1), uniforms(n).double())
    p = logits[0].double().softmax(-1)
    expected = (p * n).numpy()
    counts = torch.bincount(tokens[:, 0], minlength=vocabulary).numpy()
    common = expected >= 5
    observed, wanted = [*counts[common], counts[~common].sum()], [*expected[common], expected[~common].sum()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert scipy_stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4
    torch.testing.assert_close(logprobs[:, 0].double(), p.log()[tokens[:, 0]], atol=1e-5, rtol=1e-5)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((4, 600), -torch.inf)
    logits[0, 599] = 0.0
    logits[1, 0] = logits[1, 256] = 0.0
    logits[2, 300] = 0.0
    logits[3, 5], logits[3, 6] = 0.0, -200.0  # exp underflows
    edges = torch.tensor([[0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2.0**-53]], dtype=torch.float64).expand(4, -1)
    tokens, logprobs = draw(logits, edges)
    assert tokens.tolist() == [[599] * 6, [0, 0, 0, 256, 256, 256], [300] * 6, [5] * 6]
    assert logprobs.isfinite().all()


def test_uniform_numbers_are_uniform_and_keyed():
    numbers = [uniform(seed_key(1, 2, "p", 0, s), t) for s in range(100) for t in range(100)]
    assert scipy_stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert len(set(numbers)) == len(numbers)
    keys = {
        seed_key(*k)
        for k in [(1, 2, "p", 0, 0), (2, 1, "p", 0, 0), (1, 2, "p", 1, 0), (1, 2, "p", 0, 1), (1, 2, "q", 0, 0)]
    }
    assert len(keys) == 5


def slow_restrict(logits, top_k, top_p, min_p):
    """The definition in plain loops."""
    kept = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        kept = kept[:top_k]
    mass = sum(math.exp(logits[i]) for i in kept)
    total, chosen = 0.0, []
    for i in kept:
        if total >= top_p:
            break
        chosen.append(i)
        total += math.exp(logits[i]) / mass
    mass = sum(math.exp(logits[i]) for i in chosen)
    best = math.exp(logits[chosen[0]]) / mass
    return {i for i in chosen if math.exp(logits[i]) / mass >= min_p * best}


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_top_k_top_p_and_min_p_keep_what_their_definition_keeps(top_k, top_p, min_p):
    torch.manual_seed(top_k)
    logits = torch.randn(6, 40)
    kept = restrict(logits, params(top_k=top_k, top_p=top_p, min_p=min_p)).isfinite()
    for row, mask in zip(logits.tolist(), kept, strict=True):
        assert set(mask.nonzero()[:, 0].tolist()) == slow_restrict(row, top_k, top_p, min_p)


def test_restricted_sampling_reports_the_distribution_it_drew_from():
    done = engine().sample(make_prompts(4), params(top_k=1))
    assert all(x == 0.0 for c in done for x in c.logprobs)


def test_the_probe_names_what_holds_here():
    results = probe()
    assert {"linear_rows", "attention_rows", "trailing_zeros", "softmax_rows", "threads"} <= set(results)
    assert all(isinstance(holds, bool) and detail and (holds or remedy) for holds, detail, remedy in results.values())


def test_one_row_of_logits_is_normalized_as_among_others():
    """A sum with one result is split over threads; at a real vocabulary's size that changed its last bits."""
    torch.manual_seed(0)
    logits = torch.randn(8, 49152) * 3
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = normalize(logits)[0]
        assert all(torch.equal(normalize(row[None])[0][0], lse) for row, lse in zip(logits, together, strict=True))
    finally:
        torch.set_num_threads(threads)
