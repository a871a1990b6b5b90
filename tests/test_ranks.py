"""Training on several ranks (torchrun, FSDP2) against one process: updates, whole runs, checkpoints, faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from rank_worker import GROUPS, updates
from test_served_run import KEY, served
from test_sft_dpo import dpo_config, sft_config

from tinyllm.config.io import make_config, to_toml
from tinyllm.distributed.ranks import SOLO, current_ranks
from tinyllm.distributed.shared_run import SharedCheckpoints
from tinyllm.engine.remote.servers import Servers
from tinyllm.errors import ConfigError, RunError
from tinyllm.model.memory import memory_estimate
from tinyllm.post import run as runs
from tinyllm.post.batch import BatchRules, assign_to_ranks, make_batch
from tinyllm.post.optimizer import Optimizer
from tinyllm.record.checkpoint import Checkpoints
from tinyllm.record.rundir import RunDir
from tinyllm.records import Revision

ROOT = Path(__file__).parent.parent
WORKER = str(Path(__file__).with_name("rank_worker.py"))
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

JUDGE = """
import os, psutil, signal, time

def digits(prompts, completions, trainer_state, log_extra, log_metric, **columns):
    if os.environ.get("RANK", "0") == os.environ.get("KILLED_RANK") and trainer_state.global_step == 3:
        os.kill(os.getppid(), signal.SIGKILL)  # the rank that this worker judges for
    if "STOPPED_BY" in os.environ and os.environ.get("RANK") == "0" and trainer_state.global_step == 2:
        os.kill(psutil.Process(os.getppid()).ppid(), int(os.environ.pop("STOPPED_BY")))  # torchrun
        time.sleep(2.0)
    values = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    log_extra("shown", [text.upper() for text in completions])
    log_metric("mean", sum(values) / len(values))
    return [v if p[0] in "13579" else 0.0 for p, v in zip(prompts, values)]
"""


def launch(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """torchrun with two ranks, until all its processes have gone."""
    left = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    env = {**left, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **variables}
    process = subprocess.Popen(
        [*LAUNCH, *words], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=7200)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


# What needs no second process


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    current_ranks.cache_clear()
    assert current_ranks() is SOLO and SOLO.is_main and not torch.distributed.is_initialized()
    assert SOLO.gather(3) == [3] and SOLO.on_main(lambda: 4) == 4 and SOLO.share([1, 2], lambda x: x) == [1, 2]


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    current_ranks.cache_clear()
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2 but RANK is not set; start with torchrun"):
        current_ranks()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="RANK = 'one'"):
        current_ranks()


@pytest.mark.parametrize("budget", [1, 11, 4096])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_micro_batches_are_dealt_out(ranks, budget):
    """Every row once, as many passes on each rank, and no idle rank while groups are left."""
    config = make_config(train={"tokens_per_microbatch": budget}, objective={"beta": 0.1})
    batch = make_batch(GROUPS, BatchRules.of(config))
    dealt = assign_to_ranks(batch, ranks)
    rows = sorted(row for rank in dealt for rows in rank for row in rows)
    assert rows == sorted(row for part in batch.microbatches for row in part)
    assert len(dealt) == ranks and len({len(rank) for rank in dealt}) == 1
    if ranks <= len(GROUPS):
        assert all(rank[0] for rank in dealt)
    if ranks == 1:
        assert tuple(dealt[0]) == batch.microbatches


def test_an_empty_batch_deals_nothing():
    batch = make_batch([GROUPS[2]], BatchRules.of(make_config()))
    assert not batch.microbatches and assign_to_ranks(batch, 2) == [[], []]


def test_memory_is_counted_per_rank():
    """Weights on every rank; a half of fp32 gradients, moments and masters on each of two."""
    arch, config = tiny.llama().config, make_config(train={"steps": 1})
    size = tiny.llama().num_parameters()
    for dtype in (torch.float32, torch.bfloat16):
        parts = dict(memory_estimate(arch, dtype, config, ranks=2).parts)
        assert parts["weights"] == size * dtype.itemsize
        assert (parts["gradients"], parts["optimizer"]) == (2 * size, 6 * size)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_checkpoint_of_shards_is_checked_like_any_other(tmp_path, name):
    config = make_config(optimizer={"name": name}).optimizer
    optimizer = Optimizer(tiny.llama(dtype=torch.bfloat16).named_parameters(), config)
    for p in optimizer.parameters.values():
        p.grad = torch.ones_like(p, dtype=torch.float32)
    optimizer.step(0.1, 1.0)
    saved = SharedCheckpoints(tmp_path, SOLO)
    for step in (1, 2):
        saved.save(step, optimizer.tensors(), {"seed": 7}, keep=2)
    saved.wait()
    step, tensors, state = Checkpoints(tmp_path).load()
    assert (step, state) == (2, {"seed": 7})
    again = Optimizer(tiny.llama(1, dtype=torch.bfloat16).named_parameters(), config)
    again.load(tensors)
    for group, named in optimizer.tensors().items():
        assert tiny.equal(again.tensors()[group], named), group
    (file,) = (tmp_path / "000002").glob("shard-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert Checkpoints(tmp_path).load()[0] == 1, "the damaged one is passed over"
    with pytest.raises(RunError, match="damaged"):
        Checkpoints(tmp_path).load(2)


def test_fp32_shards_are_the_masters_of_bf16_weights():
    """What several ranks save has no masters apart: one process takes them from the weights, and rounds those."""
    optimizer = Optimizer(tiny.llama(dtype=torch.bfloat16).named_parameters(), make_config().optimizer)
    exact = {name: p.detach().float() + 1e-4 for name, p in optimizer.parameters.items()}
    optimizer.load({"weights": exact, "optimizer": {}})
    assert tiny.equal(optimizer.masters, exact)
    assert all(torch.equal(p, exact[name].bfloat16()) for name, p in optimizer.parameters.items())


def test_lines_of_another_number_of_ranks_are_put_aside(train):
    path = train("run").run_dir
    before = tiny.metrics(path)
    with RunDir.open(path) as run:
        run.leave_lines(1, 1)
        assert tiny.metrics(path) == before
        run.leave_lines(1, 2)
        assert tiny.metrics(path) == before[:1] and all(row["step"] <= 1 for row in run.metrics())
        run.log({"step": 2, "ranks": 2})  # the line that was there does not bind it
    aside = [json.loads(line) for line in (path / "superseded" / "metrics.1.jsonl").read_text().splitlines()]
    assert [row for row in aside if row.get("kind", "train") == "train"] == before[1:]


def test_ranks_take_over_what_servers_confirmed():
    first, second = (
        Servers([SimpleNamespace(model="m", label=None, revision=None, quarantined=None)]) for _ in range(2)
    )
    first.all[0].model, first.all[0].label, first.all[0].revision = "adapter-2", "2:ab", Revision(2, "ab")
    second.adopt(first.confirmed())
    assert second.confirmed() == first.confirmed() == [("adapter-2", "2:ab", Revision(2, "ab"), None)]


# Two ranks


@pytest.mark.slow
def test_updates_on_two_ranks_are_those_of_one(tmp_path):
    """Every preset, uneven lengths, idle passes: losses, norms, statistics and weights to 1e-6; AdamW to rounding."""
    done = launch(WORKER, "updates", str(tmp_path / "two.pt"), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    two, one = torch.load(tmp_path / "two.pt", weights_only=True), updates(SOLO)
    assert two.keys() == one.keys() and one["grpo"]["passes"] % 2, "one rank has an idle pass"
    for name, alone in one.items():
        both = two[name]
        tolerance = {"adamw": 1e-5, "bf16": 2e-2}.get(name, 1e-6)
        assert both["updates"] == alone["updates"] >= 1
        if name != "updates":  # its first pass is the only one before the weights differ
            assert both["logprobs"] == alone["logprobs"], f"{name}: a row is scored with the same bits"
        for key in ("loss", "grad_norm", "entropy"):
            assert near(both[key], alone[key], tolerance), (name, key, both[key], alone[key])
        for key, value in alone["stats"].items():
            assert near(both["stats"][key], value, tolerance), (name, key)
        for key, weight in alone["weights"].items():
            gap = (both["weights"][key].float() - weight.float()).abs().max() / weight.float().abs().max()
            assert gap <= tolerance, (name, key, float(gap))


@pytest.fixture(scope="module")
def folder(home, tmp_path_factory) -> Path:
    """A model, rows, a reward and configurations of short runs, one of them done in this process."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "judge.py").write_text(JUDGE)
    options = {
        "reward": {"functions": ("judge.py:digits",), "timeout_s": 3600.0, "workers": 1},
        "train": {"steps": 4, "prompts_per_step": 3, "dynamic_sampling": True},
        "stop": {"refills": 20},
        "objective": {"beta": 0.02},
        "eval": {"every": 2},
        "run": {"checkpoint_every": 2, "threads": 1, "dir": None},
    }
    config = tiny.config(home / "model", home / "rows.jsonl", folder / "none", **options)
    (folder / "grpo.toml").write_text(to_toml(config))
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process, from the same file."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        from tinyllm.commands.cli import main

        assert main(["grpo", "--config", "grpo.toml", "--run.dir", "one"]) == 0
    finally:
        os.chdir(before)
    return folder / "one"


def cut(run: Path, copy: Path) -> Path:
    """A copy of a run as a crash in step 4 leaves it: its last checkpoint is that of step 2, step 3 is recorded."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "000004")
    shutil.rmtree(copy / "model")
    for path in (copy / "rollouts").glob("000004*"):
        path.unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 4))
    return copy


def same_run(a: Path, b: Path, tolerance: float = 2e-5) -> None:
    """The same completions and verdicts in every step, the same numbers within rounding, the same final weights."""
    first, second = RunDir.read(a), RunDir.read(b)
    assert first.steps() == second.steps() == [1, 2, 3, 4]
    for step in first.steps():
        pairs = zip(first.read_groups(step), second.read_groups(step), strict=True)
        for x, y in pairs:
            assert x.id == y.id and [r.verdict for r in x.rollouts] == [r.verdict for r in y.rollouts]
            for p, q in zip(x.rollouts, y.rollouts, strict=True):
                assert (p.completion.token_ids, p.completion.seed_key) == (
                    q.completion.token_ids,
                    q.completion.seed_key,
                )
    for kind in ("train", "eval"):
        for x, y in zip(first.metrics(kind), second.metrics(kind), strict=True):
            for key in (x.keys() | y.keys()) - {"hashes", "microbatches", "revision", "ranks", "sampler_equal"}:
                was, now = x[key], y[key]
                if isinstance(was, float) and isinstance(now, float):
                    assert near(was, now, tolerance), (x["step"], key, was, now)
                elif not isinstance(was, dict):
                    assert was == now, (x["step"], key, was, now)
    for name, weight in tiny.weights(a / "model").items():
        torch.testing.assert_close(tiny.weights(b / "model")[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_runs_on_two_ranks_are_those_of_one(folder, alone, home, monkeypatch):
    """GRPO with refills, KL and evaluation, on servers too; resumed from one on two, and back; adapters; SFT, DPO."""
    monkeypatch.chdir(folder)
    cut(alone, folder / "one-two")
    lora = {"lora": {"rank": 2}, "train": {"steps": 2}, "run": {"checkpoint_every": 1}}
    answers = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(12)]
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": f"{i}x{i}"} for i in range(12)]
    for name, lines in (("sft.jsonl", answers), ("dpo.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "sft.toml").write_text(to_toml(sft_config(home / "model", folder / "sft.jsonl", **lora)))
    (folder / "dpo.toml").write_text(to_toml(dpo_config(home / "model", folder / "dpo.jsonl", train={"steps": 1})))
    words = [
        ["grpo", "--config", "grpo.toml", "--run.dir", "two"],
        ["grpo", "--resume", "one-two"],
        ["sft", "--config", "sft.toml", "--run.dir", "sft-two"],
        ["dpo", "--config", "dpo.toml", "--run.dir", "dpo-two"],
        ["replay", "two"],
    ]
    with served(home / "model") as (_, url):
        words.append(["grpo", "--config", "grpo.toml", "--run.dir", "served-two", "--engine.urls", url])
        (folder / "lines.json").write_text(json.dumps(words))
        done = launch(WORKER, "commands", "lines.json", folder=folder, TINYLLM_ADMIN_KEY=KEY)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [json.loads((folder / f"lines.{rank}").read_text()) for rank in (0, 1)] == [[0] * 6] * 2, done.stderr[-4000:]
    two = RunDir.read("two")
    assert two.manifest["facts"]["ranks"] == 2 and all(row["ranks"] == 2 for row in two.metrics("train"))
    assert len(list(Path("two/checkpoints/000004").glob("shard-*.safetensors"))) == 2
    assert done.stdout.count(" two/model") == 1, "rank 0 alone says what there is"
    assert "in float32 on 2 ranks (cpu)" in done.stdout
    assert done.stdout.count("4 steps, every hash equal") == 1, done.stdout
    same_run(alone, folder / "two")
    assert two.read_groups(1) == RunDir.read(alone).read_groups(1), "to the last bit, before any weight was trained"
    files = [RunDir.read(path).read_step(1) for path in (alone, folder / "two")]
    extras, metrics = ([getattr(file.logged, name) for file in files] for name in ("extras", "metrics"))
    assert extras[0] == extras[1] and extras[0]["shown"][0] is not None, "in the order of the rollouts"
    assert metrics[0].keys() == metrics[1].keys() == {"digits/mean"}
    for name in ("one-two", "served-two"):
        same_run(alone, folder / name)
    assert [row["ranks"] for row in RunDir.read("one-two").metrics("train") if row["step"] > 2] == [2, 2]
    assert (folder / "one-two" / "superseded" / "metrics.1.jsonl").exists(), "step 3 was logged with other last bits"
    runs.resume(cut(folder / "two", folder / "two-one"))
    same_run(alone, folder / "two-one")
    for kind in ("sft", "dpo"):
        from tinyllm.commands.cli import main

        assert main([kind, "--config", f"{kind}.toml", "--run.dir", f"{kind}-one"]) == 0
        for name, weight in tiny.weights(folder / f"{kind}-one" / "model").items():
            torch.testing.assert_close(
                tiny.weights(folder / f"{kind}-two" / "model")[name], weight, rtol=1e-5, atol=1e-6
            )


@pytest.mark.slow
def test_a_mistake_is_told_once(folder):
    done = launch("-m", "tinyllm", "grpo", "--config", "grpo.toml", "--data.file", "missing.jsonl", folder=folder)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    lines = [line for line in done.stderr.splitlines() if "missing.jsonl" in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr


@pytest.mark.slow
def test_asking_torchrun_to_stop_saves_the_step_and_one_process_goes_on(folder, alone, monkeypatch):
    """SIGTERM to torchrun, which passes it on to the ranks (Ctrl-C goes the same way)."""
    monkeypatch.chdir(folder)
    words = ("-m", "tinyllm", "grpo", "--config", "grpo.toml", "--run.dir", "stopped")
    done = launch(*words, folder=folder, STOPPED_BY=str(int(signal.SIGTERM)))
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "tinyllm grpo --resume" in line]
    assert len(lines) == 1 and lines[0].startswith("stopped: after step 2"), done.stderr
    run = RunDir.read("stopped")
    assert [row["step"] for row in run.metrics("train")] == [1, 2] and run.checkpoints.steps() == [2]
    runs.resume(folder / "stopped")
    same_run(alone, folder / "stopped")


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_another_number_goes_on(folder, alone, monkeypatch):
    """SIGKILL in step 3 on rank 1: torchrun fails, nobody hangs, and one process ends the run as if nothing was."""
    monkeypatch.chdir(folder)
    words = ("-m", "tinyllm", "grpo", "--config", "grpo.toml", "--run.dir", "killed")
    done = launch(*words, folder=folder, KILLED_RANK="1")
    assert done.returncode != 0 and "Signal 9 (SIGKILL)" in done.stderr
    assert done.stderr.count("error: ") <= 1, done.stderr
    assert RunDir.read("killed").checkpoints.steps() == [2]
    runs.resume(folder / "killed")
    same_run(alone, folder / "killed")
