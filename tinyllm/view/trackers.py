"""Send a run's metrics to TensorBoard, Weights & Biases or trackio as well. Needs the extra: tinyllm[track]."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinyllm.callbacks import Callback, RunInfo, RunResult
from tinyllm.config.io import to_dict
from tinyllm.errors import require_extra
from tinyllm.record.metrics import held_out_score, score_kind
from tinyllm.records import Group

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
Send = Callable[[dict[str, float], int], None]


class Tracker(Callback):
    """Sends the numbers of every step and evaluation, named train/..., timing/... and eval/...

    Raises MissingExtra when the tracker's package is missing.
    """

    def __init__(self, name: str):
        require_extra("track", f"run.trackers = {name}", name)
        self.module = importlib.import_module(MODULES[name])
        self.name = name
        self.send: Send | None = None
        self.close: Callable[[], None] = lambda: None

    def on_start(self, info: RunInfo) -> None:
        config = to_dict(info.config)
        if self.name == "tensorboard":
            writer = self.module.SummaryWriter(str(info.path / "tensorboard"))

            def send(values: dict[str, float], step: int) -> None:
                for key, value in values.items():
                    writer.add_scalar(key, value, step)

            self.send, self.close = send, writer.close
        else:
            run = self.module.init(project="tinyllm", name=info.path.name, config=config)
            self.send, self.close = lambda values, step: run.log(values, step=step), run.finish

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        assert self.send is not None
        self.send(numbers_of("train", metrics) | numbers_of("timing", timing), metrics["step"])

    def on_eval(self, row: Mapping[str, Any]) -> None:
        assert self.send is not None
        score = held_out_score(row)
        named = {f"eval/{score_kind(row)}": score[0]} if score else {}
        self.send(numbers_of("eval", row) | named, row["step"])

    def on_end(self, result: RunResult | None) -> None:
        self.close()


def numbers_of(prefix: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, by prefix/key; texts, lists and missing values are left out."""
    return {
        f"{prefix}/{key}": float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step"
    }
