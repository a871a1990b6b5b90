"""The trainer's log-probabilities: against a pass by hand, against autograd, against the sampler to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import EOS, VOCABULARY, dense_logprobs, gpt2, group, llama, sampling, tokenizer

from tinyllm.config.io import make_config
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.head import HEAD_ROWS, pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.model import models
from tinyllm.post.batch import BatchRules, make_batch
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Updater, model_scorer
from tinyllm.records import Prompt

Pair = tuple[tuple[int, ...], tuple[int, ...]]


def adapted(seed: int = 0):
    """A LoRA model whose adapters do something: B is not 0."""
    model = models.add_lora(llama(seed), rank=2, alpha=8.0)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = 0.3 * torch.randn(p.shape, generator=generator)
    return model


MODELS = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "gpt2": gpt2, "lora": adapted}


@pytest.fixture(params=MODELS)
def policy(request) -> Policy:
    return Policy(MODELS[request.param]())


def family(prompt_length: int, count: int, completion_length: int, seed: int = 0) -> list[Pair]:
    """A group: one prompt, completions that begin alike."""
    draw = random.Random(seed)
    prompt = tuple(draw.randrange(VOCABULARY) for _ in range(prompt_length))
    return [
        (prompt, (5, 6, *(draw.randrange(VOCABULARY) for _ in range(completion_length - 3)), EOS)) for _ in range(count)
    ]


def packed_scores(policy: Policy, pairs: list[Pair], temperature: float = 1.0) -> list[torch.Tensor]:
    logp, entropy = score(policy, pack_targets(pairs, "cpu"), temperature)
    assert entropy.shape == logp.shape and (entropy >= 0).all() and not entropy.requires_grad
    return list(logp.split([len(c) for _, c in pairs]))


def test_every_completion_token_is_predicted_once_and_no_prompt_token():
    """Cases C1, C10: the first token and the end of text are targets, also where the end of text is the pad token."""
    targets = pack_targets([((5, 6, 7), (EOS,)), ((5, 6, 7), (8, 9, 8, 9, 10, EOS)), ((4,), (8, EOS))], "cpu")
    assert targets.token.tolist() == [EOS, 8, 9, 8, 9, 10, EOS, 8, EOS]
    assert targets.lengths == (1, 6, 2)
    last_of_prompt = [targets.rows[targets.row[i]].item() for i in (0, 1)]
    assert last_of_prompt[0] == last_of_prompt[1], "both first tokens are predicted by the last token of the prompt"
    assert len(targets.rows) == 6 + 2, "the first prompt's last token predicts twice, from one row"
    assert targets.packed.input_ids.shape == (1, 12), "3 + 5 + 2 distinct prefixes, padded to a multiple of 4"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_equal_to_a_teacher_forced_pass(policy, temperature):
    """Cases C10, D1."""
    pairs = [*family(5, 3, 7), *family(9, 2, 4, seed=1), ((3,), (EOS,))]
    for (prompt, ids), ours in zip(pairs, packed_scores(policy, pairs, temperature), strict=True):
        torch.testing.assert_close(ours, dense_logprobs(policy, prompt, ids, temperature), atol=2e-5, rtol=1e-5)


def test_temperature_is_that_of_the_sampler():
    """Case D1 in numbers: logits (2, 1, 0, 0) at temperature 0.5 give token 0 -0.15868 and token 2 -4.15868."""
    policy = Policy(llama(vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
                          num_key_value_heads=1))  # fmt: skip
    policy.trunk.norm.weight.data[:] = 0
    policy.causal.lm_head = torch.nn.Linear(4, 4, bias=True)
    policy.causal.lm_head.bias.data = torch.tensor([2.0, 1.0, 0.0, 0.0])
    (ours,) = packed_scores(policy, [((1,), (0, 2))], temperature=0.5)
    assert ours.tolist() == pytest.approx([-0.15868, -4.15868], abs=1e-5)


def test_entropy_is_that_of_the_distribution():
    policy = Policy(llama())
    prompt, ids = (5, 6, 7), (8, 9, EOS)
    _, entropy = score(policy, pack_targets([(prompt, ids)], "cpu"), 0.7)
    policy.causal.set_attn_implementation("eager")
    logits = policy.causal(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, 2:5] / 0.7
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5, rtol=1e-5)


def gradients(policy: Policy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    loss.backward()
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    assert found
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradient_is_that_of_dense_autograd(policy, temperature):
    pairs = [*family(5, 3, 7), *family(66, 2, 4, seed=1), ((3,), (EOS,))]
    weights = [torch.linspace(-1, 2, len(ids)) for _, ids in pairs]
    ours = gradients(
        policy, sum((w * x).sum() for w, x in zip(weights, packed_scores(policy, pairs, temperature), strict=True))
    )
    dense = [dense_logprobs(policy, *pair, temperature) for pair in pairs]
    theirs = gradients(policy, sum((w * x).sum() for w, x in zip(weights, dense, strict=True)))
    assert ours.keys() == theirs.keys()
    largest = max(g.abs().max() for g in theirs.values())
    for name, g in theirs.items():
        torch.testing.assert_close(
            ours[name], g, atol=1e-5 * float(largest), rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_more_rows_than_one_head_block():
    policy = Policy(llama(num_hidden_layers=1))
    pairs = [p for i in range(3) for p in family(4, 3, 60, seed=i)]
    targets = pack_targets(pairs, "cpu")
    assert len(targets.rows) > 2 * HEAD_ROWS - 40
    ours = packed_scores(policy, pairs)
    theirs = [dense_logprobs(policy, *pair) for pair in pairs]
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=2e-5, rtol=1e-5)
    a = gradients(policy, torch.cat(ours).square().sum())
    b = gradients(policy, torch.cat(theirs).square().sum())
    for name in b:
        torch.testing.assert_close(a[name], b[name], atol=1e-4 * float(b[name].abs().max()), rtol=1e-3)


def test_bf16_weights_give_bf16_numbers():
    """Against the same rounded weights in fp32: the difference is that of bf16 arithmetic, and gradients are fp32."""
    rounded = llama(dtype=torch.bfloat16)
    exact = Policy(llama())
    exact.model.load_state_dict(rounded.float().state_dict())
    policy = Policy(rounded.to(torch.bfloat16))
    pairs = [*family(5, 3, 7), *family(70, 2, 9, seed=1)]
    optimizer = Optimizer(policy.model.named_parameters(), make_config().optimizer)
    ours = torch.cat(packed_scores(policy, pairs))
    theirs = torch.cat(packed_scores(exact, pairs))
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() < 0.15
    ours.sum().backward()
    theirs.sum().backward()
    for name, p in exact.model.named_parameters():
        g = optimizer.parameters[name].grad
        assert g.dtype == torch.float32
        assert (g - p.grad).norm() < 0.1 * p.grad.norm() + 0.02, name


@pytest.mark.parametrize(
    ("kind", "temperature", "new"), [("llama", 1.0, 70), ("llama", 0.7, 12), ("gpt2", 1.0, 12), ("lora", 0.7, 12)]
)
def test_sampler_and_trainer_agree_to_the_bit(kind, temperature, new):
    """Prompts around a block of 64 keys, alone and together; completions that cross block borders."""
    policy = Policy(MODELS[kind]())
    lengths = (63, 64, 65) if kind == "gpt2" else (1, 63, 64, 65, 130)  # GPT-2 here has 128 positions
    prompts = [Prompt(f"p{n}", family(n, 1, 4, seed=n)[0][0], "") for n in lengths]
    engine = EmbeddedEngine(policy, tokenizer(), max_batch=16)
    done = engine.sample(prompts, sampling(max_new_tokens=new, n=3, temperature=temperature, stop_token_ids=(EOS, 3)))
    assert max(len(c.token_ids) for c in done) > new // 2
    by_id = {p.id: p.token_ids for p in prompts}
    pairs = [(by_id[c.prompt_id], c.token_ids) for c in done]
    sampled = [torch.tensor(c.logprobs, dtype=torch.float32) for c in done]
    for ours, theirs in zip(packed_scores(policy, pairs, temperature), sampled, strict=True):
        assert torch.equal(ours, theirs)
    for pair, theirs in list(zip(pairs, sampled, strict=True))[::4]:
        assert torch.equal(packed_scores(policy, [pair], temperature)[0], theirs), "alone"
    scorer = model_scorer(policy, temperature, budget=200)
    assert all(torch.equal(a, b) for a, b in zip(scorer(pairs), sampled, strict=True))


def test_sampler_and_trainer_agree_in_bf16():
    policy = Policy(llama(dtype=torch.bfloat16))
    prompts = [Prompt(f"p{n}", family(n, 1, 4, seed=n)[0][0], "") for n in (3, 64, 65)]
    done = EmbeddedEngine(policy, tokenizer(), max_batch=8).sample(prompts, sampling(max_new_tokens=20, n=4))
    by_id = {p.id: p.token_ids for p in prompts}
    scored = packed_scores(policy, [(by_id[c.prompt_id], c.token_ids) for c in done])
    assert all(torch.equal(s, torch.tensor(c.logprobs, dtype=torch.float32)) for s, c in zip(scored, done, strict=True))


def test_the_objective_trains_every_token_and_no_filler():
    """Case C1 through the whole hop: completions of 2 and 6 tokens, pad = end of text; 8 tokens, not 6 and not 12."""
    policy = Policy(llama())
    chosen = make_config(optimizer={"name": "sgd", "lr": 1.0, "clip_norm": 0.0}, objective={"aggregate": "token"})
    batch = make_batch([group("a", [1, 0], ids=[(2, EOS), (2, 3, 4, 2, 3, EOS)])], BatchRules.of(chosen))
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    result = Updater(policy, Optimizer(policy.model.named_parameters(), chosen.optimizer), chosen)(batch, lr=1.0)
    assert result.stats.tokens == 8 and batch.denominator == 8
    moved = {n: before[n] - p.detach() for n, p in policy.model.named_parameters()}
    fresh = Policy(llama())
    advantage = batch.advantages.float()
    terms = [
        -advantage[i] * dense_logprobs(fresh, batch.prompts[i], batch.rollouts[i].completion.token_ids).sum()
        for i in range(2)
    ]
    expected = gradients(fresh, sum(terms) / 8)
    for name, g in expected.items():
        torch.testing.assert_close(moved[name], g, atol=2e-6, rtol=1e-4)
