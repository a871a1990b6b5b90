"""Models: what is loaded and refused, how prompts become tokens, what is saved. Tiny random models, made here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tinyllm.config.sections import GRPOConfig, LoraConfig, ModelConfig, ObjectiveConfig
from tinyllm.errors import ConfigError, DataError, ModelError
from tinyllm.model import models as ours
from tinyllm.model.bundled import SMOLLM2, cached
from tinyllm.model.memory import available_memory, memory_estimate, native_bf16

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<turn>{{ m.role }} {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<turn>assistant {% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, add_bos: bool = False) -> PreTrainedTokenizerFast:
    specials = ["<bos>", "<eos>", "<turn>", "<end>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + letters)}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel

    base.decoder = ByteLevel()
    if add_bos:
        base.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<bos>", eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    fast.chat_template = template
    return fast


def tiny_config(**changes) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(
        **{**sizes, **heads, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True, **changes}
    )


def tiny_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


@pytest.fixture
def folder(tmp_path):
    """A tiny model with its tokenizer on disk."""
    path = tmp_path / "tiny"
    tiny_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


IDS = torch.tensor([[5, 6, 7, 8]])


# Loading


def test_load_from_a_folder(folder):
    model = ours.load_model(str(folder), dtype="float32", device="cpu")
    assert not model.training and model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights stay one tensor"
    assert torch.equal(model(IDS).logits, tiny_model()(IDS).logits)
    assert ours.load_model(str(folder), dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    expected = torch.bfloat16 if native_bf16() else torch.float32
    assert ours.load_model(str(folder), device="cpu").dtype == expected, "auto follows the CPU"


def test_a_classifier_a_translator_an_encoder_are_refused(folder):
    edit(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="LlamaForSequenceClassification, not a causal language model"):
        ours.load_model(str(folder))
    edit(folder, model_type="t5", architectures=None)
    with pytest.raises(ModelError, match=r"\(t5\) is not a causal language model"):
        ours.load_model(str(folder))
    edit(folder, model_type="distilbert")
    with pytest.raises(ModelError, match=r"\(distilbert\) is not a causal"):
        ours.load_model(str(folder))


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only as pickle \(pytorch_model.bin\)"):
        ours.load_model(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        ours.load_model(str(folder))


def test_code_from_the_folder_is_never_run(folder, tmp_path):
    ran = tmp_path / "ran"
    (folder / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit(folder, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(ModelError, match="trust_remote_code"):
        ours.load_model(str(folder))
    assert not ran.exists()


def test_quantized_weights_are_refused(folder):
    edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"quantized weights \(gptq\)"):
        ours.load_model(str(folder))


def test_missing_weights_are_refused_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as model.layers.1.mlp.up_proj.weight"):
        ours.load_model(str(folder))


def test_damaged_and_mismatched_weights_are_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="damaged"):
        ours.load_model(str(folder))
    path.write_bytes(whole)
    edit(folder, intermediate_size=40)
    with pytest.raises(ModelError, match="cannot load model"):
        ours.load_model(str(folder))


def test_a_model_too_large_is_refused_with_the_numbers(folder):
    edit(folder, vocab_size=20_000_000, hidden_size=131_072)  # 10 TB of weights
    with pytest.raises(ModelError, match=r"too large for this machine: it needs about \d+\.\d GiB \(weights .*free of"):
        ours.load_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "folder './no/such/folder' does not exist"),
        ("smollm2-135m-instuct", "did you mean 'smollm2-135m-instruct'"),
    ],
)
def test_names_that_are_nowhere(name, message):
    with pytest.raises(ModelError, match=message):
        ours.load_model(name)


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"cannot load model nobody/none: .*check the name .* and the connection"):
        ours.load_model("nobody/none")


def test_folders_that_hold_no_model(folder, tmp_path):
    with pytest.raises(ModelError, match="is a file; name the folder"):
        ours.resolve(str(folder / "config.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="has no config.json"):
        ours.resolve(str(tmp_path / "empty"))
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter"):
        ours.resolve(str(tmp_path / "empty"))


def test_devices_and_types():
    assert ours.pick_device("cpu") == "cpu"
    assert ours.pick_device() in ("cpu", "cuda", "mps")
    with pytest.raises(ConfigError, match=r"model.device = 'tpu' .*cpu"):
        ours.pick_device("tpu")
    with pytest.raises(ConfigError, match="model.dtype = 'float8'"):
        ours.pick_dtype("float8")


def test_tokenizer_and_model_must_fit(folder):
    assert len(ours.load_tokenizer(str(folder))) == 260
    edit(folder, vocab_size=100)
    with pytest.raises(ModelError, match="260 tokens, the model 100"):
        ours.load_tokenizer(str(folder))
    edit(folder, vocab_size=300)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="cannot load tokenizer of model"):
        ours.load_tokenizer(str(folder))


# Memory


def test_memory_estimate_by_hand():
    arch = tiny_config()  # 300 x 32 embedding (tied), 2 layers, final norm
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    parameters = 300 * 32 + 2 * layer + 32
    assert memory_estimate(arch, torch.bfloat16).total == 2 * parameters
    config = GRPOConfig()
    parts = dict(memory_estimate(arch, torch.float32, config).parts)
    assert parts == {"weights": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters}
    parts = dict(memory_estimate(arch, torch.bfloat16, config).parts)
    assert parts["optimizer"] == 12 * parameters, "moments and fp32 masters"
    parts = dict(memory_estimate(arch, torch.float32, replace(config, lora=LoraConfig(rank=2))).parts)
    sides = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert parts["gradients"] == 4 * 2 * 2 * sides
    with_kl = replace(config, objective=ObjectiveConfig(beta=0.04))
    assert dict(memory_estimate(arch, torch.float32, with_kl).parts)["reference model"] == 4 * parameters
    parts = dict(memory_estimate(arch, torch.float32, config, longest=40 + 24).parts)
    assert parts["key-value cache"] == 128 * (40 + 24) * 2 * 2 * 16 * 4
    short = dict(
        memory_estimate(
            arch, torch.float32, replace(config, model=ModelConfig(gradient_checkpointing=True)), longest=40 + 24
        ).parts
    )
    assert short["activations"] < parts["activations"]


def test_available_memory():
    free, total = available_memory("cpu")
    assert 0 < free <= total


# Prompts


def test_raw_text_as_it_is():
    plain = tokenizer(None)
    assert ours.render(plain, "hi you")[0] == "hi you", "no template: raw"
    assert ours.render(plain, "hi", "raw", "Be kind.")[0] == "Be kind.\n\nhi"
    assert ours.render(tokenizer(), "hi", "raw")[0] == "hi", "a template is there, but raw was asked for"
    text, ids = ours.render(tokenizer(None, add_bos=True), "hi")
    assert text == "<bos>hi" and ids[0] == 0 and len(ids) == 3


def test_beginning_of_text_is_never_doubled():
    assert ours.render(tokenizer(None, add_bos=True), "<bos>hi")[0] == "<bos>hi"
    with_bos = tokenizer("<bos>" + TEMPLATE, add_bos=True)
    text, ids = ours.render(with_bos, "hi")
    assert text == "<bos><turn>user hi<end><turn>assistant " and ids.count(0) == 1
    assert list(ids) == with_bos.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )


def test_end_of_text_does_not_close_a_prompt():
    closing = tokenizer(None)
    closing.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 1)])
    assert ours.render(closing, "hi")[0] == "hi"


def test_chat_template_is_applied_once():
    chat = tokenizer()
    expected = "<turn>user hi<end><turn>assistant "
    assert ours.render(chat, "hi")[0] == expected
    assert ours.render(chat, [{"role": "user", "content": "hi"}], "chat")[0] == expected
    assert ours.render(chat, "hi", system_prompt="Be kind.")[0] == "<turn>system Be kind.<end>" + expected
    started = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So,"}]
    assert ours.render(chat, started)[0] == expected + "So,", "an answer that was begun goes on"
    text, ids = ours.render(chat, "hi")
    assert ids[0] == 2 and chat.decode(list(ids)) == text


@pytest.mark.parametrize(
    ("prompt", "rule", "system", "error", "message"),
    [
        ("", "raw", None, DataError, "the prompt is empty"),
        ([], "chat", None, DataError, "empty list"),
        ([{"role": "user"}], "chat", None, DataError, "message 1 of the prompt lacks"),
        ([{"role": "user", "content": "a"}], "raw", None, DataError, "list of chat messages"),
        ([{"role": "tool", "content": "a"}], "chat", None, DataError, "refuses the prompt: no tools"),
        ([{"role": "system", "content": "a"}], "chat", "b", DataError, "system message of its own"),
        ("a", "jinja", None, ConfigError, "prompt_rule = 'jinja'"),
    ],
)
def test_prompts_that_do_not_fit(prompt, rule, system, error, message):
    with pytest.raises(error, match=message):
        ours.render(tokenizer(), prompt, rule, system)


def test_chat_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="this model's tokenizer has none; use raw"):
        ours.render(tokenizer(None), "hi", "chat")


def test_stop_tokens():
    assert ours.stop_token_ids(tokenizer(None), tiny_config()) == (1,)
    assert ours.stop_token_ids(tokenizer(), tiny_config()) == (1, 3), "the template closes a turn with <end>"
    model = tiny_model()
    model.generation_config.eos_token_id = [1, 7]
    assert ours.stop_token_ids(tokenizer(None), model) == (1, 7)
    refusing = tokenizer("{{ raise_exception('never') }}")
    assert ours.stop_token_ids(refusing, tiny_config(eos_token_id=None)) == (1,)


# Adapters, saving, identity


def test_adapters_start_as_the_base_and_train_alone():
    model = tiny_model()
    before = model(IDS).logits
    base = list(model.parameters())
    adapted = ours.add_lora(model, rank=2, alpha=4.0, seed=3)
    assert torch.equal(adapted(IDS).logits, before) and not adapted.training
    assert not any(p.requires_grad for p in base)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7 and all("lora_" in name for name in trained)
    again = ours.add_lora(tiny_model(), rank=2, alpha=4.0, seed=3)
    assert ours.content_hash(again) == ours.content_hash(adapted)
    assert ours.content_hash(ours.add_lora(tiny_model(), rank=2, seed=4)) != ours.content_hash(adapted)
    half = ours.add_lora(tiny_model().to(torch.bfloat16), rank=2)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    only = ours.add_lora(tiny_model(), rank=2, targets=["q_proj"])
    assert sum(p.requires_grad for p in only.parameters()) == 4


def test_adapters_on_what_is_not_there():
    with pytest.raises(ModelError, match=r"lora.targets = \('c_attn',\).*there are: .*q_proj"):
        ours.add_lora(tiny_model(), rank=2, targets=["c_attn"])
    with pytest.raises(ModelError, match="one tensor"):
        ours.add_lora(tiny_model(), rank=2, targets=["lm_head"])


def test_save_and_load_keep_every_bit(tmp_path):
    model = tiny_model()
    model.set_attn_implementation("eager")
    ours.save_model(model, tokenizer(), tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert ours.content_hash(again) == ours.content_hash(model)
    assert again.config._attn_implementation == "sdpa", "how attention was computed is not part of a model"
    assert ours.render(ours.load_tokenizer(str(tmp_path / "model")), "hi")[0].startswith("<turn>user hi")
    ours.save_model(model.to(torch.bfloat16), None, tmp_path / "model")
    assert ours.load_model(str(tmp_path / "model"), dtype="bfloat16").dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "replaced, nothing left over"


def test_a_published_generation_config_can_be_saved_back(folder, tmp_path):
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 1}')
    model = ours.load_model(str(folder))
    ours.save_model(model, None, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_adapters_are_saved_merged_and_alone(tmp_path):
    from peft import PeftModel

    adapted = ours.add_lora(tiny_model(), rank=2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = ours.content_hash(adapted)
    logits = adapted(IDS).logits
    ours.save_model(adapted, tokenizer(), tmp_path / "model")
    assert ours.content_hash(adapted) == before, "saving leaves the trained model as it was"
    assert torch.equal(adapted(IDS).logits, logits)
    merged = ours.load_model(str(tmp_path / "model"), dtype="float32")
    assert torch.allclose(merged(IDS).logits, logits, atol=1e-5)
    assert not torch.allclose(merged(IDS).logits, tiny_model()(IDS).logits, atol=1e-3)
    apart = PeftModel.from_pretrained(tiny_model(), tmp_path / "model" / "adapter")
    assert torch.equal(apart(IDS).logits, logits)


def test_content_hash_sees_one_bit():
    model = tiny_model()
    before = ours.content_hash(model)
    assert before == ours.content_hash(tiny_model())
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(1.0))
    assert ours.content_hash(model) != before


# The bundled model itself, from the cache or fetched


def test_the_bundled_model():
    name = "smollm2-135m-instruct"
    model, its_tokenizer = ours.load_model(name, device="cpu"), ours.load_tokenizer(name)
    assert model.num_parameters() == SMOLLM2.parameters == 134_515_008
    assert ours.stop_token_ids(its_tokenizer, model) == (its_tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    _, ids = ours.render(its_tokenizer, "What is the capital of France?")
    answer = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :]
    assert its_tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert cached(SMOLLM2) is not None
