"""report.html: what it says equals the record, it opens from disk in a real browser, and nothing written by a model runs."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from browser import Page, chromium
from run_samples import RunDir, manifest

from tinyllm.cli import main
from tinyllm.config import CONFIGS, GRPOConfig, ModelConfig
from tinyllm.configio import to_dict
from tinyllm.errors import ConfigError
from tinyllm.htmlreport import Section, write_html
from tinyllm.htmlreport.columns import read_rollouts
from tinyllm.htmlreport.compare import paired
from tinyllm.htmlreport.curves import charts, clustered_interval, reward_intervals
from tinyllm.htmlreport.health import findings, unscored_reasons
from tinyllm.htmlreport.page import _plotly
from tinyllm.htmlreport.sections import table
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Verdict

ATTACK = "</script><img src=x onerror=document.title='owned'><!--<script>"
STEPS, PROMPTS, SIZE = 12, 4, 4


def sampler_logprob(step: int, group: int, sample: int, t: int) -> float:
    """Some fp32 number, another for each token."""
    return float(np.float32(-0.01 - 0.37 * t - 0.05 * sample - 0.003 * group - step / 77))


def trainer_logprob(step: int, group: int, sample: int, t: int) -> float:
    """The trainer's: equal to the sampler's but for the second token, whose ratio is 1.5 or 1 / 1.5."""
    shift = math.log(1.5) * (-1 if sample else 1) if t == 1 else 0.0
    return float(np.float32(sampler_logprob(step, group, sample, t) + shift))


def make_group(step: int, number: int, shift: float = 0.0) -> Group:
    prompt = Prompt(f"row-{number}", (5, 6), f"{number}+{number}= {ATTACK if number == 0 else ''}", {"answer": "2"})
    rollouts = []
    for sample in range(SIZE):
        ids = tuple([2 + sample, 3, 4, 5 + step % 3, 0][: 3 + sample % 3])
        text = ATTACK if (step, number, sample) == (1, 0, 0) else f"answer {sample} of step {step}"
        completion = Completion(
            prompt.id, 0, sample, ids, tuple(sampler_logprob(step, number, sample, t) for t in range(len(ids))),
            "length" if sample == 2 else "stop", 2**63 + sample, Revision(step - 1, "ab" * 16), text,
        )  # fmt: skip
        verdict = Verdict(None, "timed out") if (step, number, sample) == (3, 1, 1) else Verdict(
            min(1.0, shift + float(sample == 0 and number != 3)), None, str(sample), (("correct", 1.0), ("format", 0.5))
        )  # fmt: skip
        rollouts.append(Rollout(completion, verdict))
    return Group(prompt, tuple(rollouts))


def manifest_of(kind: str) -> dict:
    """The manifest of a run of this kind, with its own options."""
    return manifest() | {"kind": kind, "config": to_dict(CONFIGS[kind]())}


def make_run(
    path: Path, *, shift: float = 0.0, model: str = "nowhere", kind: str = "grpo", steps: int = STEPS
) -> RunDir:
    """A finished run of a few prompts, with all that training would write."""
    about = manifest(GRPOConfig(model=ModelConfig(name=model))) | {"kind": kind}
    with RunDir.create(path, about) as run:
        run.log({"step": 0, "kind": "eval", "correct": 23, "prompts": 162, "kl": 0.0, "reward_mean": 0.14})
        for step in range(1, steps + 1):
            groups = [make_group(step, number, shift) for number in range(PROMPTS)]
            run.record(step, groups)
            rows = [(g, r) for g in groups for r in g.rollouts]
            names = [(g.id, r.completion.sample) for g, r in rows]
            advantages = [0.0 if g.id == "row-3#0" else 1.5 if r.completion.sample == 0 else -0.5 for g, r in rows]
            logprobs = {
                i: [trainer_logprob(step, i // SIZE, r.completion.sample, t) for t in range(len(r.completion.token_ids))]
                for i, (g, r) in enumerate(rows) if advantages[i]
            }  # fmt: skip
            run.write_derived(step, names, advantages, logprobs)
            rewards = [r.verdict.value for _, r in rows if r.verdict.value is not None]
            run.log({
                "step": step, "loss": 0.1 / step, "reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards)),
                "reward_parts": {"correct": 1.0, "format": 0.5}, "accuracy": 0.25, "kl": None, "clip_fraction_high": 0.1,
                "clip_fraction_low": 0.05, "ratio_max": 1.5 if step != 7 else 42.0, "ratio_mean": 1.0, "entropy": 1.5,
                "completion_length": 4.0, "truncated": 0.25, "zero_advantage": 0.25 if step < 8 else 0.95,
                "unscored": int(step == 3), "unscored_reasons": {"timed out": 1} if step == 3 else {},
                "grad_norm": 0.5, "lr": 1e-5, "tokens": 45, "sampler_equal": 0.8, "sampler_gap": 0.05, "sampler_gap_max": 0.4,
                "non_finite": None, "surprise": step**2, "hashes": {"weights": "00"}, "revision": f"{step}:ab",
            })  # fmt: skip
            run.log_timing({"step": step, "step_s": 2.0, "sample_s": 1.2, "update_s": 0.7, "sampled_tokens": 60})
        run.log({"step": steps, "kind": "eval", "correct": 130, "prompts": 162, "kl": 0.2, "reward_mean": 0.8})
    return RunDir.read(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    """A run whose folder has the tokenizer of tiny.py."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    tiny.tokenizer().save_pretrained(run.path / "model")
    return run


@pytest.fixture(scope="module")
def page_file(run) -> Path:
    return write_html(run.path / "report.html", [run])


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


# In the browser


def test_it_opens_and_its_charts_are_drawn(browser, page_file, run):
    page = Page(browser, page_file)
    view = page.view
    tabs = view.get_by_role("tab").all_inner_texts()
    assert tabs == ["Overview", "Rollouts", "Health", "Record"]
    assert view.title() == "run · tinyllm report"
    assert "0.14 → 0.80" in view.locator(".tiles").inner_text()
    first = view.locator(".plot").first
    first.locator(".main-svg").first.wait_for()
    assert first.locator(".scatterlayer .trace").count() == 6, (
        "values and their mean, twice, and both edges of the band"
    )
    assert "from 0.1" in first.get_attribute("aria-label")
    titles = view.locator(".chart h3").all_inner_texts()
    assert {"Held-out accuracy", "Clip fraction", "Ratio", "Reward parts", "Seconds per step", "Surprise"} <= set(
        titles
    )
    summary = view.locator(".chart", has_text="Surprise").locator("summary")
    summary.click()
    view.locator(".chart", has_text="Surprise").locator("td").first.wait_for()  # filled when it is opened
    cells = view.locator(".chart", has_text="Surprise").locator("td").all_inner_texts()
    assert cells[:4] == ["1", "1", "2", "4"]
    page.close()


def test_filters_show_what_the_record_has(browser, page_file, run):
    page = Page(browser, page_file, "#rollouts")
    view = page.rollouts()
    columns = read_rollouts(run)
    total = STEPS * PROMPTS * SIZE
    assert page.count() == total == len(columns)
    expected = {
        "rewarded": int((columns.reward > 0).sum()),
        "not rewarded": int((columns.reward <= 0).sum()),
        "unscored": 1,
        "truncated": total // SIZE,
        "failed": 0,
        "no signal": total // PROMPTS,
        "with signal": total - total // PROMPTS,
    }
    for verdict, count in expected.items():
        view.get_by_label("verdict").select_option(verdict)
        assert page.count() == count, verdict
    view.get_by_label("verdict").select_option("clipped")
    assert page.count() == total - total // PROMPTS, "the second token of every trained completion is beyond its bound"
    view.get_by_role("button", name="clear filters").click()
    for label, value, count in (
        ("first step", "11", 2 * PROMPTS * SIZE),
        ("least reward", "0.5", int((columns.reward[columns.step >= 11] >= 0.5).sum())),
        ("greatest length", "2", 0),
    ):
        view.get_by_label(label).fill(value)
        assert page.count() == count, label
    view.get_by_role("button", name="clear filters").click()
    view.get_by_label("group", exact=True).fill("row-2#0")
    assert page.count() == total // PROMPTS
    view.get_by_role("button", name="clear filters").click()
    view.get_by_label("text in prompt, completion or answer").fill("OF STEP 12")
    assert page.count() == PROMPTS * SIZE
    view.get_by_role("button", name="reward", exact=True).click()
    rewards = view.locator(".window .row span:nth-child(4)").all_inner_texts()
    assert [float(reward) for reward in rewards] == sorted((float(reward) for reward in rewards), reverse=True)
    page.close()


def test_the_numbers_of_a_token_are_the_records(browser, page_file, run):
    """Every token of a trained and of an untrained completion: equal as floats, not nearly."""
    page = Page(browser, page_file, "#rollouts")
    view = page.rollouts()
    groups = run.read_groups(5)
    for number, sample in ((2, 0), (1, 3), (3, 1)):
        view.get_by_role("button", name="clear filters").click()
        view.get_by_label("first step").fill("5")
        view.get_by_label("last step").fill("5")
        view.get_by_label("group", exact=True).fill(f"row-{number}#0")
        view.locator(".window .row").nth(sample).click()
        completion = groups[number].rollouts[sample].completion
        facts = view.locator(".facts").inner_text()
        assert str(completion.seed_key) in facts and "4:abababababab" in facts
        assert view.locator(".detail code").inner_text() == f"tinyllm replay {run.path} --sample --steps 5:5"
        tokens = view.locator(".tokens.whole span")
        assert tokens.count() == len(completion.token_ids)
        assert tokens.all_inner_texts()[0] == tiny.tokenizer().decode([completion.token_ids[0]])
        for t, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            view.keyboard.press("ArrowRight")
            shown = {
                name: view.locator(f'.readout [data-value="{name}"]').inner_text()
                for name in ("id", "log-probability", "trainer's", "ratio", "clipped", "advantage")
            }
            assert int(shown["id"]) == token
            assert float(shown["log-probability"]) == logprob
            if number == 3:
                assert shown["trainer's"] == "not trained" and shown["advantage"] == "0"
                continue
            trainer = trainer_logprob(5, number, sample, t)
            assert float(shown["trainer's"]) == trainer
            assert float(shown["ratio"]) == pytest.approx(math.exp(trainer - logprob), rel=1e-15)
            assert float(shown["advantage"]) == (-0.5 if sample else 1.5)
            bound = {0: "high"}.get(sample, "low") if t == 1 else "no"
            assert shown["clipped"] == bound
    page.close()


def test_the_group_stands_side_by_side(browser, page_file, run):
    page = Page(browser, page_file, "#rollouts")
    view = page.rollouts()
    members = view.locator(".member")
    assert members.count() == SIZE
    assert members.nth(0).locator("p").inner_text() == "#0 reward 1 advantage 1.5 3 tokens"
    members.nth(2).click()
    assert view.locator(".detail h2").inner_text() == "Step 1, group row-0#0, sample 2"
    assert "length, 5 tokens" in view.locator(".facts").inner_text()
    for coloring in ("ratio", "clipped", "advantage"):
        view.get_by_label("colour tokens by").select_option(coloring)
        painted = view.locator(".tokens.whole span").evaluate_all("nodes => nodes.map(n => n.style.background !== '')")
        assert painted == ([False, True, False, False, False] if coloring != "advantage" else [True] * 5)
    page.close()


def test_keys(browser, page_file):
    page = Page(browser, page_file, "#rollouts")
    view = page.rollouts()
    for key, where in (
        ("j", (1, 0, 1)),
        ("ArrowDown", (1, 0, 2)),
        ("k", (1, 0, 1)),
        ("End", (12, 3, 3)),
        ("Home", (1, 0, 0)),
    ):
        view.keyboard.press(key)
        step, group, sample = where
        assert view.locator(".detail h2").inner_text() == f"Step {step}, group row-{group}#0, sample {sample}", key
        assert view.locator('[role=option][aria-selected="true"]').count() == 1
    view.keyboard.press("/")
    view.keyboard.type("step 2")
    assert page.count() == PROMPTS * SIZE
    view.keyboard.press("Escape")
    view.keyboard.press("j")
    view.keyboard.press("g")
    assert page.count() == SIZE
    view.keyboard.press("?")
    assert view.locator("dialog[open]").count() == 1
    view.keyboard.press("Escape")
    before = view.evaluate("document.documentElement.dataset.theme")
    view.keyboard.press("t")
    assert view.evaluate("document.documentElement.dataset.theme") != before
    view.keyboard.press("3")
    assert view.get_by_role("tab", selected=True).inner_text() == "Health"
    page.close()


def test_dark_where_the_system_is(browser, page_file):
    page = Page(browser, page_file, "#record", color_scheme="dark")
    assert page.view.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    page.close()


def test_a_warning_leads_to_its_rollouts(browser, page_file):
    page = Page(browser, page_file, "#health")
    note = page.view.locator("section:not([hidden]) .notes li", has_text="could not be scored")
    note.get_by_role("button").click()
    page.view.locator("body[data-ready=tokens]").wait_for()
    assert page.count() == 1
    assert "timed out" in page.view.locator(".facts").inner_text()
    page.close()


def test_what_a_model_wrote_is_text(browser, page_file, tmp_path, run):
    text = page_file.read_text()
    assert "onerror" not in text, "texts of the record are in compressed blocks only"
    titled = write_html(
        tmp_path / "attack.html", [run], title=ATTACK, extra=[Section(ATTACK, [table([ATTACK], [[ATTACK]])])]
    )
    page = Page(browser, titled)
    assert page.view.locator("h1").inner_text() == ATTACK
    assert page.view.locator("main td").first.inner_text() == ATTACK
    view = page.rollouts()
    view.get_by_label("text in prompt, completion or answer").fill("onerror")
    assert page.count() == STEPS * SIZE
    assert view.locator(".prompt").inner_text().endswith(ATTACK)
    assert view.locator(".window .row span:nth-child(8)").first.inner_text() == ATTACK
    assert view.locator("img").count() == 0
    page.close()


def test_two_runs_and_a_run_without_tokenizer(browser, run, tmp_path):
    other = make_run(tmp_path / "other", shift=0.5, steps=8)
    page = Page(browser, write_html(tmp_path / "two.html", [run, other]), "#comparison")
    assert page.view.get_by_role("tab").all_inner_texts()[:2] == ["Overview", "Comparison"]
    words = page.view.locator("section:not([hidden])").inner_text()
    assert "row 1 (group row-0#0, sample 1)" in words and "verify" in words, "the first divergence"
    assert "run has 12 steps, other has 8." in words
    assert "Paired are 4 prompts that both runs sampled in the same step (32 times in 8 steps, 1 to 8)" in words
    view = page.rollouts()
    view.get_by_label("run", exact=True).select_option("other")
    view.locator(".tokens.whole span", has_text="[2]").wait_for()
    assert page.count() == 8 * PROMPTS * SIZE
    view.get_by_role("tab", name="Health").click()
    view.locator("section:not([hidden]) .notes li", has_text="could not be scored").first.get_by_role("button").click()
    view.locator(".facts", has_text="timed out").wait_for()
    assert view.get_by_label("run", exact=True).input_value() == "0", "the finding is the first run's"
    page.close()


def test_a_long_completion_is_shown_in_parts(browser, tmp_path):
    with RunDir.create(tmp_path / "run", manifest()) as run:
        logprobs = tuple(float(np.float32(-t / 3000)) for t in range(3000))
        completion = Completion("a", 0, 0, (3,) * 3000, logprobs, "length", 1, Revision(0, "ab"), "1" * 3000)
        run.record(1, [Group(Prompt("a", (5,), "?"), (Rollout(completion, Verdict(1.0)),))])
        run.log({"step": 1, "reward_mean": 1.0})
    page = Page(browser, write_html(tmp_path / "page.html", [RunDir.read(tmp_path / "run")]), "#rollouts")
    view = page.rollouts()
    tokens = view.locator(".tokens.whole span")
    assert tokens.count() == 2000 and view.locator(".member span").count() == 200
    view.get_by_role("button", name="show all").click()
    assert tokens.count() == 3000
    tokens.nth(2999).hover()
    assert float(view.locator('.readout [data-value="log-probability"]').inner_text()) == logprobs[-1]
    assert view.locator(".facts").inner_text().count("not kept") == 1, "no derived/ here"
    page.close()


@pytest.mark.parametrize("width", [1400, 420])
def test_only_visible_rows_are_in_the_document(browser, page_file, width):
    page = Page(browser, page_file, "#rollouts")
    view = page.rollouts()
    view.set_viewport_size({"width": width, "height": 900})
    assert 10 < view.locator(".window .row").count() < 60
    assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    page.close()


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
    found = findings(run, read_rollouts(run))
    text = "\n".join(f"{f['level']}: {f['text']}" for f in found)
    assert "bad: 95% of the groups from step 9 on had nothing to learn from (zero advantage)" in text
    assert "warn: A token became 42 times as likely within step 7" in text
    assert "warn: 25% of the completions from step 9 on were cut at" in text
    assert "warn: Sampler and trainer differ by 0.05 nats per token" in text
    assert "1 completions (0.52%) could not be scored" in text and "'timed out'" in text
    assert "ok: The held-out score rose from 0.14 to 0.80" in text
    assert unscored_reasons(run.metrics("train")) == [["timed out", 1, 3, 3]]


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
    titles = {chart["title"] for chart in charts([run], [read_rollouts(run)])}
    assert {"Loss", "Gradient norm"} <= titles and ("Preference margin" in titles) == (kind == "dpo")
    assert write_html(tmp_path / "report.html", [run]).stat().st_size > 1_000_000


@pytest.mark.parametrize(("kind", "said"), [("grpo", True), ("sft", False)])
def test_only_what_is_sampled_can_be_too_sure(tmp_path, kind, said):
    with RunDir.create(tmp_path / kind, manifest_of(kind)) as run:
        for step in range(1, 9):
            run.log({"step": step, "entropy": 2.0 / 10**step, **({"reward_mean": 0.5} if kind == "grpo" else {})})
    found = findings(RunDir.read(tmp_path / kind), None)
    assert any("Entropy fell" in finding["text"] for finding in found) is said


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
    (said,) = [f for f in findings(run, None) if "dropped" in f["text"]]
    assert said["level"] == "bad" and said["text"].startswith(
        "14.3% of the completions were dropped; most often because: timed out"
    )
    assert "dropped groups were longer than those trained on (40 against 4 tokens)" in said["text"]
    page = write_html(tmp_path / "report.html", [run]).read_text()
    assert "what was asked of the pool, and what became of it" in page and "leans towards short completions" in page


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
    monkeypatch.setattr("tinyllm.report.write_report", lambda run: run.path / "report.png")
    assert main(["report", str(run.path), "-o", str(tmp_path / "deep" / "page.html")]) == 0
    assert capsys.readouterr().out.split() == [str(run.path / "report.png"), str(tmp_path / "deep" / "page.html")]
    assert (tmp_path / "deep" / "page.html").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "-o", "{tmp}"], "is a folder; name a file"),
        (["{run}", "-o", ""], "-o needs a file"),
        (["{run}", "{tmp}/nothing"], "no run here"),
        (["{run}", "{run}", "{run}"], "unrecognized arguments"),
        (["{run}", "-o", "{run}/manifest.json/page.html"], "manifest.json"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr("tinyllm.report.write_report", lambda run: run.path / "report.png")
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
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    _plotly.cache_clear()
    with pytest.raises(ConfigError, match="pip install plotly"):
        write_html(tmp_path / "page.html", [run])


def test_the_data_holds_no_nan(run, tmp_path):
    """JSON has none; a browser would refuse all of it."""
    with RunDir.create(tmp_path / "odd", manifest()) as odd:
        odd.log({"step": 1, "reward_mean": 0.5})
    text = write_html(tmp_path / "page.html", [RunDir.read(tmp_path / "odd")]).read_text()
    import base64
    import zlib

    number = re.search(r'data-block="(\d+)"', text)[1]
    block = re.search(rf'id="block-{number}">([^<]*)<', text)[1]
    json.loads(zlib.decompress(base64.b64decode(block)), parse_constant=lambda name: pytest.fail(name))
