"""report.html in a real browser: it opens from disk, says what the record says, and nothing written by a model runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reports
import tiny
from browser import Page
from reports import ATTACK, PROMPTS, SIZE, STEPS, make_run, trainer_logprob
from run_samples import RunDir, manifest

from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Step, Verdict
from tinyllm.view.html import Section, write_html
from tinyllm.view.html.columns import read_rollouts
from tinyllm.view.html.sections import table

run, page_file, browser = reports.run, reports.page_file, reports.browser


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
        run.record(Step(1, [Group(Prompt("a", (5,), "?"), (Rollout(completion, Verdict(1.0)),))]))
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
