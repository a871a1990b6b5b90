"""Whether report.html stays usable at 100,000 rollouts of 32 tokens: size, seconds to write, open and filter.

Makes up a run of that size (numbers as incompressible as real ones: every log-probability is another float, and a
share of the trainer's differ from the sampler's), writes its report, and opens it in a headless Chromium from disk.

    python benchmarks/report.py --out results.json

Needs playwright and Debian's chromium. Opening: from the navigation's start until the page answers, until the list of
rollouts is there, and until every token is.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import command, finish, parser, start, table

from tinyllm.config.io import to_dict
from tinyllm.config.sections import GRPOConfig, TrainConfig
from tinyllm.errors import ConfigError
from tinyllm.record.manifest import build_manifest
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Step, Verdict
from tinyllm.view.html import write_html

BROWSER = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
GROUP = 8
WORDS = "the sum of these two numbers is therefore equal to so we add first then carry one and get answer".split()
SIZE_TARGET_MB, OPEN_TARGET_S = 60, 3.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rollouts", type=int, default=100_000, metavar="N", help="default: %(default)s")
    options.add_argument("--tokens", type=int, default=32, metavar="N", help="per rollout; default: %(default)s")
    options.add_argument("--steps", type=int, default=200, metavar="N", help="default: %(default)s")
    options.add_argument("--gap", type=float, default=0.5, help="share of tokens where the trainer differs")
    arguments = options.parse_args()
    if arguments.rollouts < arguments.steps * GROUP:
        raise ConfigError(f"--rollouts {arguments.rollouts}: at least one group of {GROUP} per step")
    result = start(arguments)
    with tempfile.TemporaryDirectory() as folder:
        made_up_run(Path(folder) / "run", arguments.rollouts, arguments.tokens, arguments.steps, arguments.gap)
        run = RunDir.read(Path(folder) / "run")
        begin = time.perf_counter()
        page = write_html(Path(folder) / "report.html", [run])
        figures = {"write_s": time.perf_counter() - begin, "size_mb": page.stat().st_size / 1e6}
        figures |= measure_page(page)
    result["figures"] = figures
    rows = list(figures.items())
    table("One report", ("figure", "value"), rows)
    print(f"targets: {SIZE_TARGET_MB} MB, {OPEN_TARGET_S:g} s to open")
    finish(arguments, result)


def made_up_run(path: Path, rollouts: int, tokens: int, steps: int, gap: float) -> None:
    """A run directory with so many rollouts, recorded and derived as training would."""
    random = np.random.default_rng(0)
    prompts = max(1, rollouts // steps // GROUP)
    config = GRPOConfig(train=TrainConfig(steps=steps, prompts_per_step=prompts))
    with RunDir.create(path, build_manifest(to_dict(config), hashes={}, probe={})) as run:
        for step in range(1, steps + 1):
            groups = [made_up_group(random, step, number, tokens) for number in range(prompts)]
            run.record(Step(step, groups))
            drawn = [rollout for group in groups for rollout in group.rollouts]
            logprobs = {row: shifted(random, rollout.completion.logprobs, gap) for row, rollout in enumerate(drawn)}
            names = [(group.id, rollout.completion.sample) for group in groups for rollout in group.rollouts]
            run.write_derived(step, names, random.normal(size=len(drawn)).tolist(), logprobs)
            rewards = [rollout.reward for rollout in drawn]
            line = {"step": step, "reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
            run.log(line | {"entropy": 1 / step, "completion_length": float(tokens), "zero_advantage": 0.1})


def made_up_group(random: np.random.Generator, step: int, number: int, tokens: int) -> Group:
    a, b = random.integers(0, 1000, 2).tolist()
    prompt = Prompt(f"{a}+{b}@{number}", (1, 2, 3), f"What is {a} + {b}?", {"answer": str(a + b)})
    made = []
    for sample in range(GROUP):
        ids = np.minimum(random.zipf(1.2, tokens), 49_151)
        logprobs = (-random.exponential(0.7, tokens)).astype(np.float32).tolist()
        words = " ".join(WORDS[i] for i in random.integers(0, len(WORDS), tokens))
        key = int(random.integers(0, 2**63))
        revision = Revision(step - 1, f"{step:032x}")
        numbers = tuple(ids.tolist()), tuple(logprobs)
        completion = Completion(prompt.id, 0, sample, *numbers, "stop", key, revision, words)
        made.append(Rollout(completion, Verdict(float(random.integers(0, 2)), None, str(a + b + sample))))
    return Group(prompt, tuple(made))


def shifted(random: np.random.Generator, logprobs: Any, gap: float) -> list[float]:
    """Log-probabilities of a trainer that computes a share of the tokens a little differently."""
    values = np.array(logprobs, np.float32)
    differs = random.random(len(values)) < gap
    values[differs] += random.normal(0, 0.05, int(differs.sum())).astype(np.float32)
    return values.tolist()


def measure_page(page: Path) -> dict[str, Any]:
    """Open a report in Chromium and use it: seconds, and what is in the document."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=FLAGS)
        view = browser.new_page(viewport={"width": 1400, "height": 900})
        faults: list[str] = []
        view.on("pageerror", lambda error: faults.append(str(error)))
        found: dict[str, Any] = {}
        for name, mark in (("page", ""), ("rollouts", "#rollouts")):
            view.goto("about:blank")
            view.goto(page.as_uri() + mark)
            state = "page" if name == "page" else "tokens"
            view.locator(f"body[data-ready={state}]").wait_for(timeout=120_000)
            found[f"open_{name}_s"] = _mark(view, f"ready {name}")
        found["open_tokens_s"] = _mark(view, "ready tokens")
        filters = {
            "filter_text_s": "b.query.value = 'therefore equal'",
            "filter_reward_s": "b.query.value = ''; b.reward_low.value = '1'",
            "filter_clipped_s": "b.reward_low.value = ''; b.verdict.value = 'clipped'",
        }
        for name, action in filters.items():
            timed = "const t = performance.now(); b.filter(); return performance.now() - t;"
            found[name] = view.evaluate(f"() => {{ const b = page.browser; {action}; {timed} }}") / 1000
            found[name.replace("_s", "_count")] = view.evaluate("page.browser.rows.length")
        view.get_by_role("button", name="clear filters").click()
        found["rows_in_document"] = view.locator(".window .row").count()
        found["heap_mb"] = view.evaluate("performance.memory.usedJSHeapSize") / 1e6
        browser.close()
    assert not faults, faults
    return found


def _mark(view: Any, name: str) -> float:
    return view.evaluate("name => performance.getEntriesByName(name)[0].startTime", name) / 1000


if __name__ == "__main__":
    command(main)
