"""Every architecture gives the logits of transformers' own eager attention; what would be lost is refused by name."""

import copy

import pytest
import torch
import transformers as hf

from tinyllm.engine.attention import PackedPlan, unsupported
from tinyllm.engine.packing import pack
from tinyllm.engine.policy import Policy
from tinyllm.engine.trie import Trie
from tinyllm.errors import ModelError

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {**SIZE, "vocab_size": 67, "intermediate_size": 64, "max_position_embeddings": 256}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
ARCHITECTURES = {
    "llama": (hf.LlamaConfig, COMMON),
    "llama_one_head": (hf.LlamaConfig, {**COMMON, "num_key_value_heads": 1}),
    "qwen3": (hf.Qwen3Config, {**COMMON, "head_dim": 8}),
    "qwen3_window": (hf.Qwen3Config, {**COMMON, "head_dim": 8, **WINDOWED}),
    "mistral": (hf.MistralConfig, {**COMMON, "sliding_window": 7}),
    "gemma2": (hf.Gemma2Config, {**COMMON, "head_dim": 8, "sliding_window": 9, "final_logit_softcapping": 3.0}),
    "gemma3": (hf.Gemma3TextConfig, {**COMMON, "head_dim": 8, "sliding_window": 9}),
    "gpt2": (hf.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 256}),
    "smollm3": (hf.SmolLM3Config, {**COMMON, "pad_token_id": 0}),
    "granite": (hf.GraniteConfig, {**COMMON, "logits_scaling": 4.0, "attention_multiplier": 0.3}),
    "gpt_oss": (
        hf.GptOssConfig,
        {**COMMON, "head_dim": 8, "sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}
SEQUENCES = (
    [1, 2, 3, 4, 5, 6, 7] + [(i * 7) % 67 for i in range(80)],
    [1, 2, 3, 4, 9, 9],
    [1, 2, 3, 4, 5, 6, 7, 0, 50],
)


def make(name):
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(**settings), attn_implementation="eager").eval()
    with torch.no_grad():  # attention that matters: default weights are too small for its errors to show
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model


def packed_logits(policy, sequences):
    trie = Trie()
    paths = [trie.add(s) for s in sequences]
    packed = pack(trie)
    hidden = policy.hidden(packed.input_ids, packed.position_ids, PackedPlan(packed))
    return [policy.logits(hidden[path]) for path in paths]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_logits_and_gradients_equal_eager_attention(name):
    eager, ours = make(name), make(name)
    expected = [eager(torch.tensor([s]), use_cache=False).logits[0] for s in SEQUENCES]
    policy = Policy(ours)
    policy.check()
    actual = packed_logits(policy, SEQUENCES)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=2e-4, rtol=2e-4)
    for logits in (actual, expected):
        sum((x * torch.linspace(0, 1, x.shape[-1])).sin().sum() for x in logits).backward()
    for (n, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, atol=2e-3 * max(1.0, q.grad.abs().max().item()), rtol=2e-3, msg=n
            )


@pytest.mark.parametrize("name", ["qwen3_window", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_dropping_the_window_would_show(name):
    """The comparison above would notice a lost mask: without the window the logits differ."""
    model, wide = make(name), make(name)
    if name == "mistral":
        wide.config.sliding_window = None
    for module in wide.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = None
    a, b = packed_logits(Policy(model), SEQUENCES[:1])[0], packed_logits(Policy(wide), SEQUENCES[:1])[0]
    assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4), "own attention code"),
        (
            hf.FalconConfig(vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
            "ALiBi",
        ),
        (hf.MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=2), "linear_attention"),
        (hf.Llama4TextConfig(**COMMON, num_local_experts=2, head_dim=8, intermediate_size_mlp=64), "chunked"),
        (hf.MptConfig(vocab_size=67, d_model=32, n_layers=2, n_heads=4), "own attention code"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_honoured_is_refused_by_name(config, reason):
    model = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=config.model_type) as error:
        Policy(model)
    assert reason in str(error.value)


def test_an_unknown_output_step_is_refused():
    """A model whose head does more than we know is caught by comparing logits, not by a list of names."""
    model = make("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(ModelError, match="other logits"):
        Policy(model).check()


def test_sinks_get_their_gradient():
    model = make("gpt_oss")
    eager = copy.deepcopy(model)
    sum(x.square().sum() for x in packed_logits(Policy(model), SEQUENCES)).backward()
    sum(eager(torch.tensor([s]), use_cache=False).logits.square().sum() for s in SEQUENCES).backward()
    sink, twin = (m.model.layers[0].self_attn.sinks.grad for m in (model, eager))
    torch.testing.assert_close(sink, twin, rtol=2e-3, atol=2e-3 * twin.abs().max().item())
    assert twin.abs().max() > 0


def test_supported_models_have_no_reason():
    assert unsupported(make("llama")) is None
