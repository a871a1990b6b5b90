"""Tasks: the generated arithmetic, own data with its errors, recipes, splits and ids."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinyllm import tasks
from tinyllm.config.sections import DataConfig, GRPOConfig, RewardConfig
from tinyllm.errors import ConfigError, DataError, RewardError
from tinyllm.tasks.arithmetic import ArithmeticConfig, generate

LAST = RewardConfig(("arithmetic:rule=last_number",))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
    return fast


def load(tokenizer, reward=LAST, **data):
    return tasks.load(GRPOConfig(data=DataConfig(**data), reward=reward), tokenizer)


def jsonl(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def rows(count):
    return [{"question": f"How many is {n} plus one", "gold": str(n + 1000), "level": n} for n in range(count)]


MAP = {"prompt": "question", "answer": "gold"}

# arithmetic


def test_arithmetic_defaults_give_519_and_162_prompts():
    train, held_out = generate(ArithmeticConfig())
    assert (len(train), len(held_out)) == (519, 162)
    assert {"prompt": "What is 3 x 4?", "answer": "12"} in train + held_out


def parse(row):
    a, operator, b = re.fullmatch(r"What is (\d+) (.) (\d+)\?", row["prompt"]).groups()
    return int(a), operator, int(b), int(row["answer"])


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_arithmetic_golds_are_right_never_the_last_operand_and_commuted_pairs_stay_together(seed):
    train, held_out = generate(ArithmeticConfig(seed=seed))
    seen = [set(), set()]
    for side, part in enumerate((train, held_out)):
        for a, operator, b, answer in map(parse, part):
            assert answer == {"+": a + b, "-": a - b, "x": a * b}[operator] and answer >= 0 and answer != b
            seen[side].add((a, operator, b))
            if operator != "-":
                seen[side].add((b, operator, a))
    assert not seen[0] & seen[1]
    assert len(held_out) >= 150


def test_arithmetic_is_seeded_and_configurable():
    assert generate(ArithmeticConfig()) == generate(ArithmeticConfig())
    assert generate(ArithmeticConfig())[1] != generate(ArithmeticConfig(seed=1))[1]
    train, held_out = generate(ArithmeticConfig(operators=("*",), factors=(2, 30), held_out=151))
    assert len(held_out) == 151 and len(train) == 29 * 29 - 151


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ArithmeticConfig(operators=()), "operators is empty"),
        (ArithmeticConfig(operators=("+", "/")), "'/'"),
        (ArithmeticConfig(operators=("+", "+")), "twice"),
        (ArithmeticConfig(operands=(9, 2)), "operands = 9,2"),
        (ArithmeticConfig(operands=(1, 5000)), "narrow"),
        (ArithmeticConfig(held_out=20), "at least 150"),
        (ArithmeticConfig(operators=("*",)), "the ranges give 81 prompts"),
    ],
)
def test_arithmetic_mistakes_name_field_and_remedy(config, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        generate(config)


def test_arithmetic_loads_with_its_own_rule(tokenizer):
    data = load(tokenizer, reward=RewardConfig())
    assert (data.name, len(data.train), len(data.held_out)) == ("arithmetic", 519, 162)
    assert data.verifier == "arithmetic:rule=last_number"
    prompt = data.train[0]
    assert prompt.text == f"[user] {prompt.row['prompt']}\n[assistant]"
    assert prompt.messages == ({"role": "user", "content": prompt.row["prompt"]},)
    assert len({prompt.id for prompt in data.train + data.held_out}) == 681
    assert data.hash == load(tokenizer, reward=RewardConfig()).hash


def test_arithmetic_takes_its_settings_behind_its_name(tokenizer):
    spec = "arithmetic:operators=+|-,operands=2|15,held_out=150,seed=3"
    data = load(tokenizer, reward=RewardConfig(), task=spec)
    expected = generate(ArithmeticConfig(("+", "-"), (2, 15), held_out=150, seed=3))
    assert [[p.row["prompt"] for p in side] for side in (data.train, data.held_out)] == [
        [row["prompt"] for row in side] for side in expected
    ]
    assert data.name == spec


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("operand=1|9", "'arithmetic' has no setting 'operand'; did you mean 'operands'?"),
        ("operands", "'operands' is not key=value; write arithmetic:key=value"),
        ("operands=1", 'arithmetic.operands = "1": expected whole number,whole number'),
        ("operands=1|x", 'arithmetic.operands = "1|x": expected whole number,whole number'),
        ("operands=-1|9", "arithmetic.operands = -1: must be at least 0; set it to [1, 20], the default"),
        ("held_out=0", "arithmetic.held_out = 0: must be at least 1"),
        ("operators=+|/", "arithmetic.operators has '/'; choose from + - *"),
    ],
)
def test_wrong_settings_of_a_task_name_setting_and_remedy(tokenizer, settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tokenizer, reward=RewardConfig(), task=f"arithmetic:{settings}")


def test_list_tasks_names_every_task():
    assert [name for name, _ in tasks.list_tasks()] == ["arithmetic", "gsm8k", "math", "gym:NAME"]


# own data


def test_jsonl_with_a_column_map_keeps_every_column(tokenizer, tmp_path):
    data = load(tokenizer, file=jsonl(tmp_path, rows(20)), columns=MAP)
    assert (len(data.train), len(data.held_out), data.verifier) == (18, 2, None)
    row = data.train[0].row
    assert row["answer"] == str(row["level"] + 1000) and row["prompt"].startswith("How many")
    assert set(row) == {"prompt", "answer", "level"}


def test_ids_are_of_the_content_not_of_the_order(tokenizer, tmp_path):
    one = load(tokenizer, file=jsonl(tmp_path, rows(20)), columns=MAP)
    other = load(tokenizer, file=jsonl(tmp_path, rows(20)[::-1], "other.jsonl"), columns=MAP)
    assert {p.id for p in one.train} == {p.id for p in other.train}
    assert {p.id for p in one.held_out} == {p.id for p in other.held_out}
    assert one.hash != other.hash  # the order is part of the data


def test_equal_rows_keep_separate_ids_and_equal_prompts_stay_on_one_side(tokenizer, tmp_path):
    twice = [row for row in rows(10) for _ in range(2)]
    data = load(tokenizer, file=jsonl(tmp_path, twice), columns=MAP, held_out=0.3)
    ids = [p.id for p in data.train + data.held_out]
    assert len(set(ids)) == 20 and len(data.held_out) == 6
    assert not {p.text for p in data.train} & {p.text for p in data.held_out}


def test_parquet_with_chat_messages(tokenizer, tmp_path):
    messages = [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Say {n}"}] for n in range(10)
    ]
    pq.write_table(pa.table({"prompt": messages, "answer": list(range(100, 110))}), tmp_path / "rows.parquet")
    data = load(tokenizer, file=str(tmp_path / "rows.parquet"))
    prompt = data.train[0]
    assert prompt.text.startswith("[system] Be short.\n[user] Say") and len(prompt.messages) == 2


def test_datasets_name_is_read_with_its_split(tokenizer, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder, [{"prompt": f"Say {n}", "answer": str(n + 50)} for n in range(10)], "test.jsonl")
    data = load(tokenizer, dataset=f"{folder}::test")
    assert len(data.train) + len(data.held_out) == 10
    with pytest.raises(DataError, match="cannot be loaded"):
        load(tokenizer, dataset=str(tmp_path / "missing"))


def test_system_prompt_and_raw_rule(tokenizer, tmp_path):
    file = jsonl(tmp_path, rows(10))
    chat = load(tokenizer, file=file, columns=MAP, system_prompt="Be short.").train[0]
    assert chat.text.startswith("[system] Be short.\n[user] How")
    raw = load(tokenizer, file=file, columns=MAP, prompt_rule="raw").train[0]
    assert raw.text == raw.row["prompt"] and raw.messages is None


def test_held_out_file_must_not_share_prompts(tokenizer, tmp_path):
    train, held = jsonl(tmp_path, rows(10)), jsonl(tmp_path, rows(12)[9:], "held.jsonl")
    with pytest.raises(DataError, match=r"row 10 of rows.jsonl has the same prompt as held-out row 1 of held.jsonl"):
        load(tokenizer, file=train, columns=MAP, held_out=held)
    data = load(tokenizer, file=train, columns=MAP, held_out=held, on_bad_row="skip")
    assert (len(data.train), len(data.held_out), len(data.skipped)) == (9, 3, 1)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no rows"),
        (["", "  "], "has no rows"),
        ([{"prompt": "a", "answer": "1"}, '{"prompt": '], "row 2 of rows.jsonl is not JSON"),
        (["[1]"], "row 1 of rows.jsonl is list, not an object"),
        (
            [{"prompt": "a", "answer": "1"}, {"promt": "b", "answer": "2"}],
            "row 2 of rows.jsonl has no column 'prompt'; did you mean 'promt'",
        ),
        ([{"prompt": " ", "answer": "1"}], "row 1 of rows.jsonl has an empty prompt"),
        ([{"prompt": None, "answer": "1"}], "row 1 of rows.jsonl has no prompt"),
        ([{"prompt": [{"content": "hi"}], "answer": "1"}], "message 1 has no role"),
        ([{"prompt": [{"role": "user", "content": None}], "answer": "1"}], "message 1 has no text content"),
        ([{"prompt": "a " * 600, "answer": "1"}], "1200 tokens, over data.max_prompt_tokens = 512"),
        ([{"prompt": "a", "answer": "no number"}], "'no number' in column 'answer' does not read"),
        ([{"prompt": "a", "answer": None}], "gold in column 'answer' is NoneType"),
        ([{"prompt": "a"}], "no column 'answer'"),
        ([{"prompt": "Say 7", "answer": "7"}], "self-test 'the prompt itself' scores 1"),
    ],
)
def test_bad_rows_are_named_with_their_number(tokenizer, tmp_path, lines, words):
    with pytest.raises(DataError, match=re.escape(words)):
        load(tokenizer, file=jsonl(tmp_path, lines), held_out=0.0, prompt_rule="raw")


def test_bad_rows_can_be_skipped_and_are_counted(tokenizer, tmp_path):
    good = [{"prompt": f"Say {n}", "answer": str(n + 50)} for n in range(10)]
    file = jsonl(tmp_path, [*good, {"prompt": ""}, {"answer": "1"}, {"prompt": "a", "answer": "none"}])
    data = load(tokenizer, file=file, on_bad_row="skip")
    assert len(data.train) + len(data.held_out) == 10 and len(data.skipped) == 3
    with pytest.raises(DataError, match="row 11.*row 12.*row 13"):
        load(tokenizer, file=file)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"file": "nowhere.jsonl"}, "does not exist"),
        ({"file": "rows.csv"}, "suffix .csv"),
        ({"file": "a.jsonl", "dataset": "b"}, "both given"),
        ({"task": "arithmetics"}, "did you mean 'arithmetic'"),
        ({"task": "gsm8k"}, "is a recipe for a file"),
        ({"columns": {"prompt": "x"}}, "data.columns is for your own rows"),
    ],
)
def test_wrong_sources_are_refused(tokenizer, data, words):
    with pytest.raises(DataError, match=re.escape(words)):
        load(tokenizer, reward=RewardConfig(), **data)


def test_missing_mapped_column_names_the_nearest(tokenizer, tmp_path):
    with pytest.raises(DataError, match="no column 'qustion' \\(mapped to 'prompt'\\); did you mean 'question'"):
        load(tokenizer, file=jsonl(tmp_path, rows(3)), columns={"prompt": "qustion"})


def test_rows_without_a_verifier_need_a_reward(tokenizer, tmp_path):
    from tinyllm.rewards import make_judge

    data = load(tokenizer, reward=RewardConfig(), file=jsonl(tmp_path, rows(10)), columns=MAP)
    with pytest.raises(RewardError, match="no verifier of their own"):
        make_judge(RewardConfig(), data)


def test_gsm8k_recipe(tokenizer, tmp_path):
    file = jsonl(
        tmp_path,
        [
            {
                "question": f"Tom has {n} boxes of 12 pens. How many pens?",
                "answer": f"He has {n}*12=<<{n}*12={n * 12}>>\n#### {n * 12:,}",
            }
            for n in range(100, 112)
        ],
    )
    data = load(tokenizer, reward=RewardConfig(), task="gsm8k", file=file)
    assert "#### N" in data.train[0].text and data.verifier.startswith("arithmetic:rule=hash")
    with pytest.raises(DataError, match="no column 'question'"):
        load(tokenizer, reward=RewardConfig(), task="gsm8k", file=jsonl(tmp_path, [{"q": "a"}]))


def test_order_and_split_do_not_depend_on_the_seed(tokenizer, tmp_path):
    config = GRPOConfig(data=DataConfig(file=jsonl(tmp_path, rows(20)), columns=MAP), reward=LAST)
    assert tasks.load(config, tokenizer).hash == tasks.load(replace(config, seed=9), tokenizer).hash


def test_half_a_surrogate_pair_in_a_prompt_is_named_with_its_row(tokenizer, tmp_path):
    for prompt in ("1 \ud800 2", [{"role": "user", "content": "\ud800"}]):
        path = jsonl(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": prompt, "answer": "1"}])
        with pytest.raises(DataError, match=r"row 2 of rows.jsonl.* has half a surrogate pair \('.ud800'\)"):
            load(tokenizer, file=path, held_out=0)
