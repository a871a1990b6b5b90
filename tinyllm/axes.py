"""The axes of the objective, one row each: name, type, default, bound and meaning; and the published presets.

The checks of post/grpo.py, the options of [objective] with their help, the presets, and the tables of
docs/objectives.md all derive from these rows. A new axis is one row here and its formula in post/grpo.py. No torch.

Legend: q probability ratio exp(logp_new - logp_old), A advantage, B completions of the step, L constant_length.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, SupportsFloat, TypeAlias, TypeVar

from tinyllm.errors import ConfigError

Baseline: TypeAlias = Literal["mean", "leave_one_out"]
"""Subtracted from a reward: the mean of its whole group, or of the other members (RLOO, arXiv:2402.14740)."""
Scale: TypeAlias = Literal["std", "none"]
"""Divisor of an advantage: the population standard deviation of the rewards of its whole group, or none."""
Ratio: TypeAlias = Literal["token", "sequence"]
"""One q per token, or one per completion: exp of the mean of its tokens' log-ratios (GSPO, eq. 7)."""
Clip: TypeAlias = Literal["ppo", "dual", "cispo"]
"""How q is clipped.

    ppo    min(q A, clip(q) A) with clip(q) = clamp(q, 1 - clip_low, 1 + clip_high) (PPO, arXiv:1707.06347, eq. 7);
           clip_high > clip_low is clip-higher (DAPO)
    dual   as ppo, but for A < 0 at least dual_clip A (Dual-clip PPO, arXiv:1912.09729, eq. 5)
    cispo  stop_gradient(clip(q)) A logp_new: q is only a weight, so no token loses its gradient (MiniMax-M1, eq. 4)
"""
KL: TypeAlias = Literal["k3", "k2", "k1"]
"""Estimator of the KL to the reference policy, see kl_estimate. k1 is for reports only, not for a loss."""
Aggregate: TypeAlias = Literal["sequence", "token", "constant"]
"""sequence: mean over each completion's tokens, then over completions; token: mean over all tokens of the step;
constant: sum over all tokens divided by B x L (Dr. GRPO)."""
SamplerCorrection: TypeAlias = Literal["none", "token", "sequence"]
"""Importance weight exp(logp_old - logp_sampler): none (the gap is only reported), one per token, or one per sequence
(the product over its tokens)."""
SamplerMode: TypeAlias = Literal["truncate", "mask"]
"""Treatment of an importance weight above sampler_cap: truncate sets it to the cap, mask to 0."""

PresetName: TypeAlias = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
_T = TypeVar("_T")


def _axis(
    default: _T,
    meaning: str,
    of: Literal["advantages", "loss"] = "loss",
    *,
    above: float | None = None,
    report_only: tuple[str, ...] = (),
) -> _T:
    """A row of the table. of: the function that takes the axis as an argument; above: exclusive lower bound of a number
    (None: at least 0); report_only: choices that only a report may use."""
    row = {"meaning": meaning, "of": of, "above": above, "report_only": report_only}
    return field(default=default, metadata=row)


@dataclass(frozen=True, slots=True)
class ObjectiveAxes:
    """One value for each axis, named as the arguments of group_advantages and clipped_objective."""

    baseline: Baseline = _axis("mean", "mean subtracted from each reward: of its group, or of the others", "advantages")
    scale: Scale = _axis("std", "divisor of advantages: the group's standard deviation, or none", "advantages")
    ratio: Ratio = _axis("token", "probability ratio per token, or one per completion")
    clip: Clip = _axis("ppo", "how the ratio is clipped")
    clip_low: float = _axis(0.2, "the ratio is clipped below 1 - clip_low")
    clip_high: float = _axis(0.2, "the ratio is clipped above 1 + clip_high")
    dual_clip: float = _axis(3.0, "upper bound on the ratio of a negative advantage, with clip = dual", above=1.0)
    kl: KL = _axis("k3", "estimator of the KL in the loss", report_only=("k1",))
    beta: float = _axis(0.0, "weight of the KL to the reference policy")
    aggregate: Aggregate = _axis("sequence", "how token losses are averaged")
    constant_length: int | None = _axis(None, "divisor with aggregate = constant; not set = max_new_tokens", above=0.0)
    sampler_correction: SamplerCorrection = _axis("none", "importance weight for a gap between sampler and trainer")
    sampler_mode: SamplerMode = _axis("truncate", "an importance weight above the cap is set to the cap, or to 0")
    sampler_cap: float = _axis(2.0, "largest importance weight", above=0.0)

    def arguments(self, of: Literal["advantages", "loss"]) -> dict[str, Any]:
        """The keyword arguments of group_advantages ("advantages") or of clipped_objective ("loss")."""
        return {name: getattr(self, name) for name, row in AXES.items() if row.of == of}


@dataclass(frozen=True, slots=True)
class Axis:
    """One row of the table of axes."""

    name: str
    type: Any
    """The annotated type: a Literal, float, or int | None."""
    default: str | float | None
    meaning: str
    of: Literal["advantages", "loss"]
    above: float | None
    """A number must be greater than this; None: at least 0."""
    report_only: tuple[str, ...]
    """Choices that a report may use and a loss must not."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that the axis can have as its value; empty for a number."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    def refuse(self, value: object) -> None:
        """Raises ConfigError for a value that is not one of the choices, or a number outside the bound."""
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{self.name} is {value!r}: use {' or '.join(map(repr, self.choices))}")
            return
        require_number(self.name, value, self.above)


def _rows() -> dict[str, Axis]:
    types = typing.get_type_hints(ObjectiveAxes)
    unset = ObjectiveAxes()
    return {f.name: Axis(f.name, types[f.name], getattr(unset, f.name), **f.metadata) for f in fields(ObjectiveAxes)}


AXES: Mapping[str, Axis] = _rows()
"""The rows of ObjectiveAxes by name, in order."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One published objective: its paper and equations, its axes, and the trainer options that the paper uses."""

    paper: str
    equation: str
    axes: ObjectiveAxes
    dynamic_sampling: bool = False
    """Whether groups without signal are replaced by groups of further prompts."""
    overlong_buffer: float = 0.0
    """Share of max_new_tokens, at its end, over which the reward falls by up to 1; 0: no penalty."""


PRESETS: Mapping[PresetName, Preset] = {
    "grpo": Preset("DeepSeekMath, arXiv:2402.03300", "eq. 3 (objective), eq. 4 (KL)", ObjectiveAxes(beta=0.04)),
    "dr_grpo": Preset(
        "Dr. GRPO, arXiv:2503.20783", "section 3", ObjectiveAxes(scale="none", aggregate="constant")
    ),
    "dapo": Preset(
        "DAPO, arXiv:2503.14476", "eq. 8 (objective), eq. 11 (dynamic sampling), eq. 13 (overlong)",
        ObjectiveAxes(clip_high=0.28, aggregate="token"), dynamic_sampling=True, overlong_buffer=0.2,
    ),
    "gspo": Preset(
        "GSPO, arXiv:2507.18071", "eq. 5 (objective), eq. 7 (ratio)",
        ObjectiveAxes(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    ),
    "cispo": Preset(  # no lower bound; weight at most 5, the value of ScaleRL (arXiv:2510.13786)
        "MiniMax-M1, arXiv:2506.13585", "eq. 4 (objective), eq. 5 (clipped weight)",
        ObjectiveAxes(clip="cispo", clip_low=1.0, clip_high=4.0, aggregate="token"),
        dynamic_sampling=True, overlong_buffer=0.2,
    ),
}  # fmt: skip

UNNAMED: PresetName = "grpo"
"""The preset of a run that names none; its beta is then 0, so that no reference policy is held in memory or scored."""


def resolve(preset: PresetName | None, given: Mapping[str, Any]) -> ObjectiveAxes:
    """The preset's axes, overridden by the values of `given` that are not None.

    Preset None: GRPO without its KL term, that is with beta 0 unless `given` has a beta.
    """
    axes = PRESETS[preset].axes if preset else replace(PRESETS[UNNAMED].axes, beta=0.0)
    return replace(axes, **{name: value for name, value in given.items() if value is not None})


def require_number(name: str, value: object, above: float | None = None) -> None:
    """Raises ConfigError unless value is a finite number of at least 0 and, where `above` is given, greater than it."""
    number = float(value) if isinstance(value, SupportsFloat) else math.nan
    if not (0 <= number < math.inf and (above is None or number > above)):
        bound = "of at least 0" if above is None else f"above {above:g}"
        raise ConfigError(f"{name} is {value}: use a finite number {bound}")


def check_axes(**values: object) -> None:
    """Check the values of axes, given by name. Raises ConfigError for a wrong choice or a number outside its bound."""
    for name, value in values.items():
        AXES[name].refuse(value)


def describe_axes() -> str:
    """The axes and the presets as two Markdown tables, for docs/objectives.md."""
    lines = ["| Axis | Values | Default | Meaning |", "|---|---|---|---|"]
    for axis in AXES.values():
        number = "whole number" if axis.type == int | None else "number"
        bound = "at least 0" if axis.above is None else f"above {axis.above:g}"
        values = ", ".join(f"`{choice}`" for choice in axis.choices if choice not in axis.report_only)
        default = "" if axis.default is None else f"`{axis.default}`"
        lines.append(f"| `{axis.name}` | {values or f'{number} {bound}'} | {default} | {axis.meaning} |")
    lines += ["", "| Preset | Defined in | Axes that differ from the default | Trainer options |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        differ = [
            f"`{row.name} = {getattr(preset.axes, row.name)}`"
            for row in AXES.values()
            if getattr(preset.axes, row.name) != row.default
        ]
        options = ["`dynamic_sampling = true`"] if preset.dynamic_sampling else []
        options += [f"`overlong = {preset.overlong_buffer}`"] if preset.overlong_buffer else []
        where = f"{preset.paper}: {preset.equation}"
        lines.append(f"| `{name}` | {where} | {', '.join(differ)} | {', '.join(options)} |")
    return "\n".join(lines) + "\n"
