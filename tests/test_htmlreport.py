"""report.html: what it says equals the record, it opens from disk in a real browser, and nothing written by a model runs."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
import zlib

import numpy as np
import pytest
import reports
from browser import Page
from reports import PROMPTS, SIZE, make_run, manifest_of
from run_samples import RunDir, manifest

from tinyllm.commands.cli import main
from tinyllm.errors import MissingExtra
from tinyllm.health.checks import check
from tinyllm.health.history import History
from tinyllm.health.rewards import unscored_reasons
from tinyllm.view.curves import charts, clustered_interval, reward_intervals
from tinyllm.view.html import Section, write_html
from tinyllm.view.html.columns import read_rollouts
from tinyllm.view.html.compare import paired
from tinyllm.view.html.page import _plotly
from tinyllm.view.html.sections import table

run, page_file, browser = reports.run, reports.page_file, reports.browser


def blocks(page):
    """What a page embeds, by number, as text: JSON, and columns of numbers."""
    found = re.findall(r'id="block-(\d+)">([^<]*)<', page)
    return {number: zlib.decompress(base64.b64decode(block)).decode(errors="replace") for number, block in found}


# What is written


def test_columns_are_the_record(run):
    columns = read_rollouts(run)
    rows = [(step, g, r) for step in run.steps() for g in run.read_groups(step) for r in g.rollouts]
    assert columns.step.tolist() == [step for step, _, _ in rows]
    assert columns.logprobs.tolist() == [x for _, _, r in rows for x in r.completion.logprobs]
    assert columns.token_ids.tolist() == [x for _, _, r in rows for x in r.completion.token_ids]
    assert columns.seed_key.tolist() == [r.completion.seed_key for _, _, r in rows]
    assert [None if x != x else x for x in columns.reward.tolist()] == [r.verdict.value for _, _, r in rows]
    assert columns.texts["completion"] == [r.completion.text for _, _, r in rows]
    assert columns.texts["prompt"] == [g.prompt.text for step in run.steps() for g in run.read_groups(step)]
    assert not columns.lag.any() and columns.omitted_steps == 0


def test_a_run_too_large_is_shown_by_whole_steps(run):
    columns = read_rollouts(run, max_tokens=250)  # of 12 steps of 60 tokens
    assert columns.omitted_steps == 8
    assert sorted(set(columns.step.tolist())) == [3, 6, 9, 12]
    assert len(columns) == 4 * PROMPTS * SIZE


def test_the_interval_of_the_reward_is_that_of_its_groups(run):
    """Rewards of groups: (1, 0, 0, 0) three times, and zeros once. By hand: mean 3/16; clustered error of 4 means."""
    low, high = reward_intervals(read_rollouts(run))[1]
    means = np.array([0.25, 0.25, 0.25, 0.0])
    error = means.std(ddof=1) / 2
    assert low < means.mean() < high and high - low > 2 * error
    values = np.array([3.0, 5.0, -1.0, 1.0])
    low, high = clustered_interval(values, [0, 0, 1, 1])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert (high - low) / 2 == pytest.approx(12.706204736 * np.std([4.0, 0.0], ddof=1) / math.sqrt(2))


def test_rewards_are_paired_by_prompt(run, tmp_path):
    other = make_run(tmp_path / "other", shift=0.5, steps=8)
    words = paired([read_rollouts(run), read_rollouts(other)], ["run", "other"])[0]["text"]
    gain = np.mean([3 * 0.5 / 4] * 3 + [0.5])  # the one right sample of a group stays at 1; row-3 has none
    found = float(re.search(r"other minus run: ([+-][\d.]+)", words)[1])
    assert found == pytest.approx(gain, abs=0.002)
    assert "better on 4 prompts, worse on 0" in words


def test_findings_are_plain_words_with_numbers(run):
    found = check(History.of(run))
    text = "\n".join(f"{f.level}: {f.text}" for f in found)
    assert "problem: 95% of the groups from step 9 on had nothing to learn from (zero advantage)" in text
    assert "warn: A token became 42 times as likely within step 7" in text
    assert "warn: 25% of the completions from step 9 on were cut at" in text
    assert "warn: Sampler and trainer differ by 0.05 nats per token" in text
    assert "1 completions (0.52%) could not be scored" in text and "'timed out'" in text
    assert "notice: The held-out score rose from 0.14 to 0.80" in text
    assert unscored_reasons(run.metrics("train")) == [("timed out", 1, 3, 3)]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_runs_of_other_kinds(tmp_path, kind):
    """No rewards, no rollouts, keys that are missing or None; whatever is a number is drawn."""
    with RunDir.create(tmp_path / kind, manifest_of(kind)) as run:
        run.log({"step": 0, "kind": "eval", "loss": 2.0, "loss_low": 1.9, "loss_high": 2.1})
        for step in range(1, 4):
            extra = {"margin": 0.1 * step, "preference_accuracy": 0.6, "chosen_reward": None} if kind == "dpo" else {}
            run.log(
                {"step": step, "loss": 2.0 / step, "entropy": None, "grad_norm": float(step), "tokens": 99, **extra}
            )
        run.log({"step": 3, "kind": "eval", "loss": 1.0, "loss_low": None, "loss_high": None})
    run = RunDir.read(tmp_path / kind)
    titles = {chart.title for chart in charts([run], [read_rollouts(run)])}
    assert {"Loss", "Gradient norm"} <= titles and ("Preference margin" in titles) == (kind == "dpo")
    assert write_html(tmp_path / "report.html", [run]).stat().st_size > 1_000_000


@pytest.mark.parametrize(("kind", "said"), [("grpo", True), ("sft", False)])
def test_only_what_is_sampled_can_be_too_sure(tmp_path, kind, said):
    with RunDir.create(tmp_path / kind, manifest_of(kind)) as run:
        for step in range(1, 9):
            run.log({"step": step, "entropy": 2.0 / 10**step, **({"reward_mean": 0.5} if kind == "grpo" else {})})
    found = check(History.of(RunDir.read(tmp_path / kind)))
    assert any("Entropy fell" in finding.text for finding in found) is said


def test_a_pool_that_drops_long_work_is_said_to(tmp_path):
    """The ledger's counts as a table by quarters, and what they mean in words."""
    make_run(tmp_path / "run", steps=2)
    with RunDir.open(tmp_path / "run") as run:
        dull = {"requested": 4, "failed": 0, "dropped": 0, "reasons": {}, "sampling_s": 1.0, "verifying_s": 0.5}
        lines = [
            dull | {"step": 1, "group": f"{i}#0", "prompt": str(i), "tokens_mean": 4.0, "reward_mean": 0.5}
            for i in range(6)
        ]
        lost = {"dropped": 4, "reasons": {"timed out": 4}, "tokens_mean": 40.0, "reward_mean": None}
        run.log_ledger([*lines, dull | {"step": 2, "group": "9#0", "prompt": "9"} | lost])
    run = RunDir.read(tmp_path / "run")
    (said,) = [f for f in check(History.of(run)) if "dropped" in f.text]
    assert said.level == "problem" and said.text.startswith(
        "14.3% of the completions were dropped; most often because: timed out"
    )
    assert "dropped groups were longer than those trained on (40 against 4 tokens)" in said.text
    page = blocks(write_html(tmp_path / "report.html", [run]).read_text()).values()
    assert any("what was asked of the pool, and what became of it" in block for block in page)
    assert any("leans towards short completions" in block for block in page)


def test_stages_of_a_pipeline(browser, run, tmp_path):
    with RunDir.create(tmp_path / "sft", manifest_of("sft")) as sft:
        sft.log({"step": 1, "loss": 2.0})
    stages = [RunDir.read(tmp_path / "sft"), run]
    extra = [Section("Summary", [table(["stage", "accuracy"], [["sft", 0.25]])])]
    file = write_html(tmp_path / "stages.html", stages, "one pipeline", extra, mode="stages", names=["SFT", "GRPO"])
    page = Page(browser, file)
    assert page.view.get_by_role("tab").all_inner_texts() == ["Summary", "Stages", "SFT", "GRPO", "Rollouts", "Record"]
    assert page.view.locator("main td").all_inner_texts() == ["sft", "0.25"]
    page.view.get_by_role("tab", name="GRPO").click()
    assert page.view.locator("section:not([hidden]) .chart").count() > 10
    page.close()


def test_the_same_record_gives_the_same_page(run, tmp_path):
    one, other = (write_html(tmp_path / name, [run]).read_bytes() for name in ("a.html", "b.html"))
    assert one == other


# The command


def test_the_command_writes_and_says_where(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
    assert main(["report", str(run.path), "-o", str(tmp_path / "deep" / "page.html")]) == 0
    assert capsys.readouterr().out.split() == [str(run.path / "report.png"), str(tmp_path / "deep" / "page.html")]
    assert (tmp_path / "deep" / "page.html").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "-o", "{tmp}"], "is a folder; name a file"),
        (["{run}", "-o", ""], "must not be empty"),
        (["{run}", "{tmp}/nothing"], "no run here"),
        (["{run}", "{run}", "{run}"], "unexpected"),
        (["{run}", "-o", "{run}/manifest.json/page.html"], "manifest.json"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
    given = [word.format(run=run.path, tmp=tmp_path) for word in words]
    assert main(["report", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_damaged_file_is_named(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=2)
    run.rollout_path(2).write_bytes(b"PAR1 and nothing else")
    assert main(["report", str(run.path), str(run.path)]) == 2
    assert "000002.parquet: damaged" in capsys.readouterr().err


def test_without_plotly_one_line_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    _plotly.cache_clear()
    with pytest.raises(MissingExtra, match=r"needs plotly; pip install 'tinyllm\[report\]'"):
        write_html(tmp_path / "page.html", [run])


def test_the_data_holds_no_nan(run, tmp_path):
    """JSON has none; a browser would refuse all of it."""
    with RunDir.create(tmp_path / "odd", manifest()) as odd:
        odd.log({"step": 1, "reward_mean": 0.5})
    text = write_html(tmp_path / "page.html", [RunDir.read(tmp_path / "odd")]).read_text()
    number = re.search(r'data-block="(\d+)"', text)[1]
    json.loads(blocks(text)[number], parse_constant=lambda name: pytest.fail(name))
