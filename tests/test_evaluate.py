"""Evaluation: numbers by hand, tiny models, runs and checkpoints, a real server; bad input is one line."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny
from rich.console import Console

import tinyllm
from tinyllm import stats
from tinyllm.commands.arguments import EvalArguments
from tinyllm.commands.cli import main
from tinyllm.commands.eval import flat_options, suite_options
from tinyllm.config.words import parse_words
from tinyllm.engine.remote import chat as server
from tinyllm.errors import ConfigError, DataError, EngineError, ModelError, RewardError, RunError
from tinyllm.evals import measure, view
from tinyllm.evals.config import SuiteConfig
from tinyllm.post.run import train
from tinyllm.record.files import read_json
from tinyllm.record.rollouts import read_table
from tinyllm.record.rundir import RunDir

DRAW = view.draw
TINY = {"dtype": "float32", "device": "cpu", "max_new_tokens": 6, "data.prompt_rule": "raw"}


# Whole evaluations


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models and a suite of 24 sums; two of them stand twice, two are among the training rows."""
    folder = tmp_path_factory.mktemp("eval")
    tiny.save(tiny.llama(), folder / "a")
    tiny.save(tiny.llama(1), folder / "b")
    rows = [{"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3), "kind": i % 5} for i in range(24)]
    (folder / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[4], rows[5]]))
    train = [{"prompt": "3+0="}, {"prompt": " 7+1= "}, {"prompt": "99+1="}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    return folder


@pytest.fixture(autouse=True)
def no_plot(monkeypatch):
    """Drawing takes longer than sampling here."""
    monkeypatch.setattr(view, "draw", lambda report: b"a picture")


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def run(*models, **options):
    return tinyllm.evaluate(list(models), **{"data": "suite.jsonl", "reward": tiny.many_digits, **TINY, **options})


def test_two_models_on_a_suite(here, tmp_path):
    result = run("a", "b", samples=4, train="train.jsonl", out=tmp_path / "out", seed=3)
    report = read_json(tmp_path / "out" / "eval.json")
    assert report == json.loads(json.dumps(result.report))
    (task,) = report["suite"]["tasks"]
    assert (task["prompts"], task["overlapping"], task["repeated"]) == (22, 2, 2)
    assert [(m["kind"], m["prompt"], m["train_prompt"]) for m in report["overlap"]["found"]] == [
        ("exact", "3+0=", "3+0="),
        ("exact", "7+1=", " 7+1= "),
    ]
    assert report["answer"]["temperature"] == 1.0, "several samples are drawn"
    for number, line in enumerate(report["results"], 1):
        table = read_table(tmp_path / "out" / "rollouts" / f"{number}.parquet")
        assert not table.changed and len(table.groups) == 22
        assert {g.prompt.text for g in table.groups}.isdisjoint({"3+0=", "7+1="})
        again = measure.summarize([measure.answers_of(g, g.prompt.id) for g in table.groups], 4)
        assert json.loads(json.dumps({"task": "suite.jsonl", "model": "ab"[number - 1], **again})) == line
        assert set(table.logged.extras["task"]) == {"suite.jsonl"}
        assert line["measure"] == "reward" and 0 < line["score"]["value"] < 1
        assert table.groups[0].rollouts[0].completion.revision.hash == report["models"][number - 1]["weights"]
    (pair,) = report["comparisons"]
    assert (pair["a"], pair["b"], pair["prompts"], pair["test"]) == ("a", "b", 22, "sign-flip permutation")
    assert pair["difference"]["value"] == pytest.approx(
        report["results"][1]["score"]["value"] - report["results"][0]["score"]["value"]
    )
    assert result.plot.read_bytes() == b"a picture"


@pytest.mark.slow
def test_the_same_evaluation_gives_the_same_bytes(here, tmp_path):
    for name, batch in (("one", 128), ("two", 3)):
        run("a", "b", samples=2, out=tmp_path / name, max_batch=batch)
    for file in ("eval.json", "rollouts/1.parquet", "rollouts/2.parquet"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    other = run("a", samples=2, out=tmp_path / "three", seed=1).report
    first = read_json(tmp_path / "one" / "eval.json")
    assert other["suite"]["hash"] == first["suite"]["hash"], "the suite is the prompts and what judges them"
    assert other["results"][0]["score"] != first["results"][0]["score"]


def test_the_hash_of_a_suite_is_of_prompts_and_verifier(here, tmp_path):
    def hashed(**options):
        return run("a", **options, out=tmp_path / str(len(list(tmp_path.iterdir())))).report["suite"]["hash"]

    first = hashed(prompts=2)
    assert first == hashed(prompts=2, max_new_tokens=3)
    assert len({first, hashed(prompts=3), hashed(prompts=2, reward="arithmetic:rule=last_number")}) == 3


def test_one_sample_is_greedy(here, tmp_path):
    one = run("a", out=tmp_path / "1", seed=1).report
    two = run("a", out=tmp_path / "2", seed=2).report
    assert one["answer"]["temperature"] == 0.0 and one["results"] == two["results"]
    hot = run("a", out=tmp_path / "3", temperature=5.0).report
    assert hot["answer"]["temperature"] == 5.0 and hot["results"] != one["results"]


@pytest.mark.slow
def test_several_tasks_and_all_of_them(here, tmp_path):
    options = {**TINY, "prompts": 6}
    wide = "arithmetic:operands=1|30,held_out=162"
    report = tinyllm.evaluate(["a", "b"], task=f"{wide},gym:chain_sum", out=tmp_path / "o", **options).report
    assert [(line["task"], line["model"], line["prompts"]) for line in report["results"]] == [
        (wide, "a", 6),
        (wide, "b", 6),
        ("gym:chain_sum", "a", 6),
        ("gym:chain_sum", "b", 6),
        ("all tasks", "a", 12),
        ("all tasks", "b", 12),
    ]
    parts = [line["score"]["value"] for line in report["results"] if line["model"] == "b"]
    assert parts[2] == pytest.approx((parts[0] + parts[1]) / 2)
    *tasks, whole = report["comparisons"]
    assert [pair["task"] for pair in (*tasks, whole)] == [wide, "gym:chain_sum", "all tasks"]
    assert [pair["p_holm"] for pair in tasks] == stats.holm([pair["p"] for pair in tasks])
    assert whole["p_holm"] == whole["p"], "the whole is no further task"


def test_prompts_with_one_text_share_a_cluster(here, tmp_path):
    rows = [{"prompt": f"{i % 6}+1=", "answer": str(i)} for i in range(12)]
    (tmp_path / "twins.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run("a", data=tmp_path / "twins.jsonl", out=tmp_path / "o").report
    assert report["results"][0]["clusters"] == 6 and report["results"][0]["prompts"] == 12
    report = run("a", clusters="kind", out=tmp_path / "p").report
    assert report["results"][0]["clusters"] == 5 and report["suite"]["clusters"] == "kind"


# Runs


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run with a model, best weights and checkpoints."""
    tiny.write_rows(folder / "rows.jsonl")
    config = tiny.config(
        folder / "a",
        folder / "rows.jsonl",
        folder / "run",
        run={"checkpoint_every": 2, "keep_checkpoints": 5, "threads": 1},
        eval={"every": 1},
        train={"steps": 4, "prompts_per_step": 4},
        reward={"functions": ("light_rewards:many_digits",)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
        train(config)
    return folder / "run"


def test_a_run_is_evaluated_as_it_was_in_training(here, trained, tmp_path):
    result = tinyllm.evaluate([f"{trained}@2", trained], dtype="float32", device="cpu", out=tmp_path / "o")
    logged = {row["step"]: row["reward_mean"] for row in RunDir.read(trained).metrics("eval")}
    scores = [line["score"]["value"] for line in result.report["results"]]
    assert scores == pytest.approx([logged[2], logged[4]], abs=0), "to the last bit, from checkpoint and model"
    assert [line["prompts"] for line in result.report["results"]] == [3, 3]
    assert result.report["overlap"]["checked"] == [{"train": str(trained), "prompts": 9}]
    assert result.report["answer"]["max_new_tokens"] == 6
    weights = [model["weights"] for model in result.report["models"]]
    assert weights[0] != weights[1]


def test_options_are_laid_over_the_runs_own(here, trained, tmp_path):
    report = tinyllm.evaluate([trained, "a"], max_new_tokens=24, device="cpu", out=tmp_path / "o").report
    assert report["answer"]["max_new_tokens"] == 24, "the default of the command, but given"
    assert report["suite"]["data"]["file"].endswith("rows.jsonl")


def test_training_prompts_of_a_run_in_a_suite_are_left_out(here, trained, tmp_path):
    report = run(trained, "a", out=tmp_path / "o").report
    rows = {g.prompt.text for g in RunDir.read(trained).read_groups(1)}
    assert rows <= {match["prompt"] for match in report["overlap"]["found"]}
    assert len(report["overlap"]["found"]) == 9 and report["suite"]["tasks"][0]["prompts"] == 15


def test_training_prompts_that_are_gone_are_a_warning(here, trained, tmp_path, monkeypatch):
    (here / "rows.jsonl").rename(here / "away.jsonl")
    try:
        report = run(trained, out=tmp_path / "o").report
        assert "rows.jsonl" in report["warnings"][0] and report["overlap"]["checked"] == []
    finally:
        (here / "away.jsonl").rename(here / "rows.jsonl")


def test_a_checkpoint_of_adapters(here, tmp_path, no_picture):
    config = tiny.config(
        here / "a",
        here / "suite.jsonl",
        tmp_path / "lora",
        lora={"rank": 2},
        train={"steps": 2},
        run={"checkpoint_every": 1, "keep_checkpoints": 5, "threads": 1},
        eval={"every": 1},
    )
    train(config, reward=tiny.many_digits)
    report = tinyllm.evaluate(
        [f"{tmp_path}/lora@1", f"{tmp_path}/lora@2"], reward=tiny.many_digits, device="cpu", out=tmp_path / "o"
    ).report
    logged = {row["step"]: row["reward_mean"] for row in RunDir.read(tmp_path / "lora").metrics("eval")}
    assert [line["score"]["value"] for line in report["results"]] == pytest.approx([logged[1], logged[2]], abs=0)


# A server


class Answering(BaseHTTPRequestHandler):
    """Answers "The answer is N" with the sum in the prompt, as the test's script says."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body, self.headers.get("Authorization")))
            number = len(self.server.asked)
        status, choices = self.server.script(number, body)
        self.reply(status, {"choices": choices} if status == 200 else {"error": "script says no"})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Serving(ThreadingHTTPServer):
    request_queue_size = 64


def text_of(body):
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def summed(body, count=None, reason="stop"):
    left, right = text_of(body).rstrip("=").split("+")
    text = f"The answer is {int(left) + int(right)}"
    wrapped = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
    return [{**wrapped, "finish_reason": reason}] * (body["n"] if count is None else count)


@contextmanager
def serving(script=lambda number, body: (200, summed(body)), models=("m",)):
    httpd = Serving(("127.0.0.1", 0), Answering)
    httpd.script, httpd.models, httpd.asked, httpd.lock = script, models, [], threading.Lock()
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield httpd, f"http://127.0.0.1:{httpd.server_port}/v1"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def served(address, tmp_path, **options):
    given = {"data": "suite.jsonl", "reward": "arithmetic:rule=last_number", "out": tmp_path / "served", **options}
    return tinyllm.evaluate(address, **given).report


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(server, "PAUSE_S", 0.001)


def test_a_server_is_asked_in_chat_form(here, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with serving() as (httpd, url):
        report = served(url, tmp_path, samples=2, max_new_tokens=9, stop_strings=("\n\n",), seed=5)
    (line,) = report["results"]
    assert line["score"]["value"] == 1.0 and line["completions"] == 48 and line["measure"] == "accuracy"
    assert report["models"] == [{"name": url, "weights": None}]
    path, body, key = httpd.asked[0]
    assert path == "/v1/chat/completions" and key == "Bearer sesame"
    assert {name: body[name] for name in ("model", "n", "max_tokens", "temperature", "stop")} == {
        "model": "m",
        "n": 2,
        "max_tokens": 9,
        "temperature": 1.0,
        "stop": ["\n\n"],
    }
    assert len({body["seed"] for _, body, _ in httpd.asked}) == 24, "a seed for each prompt"
    written = (tmp_path / "served" / "eval.json").read_text()
    assert "sesame" not in written
    groups = read_table(tmp_path / "served" / "rollouts" / "1.parquet").groups
    assert groups[0].rollouts[0].completion.text == "The answer is 0" and groups[0].prompt.token_ids == ()


def test_raw_prompts_go_to_completions(here, tmp_path):
    with serving() as (httpd, url):
        report = served(f"{url}#m", tmp_path, prompts=3, **{"data.prompt_rule": "raw"})
    assert {path for path, *_ in httpd.asked} == {"/v1/completions"} and httpd.asked[0][1]["temperature"] == 0.0
    assert sorted(body["prompt"] for _, body, _ in httpd.asked) == ["0+0=", "1+1=", "2+2="]
    assert report["results"][0]["score"]["value"] == 1.0


def test_a_request_is_tried_again_while_that_may_help(here, tmp_path, no_pauses):
    with serving(lambda number, body: (503, []) if number < 3 else (200, summed(body))) as (httpd, url):
        report = served(url, tmp_path, prompts=1)
    assert len(httpd.asked) == 3 and report["results"][0]["failed"] == 0.0


def test_what_fails_is_a_failed_completion_and_never_wrong(here, tmp_path, no_pauses):
    """One prompt is refused, one always breaks, one is filtered; the 21 others are right."""

    def script(number, body):
        start = text_of(body).split("+")[0]
        if start == "3":
            return 400, []
        if start == "4":
            return 500, []
        return 200, summed(body, reason="content_filter" if start == "5" else "length" if start == "6" else "stop")

    with serving(script) as (httpd, url):
        report = served(url, tmp_path)
    (line,) = report["results"]
    assert (line["prompts"], line["failed"], line["truncated"]) == (21, 3 / 24, 1 / 24)
    assert line["score"]["value"] == 20 / 21 and line["if_failed"] == [20 / 24, 23 / 24]
    reasons = [g.rollouts[0].verdict.reason for g in read_table(tmp_path / "served/rollouts/1.parquet").groups[3:6]]
    assert reasons[0].startswith("HTTP 400: ") and "HTTP 500" in reasons[1]
    assert reasons[2] == "finish reason 'content_filter'"
    tries = [text_of(body).split("+")[0] for _, body, _ in httpd.asked]
    assert tries.count("3") == 1 and tries.count("4") == server.ATTEMPTS, "a refusal is final"
    assert "had all of them been wrong, accuracy would be 0.833, had all been right, 0.958" in report["warnings"][0]


def test_choices_that_are_missing_are_asked_for_again(here, tmp_path):
    with serving(lambda number, body: (200, summed(body, count=1))) as (httpd, url):
        report = served(url, tmp_path, prompts=2, samples=3)
    assert [body["n"] for _, body, _ in httpd.asked if text_of(body) == "0+0="] == [3, 2, 1]
    assert report["results"][0]["completions"] == 6


def test_an_evaluation_in_which_all_fail_is_an_error(here, tmp_path):
    with serving(lambda number, body: (404, [])) as (_, url), pytest.raises(EngineError, match="HTTP 404"):
        served(url, tmp_path)
    assert not (tmp_path / "served").exists()


def test_servers_that_cannot_be_used(here, tmp_path):
    with serving(models=("llama", "qwen")) as (_, url):
        with pytest.raises(ModelError, match="has 2 models \\(llama, qwen\\)"):
            served(url, tmp_path)
        with pytest.raises(ModelError, match="did you mean 'llama'"):
            served(f"{url}#lama", tmp_path)
    with pytest.raises(ModelError, match="no connection"):
        served(url, tmp_path)


# Output and input


def test_what_is_printed(here, tmp_path, capfd):
    line = ["eval", "a", "b", "--data", "suite.jsonl", "--verifier", "arithmetic:rule=last_number", "--samples", "4"]
    more = ["--prompt-rule", "raw", "--dtype=float32", "--max-new-tokens", "6", "--train", "train.jsonl"]
    assert main([*line, *more, "-o", str(tmp_path / "out")]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "22 prompts; 4 samples each, temperature 1, seed 0" in out
    assert (
        "overlap with training prompts: 2 exact and 0 near duplicates left out of the suite (3 of train.jsonl)" in out
    )
    assert "accuracy [95%]" in out and "pass@4 [95%]" in out and "points [" in out
    assert out.splitlines()[-1] == f"written  {tmp_path / 'out'}"


def test_long_names_fit_a_narrow_terminal(here, tmp_path):
    report = run("a", "b", out=tmp_path / "o").report
    name = "/somewhere/very/far/down/" * 5 + "runs/last@best"
    report["models"][1]["name"] = report["results"][1]["model"] = report["comparisons"][0]["b"] = name
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    with console.file:
        view.show(report, console)
    text = console.export_text()
    assert "last@best  0." in text and "failed" in text
    picture = bytes(DRAW(report))
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and picture == bytes(DRAW(report)) and len(picture) > 5_000
    assert view.shorten("abcdefghij", 7) == "ab…ghij" and view.shorten("abc", 3) == "abc"


def test_help_names_every_option(capfd):
    assert main(["eval", "--help"]) == 0
    out = capfd.readouterr().out
    for word in ("--plan", "RUN@20", "samples", "clusters", "max_new_tokens", "http://host:port/v1#model"):
        assert word in out


def test_words():
    def parse(*words):
        given, options = parse_words(words, EvalArguments, SuiteConfig)
        return given, suite_options(given, options)

    given, flat = parse("x", "--task", "a,b", "--task=c", "-o", "d", "y", "--samples", "3", "--plan")
    assert (given.models, given.plan) == (("x", "y"), True)
    assert flat == {"task": ("a", "b", "c"), "out": "d", "answer.samples": 3}
    spec = "arithmetic:rule=exact_format,tags=a"
    _, flat = parse("x", "--data", "x.jsonl", "--verifier", spec, "--verifier=format")
    assert flat["reward.functions"] == (spec, "format") and flat["data.file"] == "x.jsonl"
    assert flat_options({"verifier": spec}) == {"reward.functions": spec}
    assert flat_options({"data": "x.jsonl", "answer": {"samples": 2}, "task": "a"})["answer.samples"] == 2


MISTAKES = {
    "no model": ([], "no model to evaluate"),
    "no suite": (["a"], "no suite: name one with --task"),
    "unknown model": (["no/such/folder", "--task", "arithmetic"], "no/such/folder"),
    "unknown task": (["a", "--task", "arithmetik"], "did you mean 'arithmetic'"),
    "two suites": (["a", "--task", "arithmetic", "--data", "suite.jsonl"], "give one of them"),
    "missing file": (["a", "--data", "absent.jsonl"], "absent.jsonl"),
    "no verifier": (["a", "--data", "suite.jsonl"], "no verifier of their own"),
    "k 0": (["a", "--task", "arithmetic", "--samples", "0"], "answer.samples = 0"),
    "greedy samples": (["a", "--task", "arithmetic", "--samples", "4", "--temperature", "0"], "all would be equal"),
    "unknown option": (["a", "--task", "arithmetic", "--sampels", "4"], "did you mean 'answer.samples'"),
    "twice": (["a", "a", "--task", "arithmetic"], "given twice"),
    "a folder that holds something": (["a", "--task", "arithmetic", "-o", "b"], "holds other files"),
    "a folder that cannot be": (["a", "--task", "arithmetic", "-o", "suite.jsonl/x"], "cannot write"),
    "no such column": (["a", "--data", "suite.jsonl", "--verifier", "arithmetic", "--clusters", "kid"], "'kind'"),
    "no run": (["a@7", "--task", "arithmetic"], "no run here"),
    "no such checkpoint": (["run@3", "--task", "arithmetic"], "no checkpoint of step 3"),
    "no such part": (["run@bset", "--task", "arithmetic"], "RUN@best"),
    "a missing value": (["a", "--task"], "--task needs a value"),
    "plan without a suite": (["--plan"], "--plan needs a suite"),
    "all of it trained on": (
        ["a", "--data", "suite.jsonl", "--verifier", "arithmetic", "--train", "suite.jsonl"],
        "nothing is left to evaluate",
    ),
    "a prompt too long": (
        ["a", "--data", "suite.jsonl", "--verifier", "arithmetic", "--max-prompt-tokens", "2", "--prompt-rule", "raw"],
        "over data.max_prompt_tokens = 2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input_is_one_line(here, trained, name, capfd, tmp_path):
    words, part = MISTAKES[name]
    out = [] if "-o" in words or not words else ["-o", str(tmp_path / "o")]
    assert main(["eval", *words, *out]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and part in err, err
    assert not (tmp_path / "o").exists()


def test_a_run_without_its_model_names_the_checkpoints(here, trained, tmp_path):
    (trained / "model").rename(trained / "gone")
    try:
        with pytest.raises(RunError, match=r"no final model .*run@2, .*run@4"):
            tinyllm.evaluate(trained, out=tmp_path / "o")
    finally:
        (trained / "gone").rename(trained / "model")


def test_runs_with_different_suites_need_a_named_one(here, trained, tmp_path, no_picture):
    train(
        tiny.config(here / "a", here / "suite.jsonl", tmp_path / "other", train={"steps": 1}), reward=tiny.many_digits
    )
    with pytest.raises(ConfigError, match="different held-out prompts"):
        tinyllm.evaluate([trained, tmp_path / "other"], out=tmp_path / "o")


def test_rewards_out_of_bounds_are_refused_early(here, tmp_path):
    with pytest.raises(RewardError, match="from 0 to 1"):
        run("a", reward=lambda completions, **_: [2.0] * len(completions), out=tmp_path / "o")
    with pytest.raises(DataError, match="has no prompt"):
        (tmp_path / "t.jsonl").write_text('{"question": "1+1="}\n')
        run("a", train=tmp_path / "t.jsonl", out=tmp_path / "o")
