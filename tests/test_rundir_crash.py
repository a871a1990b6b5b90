"""A run directory opened, locked, killed and full: whole after a crash anywhere, for one writer at a time."""

import json
import os
import signal
import threading

import pytest
from run_samples import CONFIG, assert_tensors_equal, child, make_groups, make_tensors, manifest, output

from tinyllm.config.io import load_toml
from tinyllm.errors import RunError
from tinyllm.record.manifest import compare_manifests
from tinyllm.record.rundir import RunDir, find_runs, new_run_path
from tinyllm.records import Step


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", manifest()) as run:
        yield run


# Opening, locking, crashing


def test_create_refuses_what_holds_something(tmp_path):
    with RunDir.create(tmp_path / "a" / "run", manifest()) as run:
        assert load_toml(run.path / "config.toml") == CONFIG == run.config
    with pytest.raises(RunError, match="already holds a run; go on with --resume"):
        RunDir.create(tmp_path / "a" / "run", manifest())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(RunError, match="other files"):
        RunDir.create(tmp_path / "full", manifest())
    with pytest.raises(RunError, match="no run here"):
        RunDir.open(tmp_path / "full")
    with pytest.raises(RunError, match=r"cannot write .*thesis.txt.*; choose a folder you can write to"):
        RunDir.create(tmp_path / "full" / "thesis.txt" / "run", manifest())
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a" / "run"]
    assert new_run_path(tmp_path).parent == tmp_path


def test_a_changed_manifest_is_noticed(tmp_path):
    RunDir.create(tmp_path / "run", manifest()).close()
    file = tmp_path / "run" / "manifest.json"
    file.write_text(file.read_text().replace('"capability": "', '"capability": "x'))
    with pytest.raises(RunError, match="changed since it was written"):
        RunDir.read(tmp_path / "run")


def test_manifests_compare():
    first = manifest()
    second = json.loads(json.dumps(manifest()))
    second["instance"]["host"] = "elsewhere"
    assert compare_manifests(first, second) == []
    second["machine"]["threads"] = 99
    del second["versions"]["torch"]
    second["config"]["data"]["seed"] = 4
    assert [name for name, _, _ in compare_manifests(first, second)] == [
        "config.data.seed",
        "versions.torch",
        "machine.threads",
    ]


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    path = tmp_path / "run"
    script = """
        run = RunDir.create(sys.argv[1], manifest())
        worker = os.fork()  # a worker that outlives us must not keep the lock
        if worker:
            print(worker, flush=True)
        signal.pause()
        """
    with child(script, path) as holder:
        worker = int(holder.stdout.readline())
        with pytest.raises(RunError, match=rf"run is in use by process {holder.pid};"):
            RunDir.open(path)
        assert RunDir.read(path).config == CONFIG
        holder.kill()
        holder.wait()
        with RunDir.open(path), pytest.raises(RunError, match="in use by this process"):
            RunDir.open(path)
        RunDir.open(path).close()
        os.kill(worker, signal.SIGKILL)


CRASHES = """
import pandas, safetensors.torch, tinyllm.record.rollouts  # once, before the forks
MANIFEST = manifest(GRPOConfig(run=RunConfig(keep_checkpoints=1)))

def crash_at(call):
    "The process kills itself just before its call-th change of the disk."
    count = 0
    def counted(real):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return wrapper
    for name in ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return lambda: count

def work(path, pipe):
    with RunDir.create(path, MANIFEST) as run:
        for step in (1, 2):
            run.record(Step(step, make_groups(step)))
            run.log({"step": step})
            run.save_checkpoint(step, make_tensors(step), {"step": step}, wait=True)
            os.pwrite(pipe, bytes([step]), 0)  # promised: from here on a crash keeps it

def verify(path, promised):
    try:
        run = RunDir.open(path)
    except RunError:
        assert not (path / "manifest.json").exists()
        RunDir.create(path, manifest()).close()
        return
    with run:
        steps, logged = run.steps(), [row["step"] for row in run.metrics()]
        assert steps == [1, 2][:len(steps)] and logged == steps[:len(logged)] and len(steps) - len(logged) <= 1
        assert all(run.read_groups(step) == make_groups(step) for step in steps)
        assert not promised or run.checkpoints.steps()[-1] >= promised, (run.checkpoints.steps(), promised)
        if run.checkpoints.steps():
            step, tensors, state = run.load_checkpoint()
            assert state == {"step": step}
            assert_tensors_equal(tensors, make_tensors(step))
        left = [p for p in path.rglob(".*")]
        assert not left, left

from pathlib import Path
call, points = 0, 0
while True:
    call += 1
    path = Path(sys.argv[1]) / str(call)
    fd = os.open(str(path) + ".promised", os.O_RDWR | os.O_CREAT)
    pid = os.fork()
    if pid == 0:
        crash_at(call)
        work(path, fd)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    promised = os.pread(fd, 1, 0)
    os.close(fd)
    if path.exists():
        verify(path, promised[0] if promised else 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    points += 1
print(points)
"""


@pytest.mark.slow
def test_killed_before_every_single_change_of_the_disk(tmp_path):
    """SIGKILL before each write, fsync, rename and removal of two steps with their checkpoints: what was promised
    is there, what is there is whole, and the directory opens again."""
    out = output(child(CRASHES, tmp_path))
    assert int(out) > 60


@pytest.mark.slow
def test_disk_full_is_one_line_and_leaves_all_consistent(tmp_path):
    """A file-size limit stands for the full disk: the same calls fail, in the same places."""
    script = """
        import resource
        run = RunDir.create(sys.argv[1], manifest())
        run.record(Step(1, make_groups()))
        run.log({"step": 1})
        run.save_checkpoint(1, make_tensors(1), {}, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        for attempt in (
            lambda: run.save_checkpoint(2, make_tensors(2), {}, wait=True),
            lambda: run.record(Step(2, make_groups(prompts=99))),
            lambda: run.log({"step": 2, "long": "x" * 4000}),
        ):
            try:
                attempt()
            except RunError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        run.log({"step": 2})
        run.save_checkpoint(2, make_tensors(2), {})
        run.close()
        """
    out = output(child(script, tmp_path / "run"))
    lines = out.splitlines()
    assert len(lines) == 3
    for line, name in zip(lines, ("checkpoints/000002", "000002.parquet", "metrics.jsonl"), strict=True):
        assert name in line and "File too large; what was recorded is safe; free some room" in line
    with RunDir.open(tmp_path / "run") as run:
        assert [row["step"] for row in run.metrics()] == [1, 2]
        assert run.steps() == [1]
        assert run.checkpoints.steps() == [1, 2]
        assert_tensors_equal(run.load_checkpoint()[1], make_tensors(2))
        assert not list(run.path.rglob(".*"))


def test_memory_stays_flat(run):
    """Nothing is kept in memory per step: 300 steps, open files and threads constant, memory within 5 MB."""
    import psutil

    process = psutil.Process()
    groups = make_groups()
    sizes = []
    for step in range(300):
        run.record(Step(step, groups))
        run.log({"step": step, "x": "y" * 500})
        if step % 50 == 0:
            run.save_checkpoint(step, make_tensors(step), {}, wait=True)
        if step in (100, 299):
            sizes.append((process.memory_info().rss, process.num_fds(), threading.active_count()))
    assert sizes[1][0] - sizes[0][0] < 5e6
    assert sizes[1][1:] == sizes[0][1:]
