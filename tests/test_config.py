"""Configurations: strict keys, one-line errors with the remedy, exact round trips."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.axes import AXES
from tinyllm.config.io import (
    check,
    from_dict,
    from_toml,
    load_toml,
    make_config,
    overlay,
    to_dict,
    to_toml,
)
from tinyllm.config.old import MOVED, upgrade
from tinyllm.config.options import options
from tinyllm.config.sections import CONFIGS, SHORTCUTS, GRPOConfig, LoraConfig, SFTConfig
from tinyllm.config.words import NoArguments, parse_words
from tinyllm.errors import ConfigError
from tinyllm.evals.config import SuiteConfig
from tinyllm.record.hashing import hash_bytes, hash_file, hash_json, hash_tensor, hash_tensors
from tinyllm.record.rundir import RunDir

RECORDED = Path(__file__).parent / "data" / "recorded"


def flat_options(words: list[str], kind: type = GRPOConfig) -> dict[str, object]:
    return parse_words(words, NoArguments, kind, "tinyllm grpo")[1]


def from_words(line: str) -> GRPOConfig:
    return overlay(GRPOConfig(), flat_options(line.split()))


def test_defaults_are_valid():
    check(GRPOConfig())


def test_optional_values_default_to_none():
    """TOML has no null, so None must never need to be written."""
    for option in options(GRPOConfig).values():
        if "None" in str(option.type):
            assert option.default is None, option.name


def test_every_option_has_a_description_that_fits_a_line():
    for kind in CONFIGS.values():
        for option in options(kind).values():
            assert 5 < len(option.help) < 101, option.name


def test_shortcuts_name_options():
    assert set(SHORTCUTS.values()) <= {name for kind in CONFIGS.values() for name in options(kind)}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--sampling.group_size 4", "sampling.group_size", 4),
        ("--group-size=4", "sampling.group_size", 4),
        ("--lr 3e-6", "optimizer.lr", 3e-6),
        ("--model my/folder", "model.name", "my/folder"),
        ("--data rows.jsonl", "data.file", "rows.jsonl"),
        ("--data openai/gsm8k:main", "data.dataset", "openai/gsm8k:main"),
        ("--reward pkg.mod:fn,pkg.mod:other", "reward.functions", ("pkg.mod:fn", "pkg.mod:other")),
        ("--columns prompt=question,answer=solution", "data.columns", {"prompt": "question", "answer": "solution"}),
        ("--gradient-checkpointing", "model.gradient_checkpointing", True),
        ("--gradient-checkpointing --steps 3", "train.steps", 3),
        ("--dynamic_sampling false", "train.dynamic_sampling", False),
        ("--betas 0.8,0.99", "optimizer.betas", (0.8, 0.99)),
        ('--stop_strings ["a,b","c"]', "sampling.stop_strings", ("a,b", "c")),
        ("--task arithmetic:operands=1|9,seed=3", "data.task", "arithmetic:operands=1|9,seed=3"),
        ("--reward math:rule=boxed,units=waive,a:b", "reward.functions", ("math:rule=boxed,units=waive", "a:b")),
        ("--held-out 0.25", "data.held_out", 0.25),
        ("--held-out rows.jsonl", "data.held_out", "rows.jsonl"),
        ("--overlong 0.2", "train.overlong", 0.2),
        ("--overlong mask,0.2", "train.overlong", "mask,0.2"),
        ("--threads none", "run.threads", None),
    ],
)
def test_overrides(words, name, value):
    assert attrgetter(name)(from_words(words)) == value


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--sampling.grup_size 4", ["sampling.grup_size", "sampling.group_size"]),
        ("--goup-size 4", ["goup_size", "sampling.group_size"]),
        ("--optimiser.lr 1", ["optimizer.lr"]),
        ("--group_size 1", ["sampling.group_size = 1", "at least 2", "8"]),
        ("--clip_low -0.1", ["objective.clip_low = -0.1", "at least 0"]),
        ("--clip_high -0.1", ["objective.clip_high = -0.1", "at least 0"]),
        ("--clip_low 1.5", ["objective.clip_low = 1.5"]),
        ("--lr fast", ["optimizer.lr", "fast", "number"]),
        ("--lr nan", ["optimizer.lr", "finite"]),
        ("--steps 1.5", ["train.steps", "1.5", "whole number"]),
        ("--dtype float16", ["model.dtype", "float16", "auto|bfloat16|float32"]),
        ("--preset ppo", ["objective.preset", "ppo", "grpo"]),
        ("--betas 0.9", ["optimizer.betas", "number,number"]),
        ("--temperature 0", ["sampling.temperature", "more than 0"]),
        ("--seed x", ['seed = "x"', "whole number"]),
        ("--held_out x", ['data.held_out = "x"', "share", ".jsonl or .parquet"]),
        ("--held_out 1.5", ["data.held_out = 1.5", "less than 1"]),
        ("--overlong cut", ['train.overlong = "cut"', "mask,0.2"]),
        ("--overlong mask,2", ['train.overlong = "mask,2"', "mask,0.2"]),
        ("--steps", ["--steps", "needs a value"]),
        ("steps 5", ["'steps'", "--name value"]),
        ("--data x.jsonl --dataset y", ["data.file", "data.dataset"]),
        ("--weights 1,2 --reward a:b", ["reward.weights", "1 in all"]),
        ("--warmup_steps 50", ["optimizer.warmup_steps", "train.steps = 36"]),
        ("--trackers mlflow", ["run.trackers", "tensorboard|wandb|trackio"]),
    ],
)
def test_mistakes_name_field_value_and_remedy_in_one_line(words, parts):
    with pytest.raises(ConfigError) as caught:
        from_words(words)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_toml_is_sparse_and_strict(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('seed = 3\n[sampling]\ngroup_size = 4\n[data]\ntask = "arithmetic:operators=+"\n')
    config = load_toml(path)
    assert (config.seed, config.sampling.group_size, config.data.task) == (3, 4, "arithmetic:operators=+")
    assert from_toml(to_toml(config, sparse=True)) == config
    assert to_toml(config, sparse=True).count("\n") < 10

    path.write_text("[samplng]\ngroup_size = 4\n")
    with pytest.raises(ConfigError, match=r"run.toml: unknown option 'samplng'.*sampling"):
        load_toml(path)
    path.write_text("[sampling]\ngroup_size = true\n")
    with pytest.raises(ConfigError, match="sampling.group_size = true: expected whole number"):
        load_toml(path)
    path.write_text("[sampling\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_toml(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_toml(tmp_path / "missing.toml")


def test_a_number_where_a_section_belongs():
    with pytest.raises(ConfigError, match="is a section"):
        from_toml("sampling = 3")


def test_from_python():
    config = make_config(
        model="folder", data="rows.parquet", steps=3, lora=LoraConfig(rank=4), sampling={"max_batch": 2}
    )
    assert config.model.name == "folder"
    assert config.data.file == "rows.parquet"
    assert (config.train.steps, config.lora.rank, config.sampling.max_batch) == (3, 4, 2)
    assert make_config(config, steps=4).lora.rank == 4
    with pytest.raises(ConfigError, match=r"did you mean 'train.steps'"):
        make_config(stepz=3)
    with pytest.raises(ConfigError, match="expected whole number"):
        make_config(steps=True)
    with pytest.raises(ConfigError, match="group_size = 1"):
        make_config(sampling=replace(GRPOConfig().sampling, group_size=1))


text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)


@settings(deadline=None)
@given(text, st.dictionaries(text, text, max_size=3), st.lists(text.filter(bool), max_size=3), st.floats(1e-300, 1e300))
def test_round_trip_is_exact(words, columns, stops, lr):
    config = make_config(
        data={"system_prompt": words, "columns": columns},
        sampling={"stop_strings": stops},
        optimizer={"lr": lr},
    )
    assert from_toml(to_toml(config)) == config
    assert from_dict(to_dict(config)) == config


# hashing.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_tensor_hash_sees_every_bit(dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    base = hash_tensor(tensor)
    assert hash_tensor(tensor.clone()) == base
    assert hash_tensor(tensor.reshape(4, 3)) != base
    changed = tensor.clone()
    changed[2, 3] = 1
    assert hash_tensor(changed) != base
    assert hash_tensor(tensor.t().contiguous().t()) == base, "the layout in memory is no content"


def test_tensor_hash_tells_minus_zero_and_type_apart():
    assert hash_tensor(torch.tensor([0.0])) != hash_tensor(torch.tensor([-0.0]))
    assert hash_tensor(torch.zeros(2, dtype=torch.float16)) != hash_tensor(torch.zeros(2, dtype=torch.bfloat16))
    assert hash_tensor(torch.zeros(0, 3)) != hash_tensor(torch.zeros(3, 0))


def test_named_hash_ignores_order_and_ties():
    a, b = torch.randn(3, 4), torch.randn(5)
    base = hash_tensors({"a": a, "b": b, "tied": a})
    assert hash_tensors({"tied": a.clone(), "b": b, "a": a}) == base
    assert hash_tensors({"a": b, "b": a, "tied": a}) != base
    assert hash_tensors({"a": a, "b": b}) != base
    assert hash_tensors({"x": a, "y": a.t()}) != hash_tensors({"x": a, "y": a})


def test_json_and_file_hash(tmp_path):
    assert hash_json({"a": 1, "b": [1, 2]}) == hash_json({"b": (1, 2), "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 2})
    with pytest.raises(TypeError):
        hash_json({"a": object()})
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 40000)
    assert hash_file(path) == hash_bytes(path.read_bytes())


@pytest.mark.parametrize("name", ["model", "data", "data.held_out", "run.dir", "reference"])
def test_an_empty_value_is_never_taken_for_not_set(name):
    """As from an unset variable of the shell: --data "$FILE" must not train on another task."""
    for make in (lambda: overlay(GRPOConfig(), flat_options([f"--{name}", ""])), lambda: make_config(**{name: ""})):
        with pytest.raises(ConfigError, match="must not be empty; give a value or leave it out"):
            make()


def test_an_empty_stop_string_is_refused_and_an_empty_system_prompt_is_one():
    with pytest.raises(ConfigError, match='sampling.stop_strings = "": must not be empty'):
        make_config(sampling={"stop_strings": ["a", ""]})
    assert from_words("--seed 1").data.system_prompt is None
    assert make_config(system_prompt="").data.system_prompt == ""


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ConfigError, match="run.dir = 'o.udcff': has bytes that are not UTF-8"):
        make_config(run={"dir": "o\udcff"})


def test_a_file_of_another_kind_is_not_looked_up_as_a_dataset(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt")
    config = make_config(data=str(tmp_path / "rows.csv"))
    assert config.data.file and config.data.dataset is None
    assert make_config(data="openai/gsm8k").data.dataset == "openai/gsm8k"


def test_toml_of_other_editors(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    assert load_toml(tmp_path / "a.toml").train.steps == 7
    with pytest.raises(ConfigError, match="x.toml: not valid TOML: .*digits"):
        from_toml("seed = " + "9" * 5000, where="x.toml")


# Options of earlier versions


def test_a_run_is_decided_by_few_options():
    """Those that the table of axes makes are left out: an axis is counted where it is defined."""
    made = {f"objective.{name}" for name in AXES}
    assert made <= set(options(GRPOConfig))
    assert len(set(options(GRPOConfig)) - made) <= 66, "an option needs a user; else it is a constant with its reason"


def kind_that_had(name):
    return SuiteConfig if name.startswith("machine.") else GRPOConfig


@pytest.mark.parametrize("name", MOVED)
def test_an_old_option_says_what_is_written_now(name, tmp_path):
    kind = kind_that_had(name)
    section, _, leaf = name.rpartition(".")
    (tmp_path / "old.toml").write_text(f"[{section}]\n{leaf} = {'{seed = 1}' if leaf == 'arithmetic' else 1}\n")
    nested = {leaf: 1}
    for part in reversed(section.split(".")):
        nested = {part: nested}
    said = f"option {name!r} {MOVED[name]}"
    for write in (
        lambda: flat_options([f"--{name}", "1"], kind),
        lambda: load_toml(tmp_path / "old.toml", kind()),
        lambda: make_config(kind(), **nested),
    ):
        with pytest.raises(ConfigError) as caught:
            write()
        assert str(caught.value).endswith(said) or name.startswith("data.arithmetic") and MOVED[name].how in said
    assert MOVED[name].option is None or MOVED[name].option in options(kind)
    assert name not in options(kind)


def test_an_old_option_may_leave_out_its_section():
    with pytest.raises(ConfigError, match="'train.max_refills' is now 'stop.refills'"):
        from_words("--max-refills 8")
    with pytest.raises(ConfigError, match="'train.early_stop_evals' is now 'stop.evals_without_best'"):
        make_config(SFTConfig(), early_stop_evals=2)


def old_config(**sections):
    """A configuration as an earlier version recorded it."""
    found = json.loads((RECORDED / "plain" / "manifest.json").read_text())["config"]
    for name, values in sections.items():
        found[name] = {**found[name], **values}
    return found


def test_a_configuration_of_this_version_is_left_as_it_is():
    config = to_dict(make_config(overlong="mask,0.1", held_out="a.jsonl", reward=("a:b",)))
    assert upgrade(config) == config


def test_an_old_configuration_is_one_of_today():
    arithmetic = {"operators": ["+", "*"], "operands": [1, 20], "factors": [2, 10], "held_out": 160, "seed": 1}
    old = old_config(
        data={"arithmetic": arithmetic, "file": None, "held_out_fraction": 0.25},
        pool={"engines": 1, "group_deadline_s": 30.0},
        train={"mask_truncated": True, "overlong_buffer": 0.2, "max_refills": 8, "early_stop_evals": 3},
    )
    config = from_dict(upgrade(old))
    assert config.data.task == "arithmetic:operators=+|*,held_out=160,seed=1" and config.data.held_out == 0.25
    assert config.engine.deadline_s == 30.0
    assert (config.train.mask_truncated, config.train.overlong_buffer) == (True, 0.2)
    assert (config.stop.refills, config.stop.evals_without_best, config.stop.bad_steps) == (8, 3, 3)
    assert (config.sampling.group_size, config.optimizer.lr, config.run.dir) == (4, 0.1, "plain")
    served = from_dict(upgrade(old_config(engine={"urls": ["http://a:1", "http://b:1"], "model": "m"})))
    assert served.engine.urls == ("http://a:1#m", "http://b:1#m") and served.engine.deadline_s == 600.0
    with pytest.raises(ConfigError, match="optimizer.eps = 1e-06"):
        upgrade(old_config(optimizer={"eps": 1e-6}))


FORMAT = "format:rule=exact_format,tags=answer,gold="


@pytest.mark.parametrize(
    ("data", "reward", "functions", "weights"),
    [
        ({}, {"rule": "tag"}, ("arithmetic:rule=tag,tags=answer", FORMAT), (1.0, 0.0)),
        ({}, {"format_weight": 0.5}, ("arithmetic:rule=last_number", FORMAT), (1.0, 0.5)),
        (
            {"task": "gsm8k"},
            {"rule": "exact_format", "format_weight": 0.5},
            ("arithmetic:rule=exact_format,tags=answer,units=$", FORMAT),
            (1.0, 0.5),
        ),
        ({"task": "gym:chain_sum", "file": None}, {"format_weight": 0.5}, ("gym", FORMAT), (1.0, 0.5)),
        ({}, {"functions": ["a:b"], "format_weight": 0.5}, ("a:b", FORMAT), (1.0, 0.5)),
        ({}, {"functions": ["a:b"]}, ("a:b",), ()),
    ],
)
def test_an_old_rule_and_format_term_are_functions_now(data, reward, functions, weights):
    old = old_config(data=data, reward={"functions": [], "rule": None, "format_weight": 0.0, **reward})
    config = from_dict(upgrade(old))
    assert (config.reward.functions, config.reward.weights) == (functions, weights)


def test_runs_recorded_by_an_earlier_version_are_read():
    for name in ("plain", "lora", "pooled"):
        run = RunDir.read(RECORDED / name)
        assert run.config.data.held_out == 0.25 and run.config.stop.refills == 4
        assert run.manifest["config"] == to_dict(run.config), "so that conditions compare"
