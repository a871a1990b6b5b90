"""`train` starts a run of any kind, `resume` continues one; both save the trained model at the end."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from tinyllm.callbacks import Callback, Interrupted, RunInfo, RunResult
from tinyllm.config.io import make_config
from tinyllm.config.sections import Config
from tinyllm.distributed.ranks import Ranks, current_ranks
from tinyllm.distributed.shared_run import shared_run
from tinyllm.errors import RunError, TrainingStopped
from tinyllm.health.history import History
from tinyllm.model import models
from tinyllm.post.build import Run, build_run, require_same_start
from tinyllm.post.trainer import Evaluate, Progress, Trainer
from tinyllm.record.rundir import RunDir, new_run_path
from tinyllm.records import Revision


def train(config: Config, *, reward: Callable[..., Any] | None = None, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train by GRPO, SFT or DPO, whichever the configuration is for; returns the paths and evaluations of the run.

    reward: a reward function as a Python object, in place of config.reward.functions. Raises the errors of errors.py:
    for a user's mistake before any work, later with all finished steps saved.
    """
    ranks = current_ranks()
    # Before anything is loaded
    path = ranks.on_main(lambda: RunDir.require_free(Path(config.run.dir) if config.run.dir else new_run_path()))
    run = build_run(config, reward, callbacks, path)
    try:
        with shared_run(ranks, lambda: RunDir.create(path, run.manifest)) as folder:
            return _train(run, folder, Progress(), recorded=[])
    finally:
        run.close()


def resume(
    path: str | Path,
    *,
    reward: Callable[..., Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Continue a run that was stopped; it ends with the bits it would have had without the stop. Raises RunError.

    reward: the reward function of the run, where it was given as a Python object that cannot be imported. engine:
    options of the section [engine] to change, as {"urls": ("http://127.0.0.1:8001",)}; the manifest keeps the options
    of the start.
    """
    ranks = current_ranks()
    with shared_run(ranks, lambda: RunDir.open(path)) as folder:
        config = make_config(folder.config, engine=engine) if engine else folder.config
        run = build_run(config, reward, callbacks, folder.path)
        try:
            require_same_start(run, folder)
            progress = Progress()
            with suppress(RunError):  # no checkpoint yet, or (after a warning) no whole one: step 0 and the record do
                _, tensors, state = folder.load_checkpoint()
                run.learner.optimizer.load(tensors)
                known = {field.name for field in fields(Progress)}
                progress = Progress(**{name: x for name, x in state["progress"].items() if name in known})

            def recorded() -> list[int]:
                folder.require_logged(progress.step)
                folder.leave_lines(progress.step, ranks.count)
                return folder.take_recorded(progress.step)

            return _train(run, folder, progress, ranks.on_main(recorded))
        finally:
            run.close()


def _train(run: Run, folder: RunDir, progress: Progress, recorded: Sequence[int]) -> RunResult:
    """Train from `progress` to the end; recorded: numbers of the steps after it whose rollouts are on disk already."""
    learner = run.learner
    revision = Revision(progress.step, learner.weights_hash())
    run.publish(revision)
    with _stop_signals(lambda: run.phase("stopping after this step")) as stop_requested:
        trainer = Trainer(
            run=folder,
            config=run.config,
            optimizer=learner.optimizer,
            updater=learner.updater,
            weights_hash=learner.weights_hash,
            reference_hash=learner.reference_hash,
            revision=revision,
            history=History.of(folder, progress.step),
            evaluate=_agreed(run.ranks, run.evaluate),
            keep_best=lambda step: _save_model(run, folder, "best"),
            callbacks=run.callbacks,
            progress=progress,
            stop_requested=lambda: any(run.ranks.gather(stop_requested())),
            ranks=run.ranks,
        )
        facts = {name: fact for name, fact in run.manifest["facts"].items() if name != "verifier"}
        info = RunInfo(folder.path, run.config, progress.step + 1, facts)
        for callback in run.callbacks:
            callback.on_start(info)
        result: RunResult | None = None
        try:
            if progress.step == 0:
                trainer.first_evaluation()
            if not trainer.stopped_early():
                trainer.loop(run.source(folder, progress.position, recorded, revision))
            result = _finish(run, folder, trainer)
        except TrainingStopped:
            trainer.save()
            raise
        except KeyboardInterrupt:  # a second signal: nothing more is saved; resume can start from disk
            raise Interrupted(folder.path, progress.step, run.config.kind) from None
        finally:
            for callback in run.callbacks:
                callback.on_end(result)
    return result


def _finish(run: Run, folder: RunDir, trainer: Trainer) -> RunResult:
    run.phase("saving the model")
    _save_model(run, folder, "model")
    if trainer.progress.best_step == trainer.progress.step:  # model/ is the best, best/ an older one
        shutil.rmtree(folder.path / "best", ignore_errors=True)
    run.ranks.on_main(folder.checkpoints.wait)
    evals = folder.metrics("eval")
    return RunResult(
        run_dir=folder.path,
        before=evals[0] if evals else None,
        after=evals[-1] if evals else None,
        model_dir=folder.path / "model",
        best_step=trainer.progress.best_step,
    )


def _save_model(run: Run, folder: RunDir, name: str) -> None:
    run.ranks.on_main(lambda: models.save_model(run.learner.policy.model, run.tokenizer, folder.path / name))


def _agreed(ranks: Ranks, evaluate: Evaluate) -> Evaluate:
    """An evaluation that gives every rank the line of rank 0, so that all ranks take the same decisions from it."""
    return lambda step, groups: ranks.gather(evaluate(step, groups))[0]


@contextmanager
def _stop_signals(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a Ctrl-C or SIGTERM has come; a second one raises KeyboardInterrupt.

    on_first: called at the first signal.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        on_first()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
