"""axes.py: the presets are those of their papers, and everything that speaks of an axis says what the table says."""

from __future__ import annotations

import inspect
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from tinyllm.axes import AXES, PRESETS, ObjectiveAxes, describe_axes, resolve
from tinyllm.config.io import from_toml, make_config, overlay, to_toml
from tinyllm.config.options import options
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import ConfigError
from tinyllm.post import grpo

DOCS = Path(__file__).parent.parent / "docs" / "objectives.md"

# What each paper writes, by hand; where it leaves a value open, the remark says whose it is.
PAPERS = {
    # DeepSeekMath, arXiv:2402.03300: eq. 3 has the mean over outputs of the mean over tokens and the clipped ratio of
    # PPO (epsilon is left open: PPO's 0.2), section 4.1.2 the mean and std of the group, eq. 4 the k3 estimator,
    # section 4.2 the KL coefficient
    "grpo": {
        "baseline": "mean", "scale": "std", "ratio": "token", "clip": "ppo", "clip_low": 0.2, "clip_high": 0.2,
        "kl": "k3", "beta": 0.04, "aggregate": "sequence", "dynamic_sampling": False, "overlong_buffer": 0.0,
    },
    # Dr. GRPO, arXiv:2503.20783: section 3 takes out 1/|o_i| (a constant instead) and the std; no KL
    "dr_grpo": {
        "baseline": "mean", "scale": "none", "ratio": "token", "clip": "ppo", "clip_low": 0.2, "clip_high": 0.2,
        "beta": 0.0, "aggregate": "constant", "dynamic_sampling": False, "overlong_buffer": 0.0,
    },
    # DAPO, arXiv:2503.14476: eq. 8 sums over all tokens of the group, section 4.1 epsilon 0.2 and 0.28, section 2.3 no
    # KL, eq. 11 dynamic sampling, eq. 13 the overlong penalty, over the last 4,096 of 20,480 tokens (section 4.1)
    "dapo": {
        "baseline": "mean", "scale": "std", "ratio": "token", "clip": "ppo", "clip_low": 0.2, "clip_high": 0.28,
        "beta": 0.0, "aggregate": "token", "dynamic_sampling": True, "overlong_buffer": 4096 / 20480,
    },
    # GSPO, arXiv:2507.18071: eq. 5 the mean over sequences, eq. 7 the length-normalized sequence ratio, section 5.1
    # 3e-4 and 4e-4; no KL in eq. 5
    "gspo": {
        "baseline": "mean", "scale": "std", "ratio": "sequence", "clip": "ppo", "clip_low": 3e-4, "clip_high": 4e-4,
        "beta": 0.0, "aggregate": "sequence", "dynamic_sampling": False, "overlong_buffer": 0.0,
    },
    # MiniMax-M1, arXiv:2506.13585: eq. 4 the token-level sum with stop-gradient weights and no KL, eq. 5 the clipped
    # weight, without a lower bound; DAPO's dynamic sampling and length penalty. The upper bound 5 is ScaleRL's,
    # arXiv:2510.13786
    "cispo": {
        "baseline": "mean", "scale": "std", "ratio": "token", "clip": "cispo", "clip_low": 1.0, "clip_high": 4.0,
        "beta": 0.0, "aggregate": "token", "dynamic_sampling": True, "overlong_buffer": 0.2,
    },
}  # fmt: skip


def test_the_table_has_the_published_presets():
    assert list(PRESETS) == list(PAPERS)
    assert all("arXiv:" in p.paper and p.equation for p in PRESETS.values())


@pytest.mark.parametrize(("name", "paper"), PAPERS.items())
def test_a_preset_is_what_its_paper_writes(name, paper):
    preset = PRESETS[name]
    for axis, value in paper.items():
        assert getattr(preset.axes if axis in AXES else preset, axis) == value, axis
    assert preset.axes.sampler_correction == "none", "no paper of these corrects for its sampler"


def test_rows_are_the_arguments_of_the_functions_that_take_them():
    for of, function in (("advantages", grpo.group_advantages), ("loss", grpo.clipped_objective)):
        parameters, types = inspect.signature(function).parameters, typing.get_type_hints(function)
        rows = ObjectiveAxes().arguments(of)
        assert rows and set(rows) <= set(parameters)
        for name, default in rows.items():
            assert (parameters[name].default, types[name]) == (default, AXES[name].type), name
    assert {row.of for row in AXES.values()} == {"advantages", "loss"}


def test_options_are_the_rows_but_for_what_is_for_reports():
    found = {n.partition(".")[2]: o for n, o in options(GRPOConfig).items() if n.startswith("objective.")}
    assert list(found) == ["preset", *AXES]
    for name, axis in AXES.items():
        option = found[name]
        assert option.default is None and axis.meaning in option.help
        values = typing.get_args(option.type)
        if axis.choices:
            assert set(typing.get_args(values[0])) == set(axis.choices) - set(axis.report_only)
        else:
            below = axis.above if axis.above is not None else -0.1
            with pytest.raises(ConfigError, match=rf"objective.{name} = "):
                make_config(objective={name: int(below) if int in values else below})


def test_every_axis_refuses_what_the_table_does_not_have():
    for name, axis in AXES.items():
        with pytest.raises(ConfigError, match=rf"^{name} is '?other'?: use"):
            axis.refuse("other")


# Presets in a configuration


def beta(**given) -> float:
    return make_config(objective=given).objective.axes.beta


def test_the_kl_has_the_presets_weight_unless_one_is_given():
    assert GRPOConfig().objective.axes == replace(PRESETS["grpo"].axes, beta=0.0), "no preset named: GRPO without KL"
    assert (beta(preset="grpo"), beta(preset="grpo", beta=0.0), beta(preset="grpo", beta=0.1)) == (0.04, 0.0, 0.1)
    assert (beta(beta=0.3), beta(preset="dapo"), beta(preset="dapo", beta=0.3)) == (0.3, 0.0, 0.3)


def test_what_was_given_lies_over_the_preset_wherever_it_was_given():
    """A file with an axis, then a preset on the command line; and the whole survives TOML."""
    config = from_toml("[objective]\nclip_high = 0.3\nbeta = 0.0\n")
    config = overlay(config, {"objective.preset": "grpo"})
    assert config.objective.axes == replace(PRESETS["grpo"].axes, clip_high=0.3, beta=0.0)
    assert from_toml(to_toml(config)) == config == from_toml(to_toml(config, sparse=True))
    named = make_config(preset="grpo")
    assert from_toml(to_toml(named)) == named and named.objective.axes.beta == 0.04


def test_the_main_job_names_its_beta():
    config = from_toml((DOCS.parent.parent / "examples" / "arithmetic.toml").read_text())
    assert (config.objective.preset, config.objective.beta) == ("grpo", 0.0)


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_resolving_takes_only_what_is_given(name):
    axes = resolve(name, {"clip_low": 0.0, "ratio": None})
    assert axes.clip_low == 0.0 and axes.ratio == resolve(name, {}).ratio


def test_the_documentation_has_the_table():
    assert describe_axes() in DOCS.read_text(), f"write what describe_axes() gives into {DOCS.name}"
