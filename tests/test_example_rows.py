"""The rows that SFT and DPO read: what is refused, what is held out, and chats with the bundled model's template."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import tiny
from given_rows import sft_config
from tiny import EOS

from tinyllm.config.io import make_config
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.errors import ConfigError, DataError, ModelError
from tinyllm.evals.overlap import prompt_text
from tinyllm.evals.training import _rows_of_run
from tinyllm.post.examples import checked_config
from tinyllm.tasks.examples import load_examples

# Rows


def example(row, home, tmp_path, base=None, **data):
    file = tmp_path / "one.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in (row if isinstance(row, list) else [row])))
    config = sft_config(home / "model", file, base=base, data={"held_out": 0.0, **data})
    return load_examples(config, tiny.tokenizer())


def test_a_completion_ends_with_the_stop_token(home, tmp_path):
    data = example({"prompt": "1+1=", "completion": "2"}, home, tmp_path)
    (group,) = data.of(data.train)
    words = tiny.tokenizer()
    assert group.prompt.token_ids == tuple(words("1+1=").input_ids)
    assert group.rollouts[0].completion.token_ids == (*words("2").input_ids, EOS)


BAD = [
    ({"prompt": "1+1="}, "row 1 of one.jsonl has no column 'completion'"),
    ({"prompt": "1+1=", "completion": " "}, "'completion' is not a text"),
    ({"prompt": "1+1=", "completion": 2}, "'completion' is not a text"),
    ({"completion": "2"}, "row 1 of one.jsonl has no column 'prompt'"),
    ({"prompt": "1+1=", "completion": "2<eos>"}, "text of a stop token"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "ends with assistant"),
    ({"messages": []}, "column 'messages'"),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, "its only message is the answer"),
    ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "keep one form"),
    ({"prompt": "1" * 2000, "completion": "2"}, "over data.max_tokens = 1024"),
    ({"prompt": "1" * 600, "completion": "2"}, "it has 602 tokens, more than the model's 512 positions"),
    ({"prompt": "1+1=", "completion": "\ud83d2"}, "half a surrogate pair .* in 'completion'"),
    (
        {"messages": [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2]},
        "row 1 of one.jsonl: messages 2 and 3 are both from assistant; join them",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_of_sft(home, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        example(row, home, tmp_path)


BAD_PAIRS = [
    ({"prompt": "1+1=", "chosen": "2"}, "no column 'rejected'"),
    ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "are the same"),
    ({"chosen": "2", "rejected": "3"}, "no column 'prompt'"),
    (
        {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]},
        "must be one chat but for its end",
    ),
    ({"prompt": "1", "chosen": [{"role": "user", "content": "2"}], "rejected": "3"}, "not from assistant"),
    ({"prompt": "1", "chosen": "2", "rejected": "\ud83d"}, "half a surrogate pair .* in 'rejected'"),
]


@pytest.mark.parametrize(("row", "message"), BAD_PAIRS)
def test_bad_rows_of_dpo(home, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        example(row, home, tmp_path, base=DPOConfig())


def test_bad_rows_can_be_skipped(home, tmp_path):
    good, bad = {"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2="}
    data = example([good, bad, good], home, tmp_path, on_bad_row="skip")
    assert len(data.train) == 2 and len(data.skipped) == 1
    assert len({p.id for p in data.train}) == 2, "the same row twice has two names"


def test_the_hash_of_the_data_is_of_tokens_and_sides(home, tmp_path):
    many = [{"prompt": f"{i}+1=", "completion": str(i)} for i in range(8)]
    hashes = {example(many, home, tmp_path, held_out=share).hash for share in (0.0, 0.25, 0.5)}
    system = example(many, home, tmp_path, system_prompt="x").hash
    assert len(hashes) == 3 and system not in hashes
    file = tmp_path / "last.jsonl"
    file.write_text(json.dumps(many[7]) + "\n")
    aside = example(many[:7], home, tmp_path, held_out=str(file))
    assert aside.hash != example(many, home, tmp_path).hash, "the same rows in the same order"


def test_bounds_of_a_row_hold_it_exactly(home, tmp_path):
    """12+3=15 and the end are 8 tokens, the last of which is only predicted: a pass computes 7."""
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "12+3=", "completion": "15"}]
    assert example(rows, home, tmp_path, max_tokens=8).longest == 8
    with pytest.raises(DataError, match="row 2 of one.jsonl: it has 8 tokens, over data.max_tokens = 7"):
        example(rows, home, tmp_path, max_tokens=7)

    def checked(budget):
        train = {"tokens_per_microbatch": budget, "batch_size": 2}
        data = {"held_out": 0.0}
        config = sft_config(home / "model", tmp_path / "one.jsonl", train=train, data=data)
        return checked_config(config, load_examples(config, tiny.tokenizer()))

    assert checked(7).train.tokens_per_microbatch == 7
    with pytest.raises(ConfigError, match="cannot hold the longest row; it needs at least 7"):
        checked(6)


def test_one_prompt_is_never_on_both_sides(home, tmp_path):
    many = [{"prompt": f"{i % 4}+1=", "completion": str(i)} for i in range(16)]
    data = example(many, home, tmp_path, held_out=0.5)
    assert not {p.text for p in data.train} & {p.text for p in data.held_out} and data.held_out


def test_a_message_and_its_text_are_one_prompt(home, tmp_path):
    """So a held-out text is not trained on as a chat of one message."""
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    row = {"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"}
    with pytest.raises(DataError, match="the same prompt as held-out row 1 of held_out.jsonl"):
        example(row, home, tmp_path, held_out=str(file))


def test_a_tokenizer_without_an_end_is_refused(home, tmp_path):
    words = tiny.tokenizer()
    other = type(words)(tokenizer_object=words.backend_tokenizer, unk_token="<unk>")
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    with pytest.raises(ModelError, match="names no end-of-text token"):
        load_examples(sft_config(home / "model", file, data={"held_out": 0.0}), other)


# Chats, with the bundled model's template


@pytest.fixture(scope="module")
def chat():
    from tinyllm.model.models import load_tokenizer

    return load_tokenizer("smollm2-135m-instruct")


CHAT = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


def chat_data(chat, tmp_path, row, **data):
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in (row if isinstance(row, list) else [row])))
    return load_examples(make_config(SFTConfig(), data={"file": str(file), "held_out": 0.0, **data}), chat)


def test_every_assistant_turn_is_what_the_engine_would_sample(chat, tmp_path):
    data = chat_data(chat, tmp_path, {"messages": CHAT}, turns="all")
    first, second = data.of(data.train)
    for group, messages in ((first, CHAT[:1]), (second, CHAT[:3])):
        asked = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert group.prompt.token_ids == tuple(chat(asked, add_special_tokens=False).input_ids)
    ends = [chat.decode(g.rollouts[0].completion.token_ids) for g in (first, second)]
    assert ends == ["2<|im_end|>", "It is 4.<|im_end|>"]
    assert second.prompt.token_ids[: len(first.prompt.token_ids)] == first.prompt.token_ids, "shared when packed"
    assert first.prompt.id != second.prompt.id


def test_only_the_last_turn_by_default(chat, tmp_path):
    data = chat_data(chat, tmp_path, {"messages": CHAT})
    (group,) = data.of(data.train)
    assert group.rollouts[0].completion.text == "It is 4."


def test_a_prompt_and_its_completion_are_the_same_chat(chat, tmp_path):
    one = chat_data(chat, tmp_path, {"messages": CHAT[:2]})
    two = chat_data(chat, tmp_path, {"prompt": CHAT[0]["content"], "completion": "2"})
    three = chat_data(chat, tmp_path, {"prompt": CHAT[:1], "completion": CHAT[1:2]})
    ids = [[r.completion.token_ids for g in d.of(d.train) for r in g.rollouts] for d in (one, two, three)]
    assert ids[0] == ids[1] == ids[2] and len({d.of(d.train)[0].prompt.token_ids for d in (one, two, three)}) == 1


def test_with_all_turns_no_turn_has_its_prompt_on_both_sides(chat, tmp_path):
    """Chats that begin alike stay together: their first turns are prompts too."""
    rows = [{"messages": [*CHAT[:2], {"role": "user", "content": str(i)}, CHAT[3]]} for i in range(6)]
    rows += [{"messages": CHAT[:2]}, {"messages": CHAT[2:]}]
    data = chat_data(chat, tmp_path, rows, turns="all", held_out=0.5)
    sides = [{g.prompt.token_ids for g in data.of(side)} for side in (data.train, data.held_out)]
    assert all(sides) and not sides[0] & sides[1]
    assert sorted(map(len, sides)) == [1, 7], "the first turn of seven chats, and six second ones"


def test_each_trained_turn_is_looked_for_in_a_suite(chat, tmp_path):
    data = chat_data(chat, tmp_path, {"messages": CHAT}, turns="all")
    run = SimpleNamespace(config=SFTConfig(), steps=lambda: [1], read_groups=lambda step: data.of(data.train))
    asked = [prompt_text(row["prompt"]) for row in _rows_of_run(run)]
    assert asked == ["What is 1 + 1?", "What is 1 + 1?\nAnd 2 + 2?"]


def test_an_empty_turn_is_not_trained_on(chat, tmp_path):
    messages = [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]]
    assert chat_data(chat, tmp_path, {"messages": messages}).train
    with pytest.raises(DataError, match="row 1 of chat.jsonl: message 2 is an empty answer"):
        chat_data(chat, tmp_path, {"messages": messages}, turns="all")


def test_a_prompt_may_begin_the_answer(chat, tmp_path):
    """As the engine continues it: the prompt is left open, and the completion is the rest of that turn."""
    prompt = [*CHAT[:3], {"role": "assistant", "content": "It is"}]
    data = chat_data(chat, tmp_path, {"prompt": prompt, "completion": " 4."}, turns="all")
    groups = data.of(data.train)
    asked = chat.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    assert [g.prompt.text for g in groups][1:] == [asked + "It is"], "and its beginning is no answer of its own"
    assert [chat.decode(g.rollouts[0].completion.token_ids) for g in groups] == ["2<|im_end|>", " 4.<|im_end|>"]


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ CONTENT }}<|im_end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"


def test_a_template_that_strips_spaces_is_fine_and_one_that_drops_thoughts_is_refused(chat, tmp_path):
    row = {"prompt": "1+1", "completion": " <think>one and one</think>2\n"}
    other = copy.deepcopy(chat)
    other.chat_template = TEMPLATE.replace("CONTENT", "m.content | trim")
    (group,) = chat_data(other, tmp_path, row).of(chat_data(other, tmp_path, row).train)
    assert chat.decode(group.rollouts[0].completion.token_ids) == "<think>one and one</think>2<|im_end|>"
    other.chat_template = TEMPLATE.replace("CONTENT", "m.content.split('</think>')[-1]")
    with pytest.raises(DataError, match="row 1 of chat.jsonl: .* leaves out a part of the answer"):
        chat_data(other, tmp_path, row)


def test_pairs_may_share_their_prompt_implicitly(chat, tmp_path):
    file = tmp_path / "pairs.jsonl"
    other = [*CHAT[:3], {"role": "assistant", "content": "It is 5."}]
    file.write_text(json.dumps({"chosen": CHAT, "rejected": other}) + "\n")
    data = load_examples(make_config(DPOConfig(), data={"file": str(file), "held_out": 0.0}), chat)
    (group,) = data.of(data.train)
    assert [r.completion.text for r in group.rollouts] == ["It is 4.", "It is 5."]
    assert [r.reward for r in group.rollouts] == [1.0, 0.0]
