"""report.png and the intervals it shows."""

import pytest
from PIL import Image
from run_samples import manifest
from scipy.stats import binomtest

from tinyllm.record.rundir import RunDir
from tinyllm.stats import wilson
from tinyllm.view.plot import write_report


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 1), (1, 1), (0, 162), (23, 162), (138, 162), (162, 162), (5000, 9999)]
)
def test_wilson_is_scipys(successes, n):
    expected = binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx(tuple(expected), abs=1e-12)


def test_wilson_by_hand():
    """n = 100, 50 right, z = 1.959964: middle 0.5, half-width z sqrt(0.25/100 + z^2/40000) / (1 + z^2/100)."""
    low, high = wilson(50, 100)
    assert (low, high) == pytest.approx((0.403832, 0.596168), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


def log_steps(run: RunDir, steps: int) -> None:
    run.log({"step": 0, "kind": "eval", "correct": 23, "prompts": 162, "kl": 0.0})
    for step in range(1, steps + 1):
        share = step / steps
        run.log(
            {
                "step": step,
                "reward_mean": share,
                "accuracy": share,
                "kl": None if step == 3 else 0.1 * share,
                "clip_fraction_low": 0.0,
                "clip_fraction_high": 0.01 * share,
                "completion_length": 10.0,
                "truncated": 0.1,
                "entropy": 1 - share,
            }
        )
    run.log({"step": steps, "kind": "eval", "correct": 130, "prompts": 162, "kl": 0.2})


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_report_of_a_run_at_any_point(tmp_path, steps):
    with RunDir.create(tmp_path / "run", manifest()) as run:
        if steps:
            log_steps(run, steps)
        path = write_report(run)
    assert path == tmp_path / "run" / "report.png"
    image = Image.open(path)
    assert image.size[0] > 1500 and image.size[1] > 800
    colors = image.convert("RGB").getcolors(1 << 24)
    assert (steps == 0) or any(color == (37, 99, 168) for _, color in colors), "the curves are drawn"
    first = path.read_bytes()
    assert write_report(RunDir.read(tmp_path / "run")).read_bytes() == first, "the same metrics give the same picture"


def test_report_of_a_reward_without_a_notion_of_correct(tmp_path):
    with RunDir.create(tmp_path / "run", manifest()) as run:
        for step in (0, 1):
            run.log({"step": step, "kind": "eval", "correct": None, "prompts": 9, "reward_mean": -2.0 + step})
        run.log({"step": 1, "reward_mean": -1.5, "accuracy": None})
        assert write_report(run).stat().st_size > 10_000
