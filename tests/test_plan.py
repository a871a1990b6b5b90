"""`tinyllm plan`: numbers by hand, what must be monotonic, a run's own rates, the command and its mistakes."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from run_samples import make_groups, manifest
from tiny import VOCABULARY, gpt2, llama
from transformers import LlamaConfig

from tinyllm.commands.cli import main
from tinyllm.config.io import make_config, to_dict
from tinyllm.config.sections import SFTConfig
from tinyllm.model.memory import ModelShape, memory_estimate, model_shape
from tinyllm.plan import work
from tinyllm.plan.cost import (
    engines_needed,
    make_plan,
    stage_seconds,
    step_hops,
    step_seconds,
    verifiers_needed,
)
from tinyllm.plan.rates import Rate, Rates, differences, make_job, measure
from tinyllm.plan.room import Spec, engine_room, fits, rooms, trainer_room
from tinyllm.plan.work import Layout, Workload
from tinyllm.record.files import read_json, write_json
from tinyllm.record.manifest import build_manifest
from tinyllm.record.rundir import RunDir
from tinyllm.records import Step

LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32  # queries, keys and values, output, MLP, two norms
TABLE = VOCABULARY * 32  # embeddings; the head is as large
TRUNK = 2 * LAYER + 32
ALL = TRUNK + 2 * TABLE

SEVEN_B = ModelShape(  # Qwen2.5-7B
    parameters=7_615_616_512,
    trunk=6_525_621_760,
    head=152_064 * 3584,
    block=233_057_792,
    root=2 * 152_064 * 3584 + 3584,
    linear_sides=28 * (3584 + 3584 + 2 * (3584 + 512) + 3584 + 3584 + 2 * (3584 + 18944) + 18944 + 3584),
    hidden=3584,
    layers=28,
    query=3584,
    key_value=512,
    feed_forward=18_944,
    vocabulary=152_064,
    positions=32_768,
)
GPU = Rates(
    compute=Rate(1e15, "given", "x"),
    bandwidth=Rate(3e12, "given", "x"),
    network=Rate(5e10, "given", "x"),
    disk=Rate(1e9, "given", "x"),
    verify=Rate(0.2, "given", "x"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a configuration and no weights."""
    folder = tmp_path_factory.mktemp("config")
    llama().config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shape():
    return model_shape(llama().config)


def job(shape: ModelShape, **changes) -> Workload:
    """2 groups of 4 completions of 6 tokens on prompts of 10, fp32 AdamW, half of it trained."""
    plain = Workload(
        shape=shape,
        dtype="float32",
        element_bytes=4,
        groups=2,
        group_size=4,
        prompt_tokens=10,
        completion_tokens=6,
        max_new_tokens=6,
        longest=16,
        live_share=0.5,
        max_batch=128,
        tokens_per_microbatch=1024,
        updates=1,
        lora_rank=0,
        reference=False,
        checkpointing=False,
        moments=2,
    )
    return replace(plain, **changes)


def spec(shape: ModelShape, dtype=torch.float32, longest=64, **options) -> Spec:
    return Spec(make_config(**options), shape, dtype, longest)


def parts(room) -> dict[str, int]:
    return {part.name: part.bytes for part in room.parts}


# Shapes


def test_shape_by_hand(shape):
    assert (shape.parameters, shape.trunk, shape.head) == (ALL, TRUNK, TABLE)
    assert (shape.block, shape.root) == (LAYER, 2 * TABLE + 32)
    assert (shape.query, shape.key_value, shape.positions) == (32, 16, 512)
    assert shape.cache_bytes(2) == 2 * 2 * 16 * 2, "layers x (key, value) x grouped heads x bf16"
    sides = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert shape.trained(2) == 2 * 2 * sides and shape.trained(0) == ALL


def test_shape_of_a_tied_head_with_learned_positions():
    found = model_shape(gpt2().config)
    whole = gpt2().num_parameters()
    assert found.parameters == whole and found.head == VOCABULARY * 32
    assert found.trunk == whole - VOCABULARY * 32 - 128 * 32, "neither the table nor the positions multiply a token"
    assert found.root + 2 * found.block == whole


# Work


def test_flops_by_hand(shape):
    plain = job(shape)
    attention = 4 * 2 * 32  # FLOPs of a token and key, all layers
    assert work.prefill_flops(plain) == 2 * (2 * TRUNK * 10 + attention * 10 * 5)
    assert work.decode_flops(plain) == 48 * (2 * (TRUNK + TABLE) + attention * (10 + 3))
    tokens, scored = 0.5 * (2 * 10 + 48), 24
    keys = (10 * 10 / 2 + 24 * 13) / 34  # of a group: a prompt and four completions
    expected = 6 * TRUNK * tokens + 3 * attention * tokens * keys + 8 * TABLE * scored
    assert work.training_flops(plain) == pytest.approx(expected)
    again = 2 * TRUNK * tokens + attention * tokens * keys
    assert work.training_flops(replace(plain, checkpointing=True)) == pytest.approx(expected + again)
    assert work.training_flops(replace(plain, updates=2)) == pytest.approx(2 * expected)
    with_reference = expected + again + 2 * TABLE * scored
    assert work.training_flops(replace(plain, reference=True)) == pytest.approx(with_reference)
    adapters = shape.trained(2)
    lora = (4 * TRUNK + 6 * adapters) * tokens + 3 * attention * tokens * keys + 6 * TABLE * scored
    assert work.training_flops(replace(plain, lora_rank=2)) == pytest.approx(lora)


def test_bytes_by_hand(shape):
    plain = job(shape)
    assert work.decode_steps(plain, 1) == 6, "eight completions run together"
    assert work.decode_steps(replace(plain, max_batch=4), 1) == 12, "two waves"
    assert work.decode_steps(replace(plain, max_new_tokens=9), 1) == 9, "the longest decides"
    cache = 2 * 2 * 16 * 4
    assert work.decode_bytes(plain, 1) == 6 * 4 * ALL + 48 * 13 * cache
    assert work.decode_bytes(plain, 2) == 6 * 4 * ALL + 24 * 13 * cache
    assert work.decode_bytes(plain, 3) == work.decode_bytes(plain, 2), "a group is sampled on one engine"
    assert work.optimizer_bytes(plain, 1) == 32 * ALL
    assert work.optimizer_bytes(replace(plain, element_bytes=2), 8) == 34 * ALL / 8
    assert work.optimizer_bytes(replace(plain, moments=0), 1) == 16 * ALL
    assert work.microbatches(replace(plain, tokens_per_microbatch=16), 1) == 3, "34 tokens"
    assert work.microbatches(replace(plain, tokens_per_microbatch=16), 4) == 1
    assert work.collective_bytes(plain, Layout(trainers=1)) == 0
    apart = Layout(trainers=8, engines=1)
    in_bf16 = replace(plain, element_bytes=2, reference=True)
    assert work.collective_bytes(in_bf16, apart) == 7 / 8 * (2 * 2 * ALL + 4 * ALL + 4 * ALL), "the fp32 masters too"
    assert work.collective_bytes(in_bf16, Layout(trainers=8)) == work.collective_bytes(in_bf16, apart)
    assert work.published_bytes(plain) == 4 * ALL
    adapters = replace(plain, lora_rank=2, publish_adapters=True)
    assert work.published_bytes(adapters) == 4 * shape.trained(2)


# Memory


def test_memory_of_one_process_is_the_estimate_and_the_head(shape):
    given = spec(shape)
    room = trainer_room(given, Layout())
    estimate = dict(memory_estimate(shape, torch.float32, given.config, 64).parts)
    found = parts(room)
    assert found.pop("head") == 12 * 256 * VOCABULARY + 4 * TABLE
    assert found == {name: size for name, size in estimate.items() if size}
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4 * ALL, 4 * ALL, 8 * ALL)
    assert found["key-value cache"] == 128 * 64 * 2 * 2 * 16 * 4


def test_memory_of_eight_ranks_in_bf16(shape):
    found = parts(trainer_room(spec(shape, torch.bfloat16), Layout(trainers=8, engines=1)))
    assert found["weights"] == 2 * ALL, "whole on every rank, also where servers sample"
    assert found["gradients"] == round(4 * ALL / 8)
    assert found["optimizer"] == round(12 * ALL / 8), "two moments and the masters"
    assert found["gathered weights"] == 2 * (2 * TABLE + 32 + LAYER) * 7 // 8
    assert found["gathered gradients"] == 4 * max(LAYER, 2 * TABLE + 32) * 7 // 8
    assert "key-value cache" not in found
    itself = parts(trainer_room(spec(shape, torch.bfloat16), Layout(trainers=8)))
    assert itself["gathered weights"] == found["gathered weights"] and itself["key-value cache"] > 0


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 2}}, {"beta": 0.04}])
def test_memory_of_a_rank_is_at_least_what_a_run_on_so_many_asks_for(shape, ranks, options):
    """So what the plan says to fit is not refused when it starts."""
    for dtype in (torch.float32, torch.bfloat16):
        given = spec(shape, dtype, **options)
        found = parts(trainer_room(given, Layout(trainers=ranks)))
        for name, size in memory_estimate(shape, dtype, given.config, 64, ranks=ranks).parts:
            assert found.get(name, 0) == size, name


def test_memory_of_adapters(shape):
    found = parts(trainer_room(spec(shape, torch.bfloat16, lora={"rank": 2}, beta=0.04), Layout(trainers=2)))
    adapters = shape.trained(2)
    assert found["gradients"] == 4 * adapters / 2
    assert found["optimizer"] == (8 * adapters + 4 * (ALL + adapters)) / 2, "frozen weights are sharded in fp32 too"
    assert "reference model" not in found, "the reference is the model without its adapters"
    assert "gathered gradients" not in found and found["head"] == 12 * 256 * VOCABULARY
    whole = parts(trainer_room(spec(shape, beta=0.04), Layout(trainers=4)))
    assert whole["reference model"] == 4 * ALL, "whole on every rank"


def test_memory_of_an_engine(shape):
    layout = Layout(engines=1, gpus_per_engine=2)
    found = parts(engine_room(spec(shape, torch.bfloat16, max_batch=32), layout))
    cache = 32 * 64 * 2 * 2 * 16 * 2
    assert found == {"weights": ALL, "key-value cache": cache // 2, "head": 12 * 32 * VOCABULARY}


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 16}}, {"beta": 0.04, "gradient_checkpointing": True}])
@pytest.mark.parametrize("engines", [0, 8])
def test_more_ranks_never_take_more_memory_each(options, engines):
    given = spec(SEVEN_B, torch.bfloat16, 2048, tokens_per_microbatch=4096, **options)
    counts = (2, 3, 4, 8, 16, 64, 512)  # one process has no fp32 copy of what adapters leave frozen
    sizes = [trainer_room(given, Layout(trainers=n, engines=engines)).total for n in counts]
    assert sizes == sorted(sizes, reverse=True)


def test_what_does_not_fit_names_what_would():
    given = spec(SEVEN_B, torch.bfloat16, 2048, tokens_per_microbatch=4096, max_batch=64)
    small, large = Rate(80 * 2**30, "given", "x"), Rate(1000 * 2**30, "given", "x")
    layout = Layout(engines=1)
    trainer, engine = rooms(given, layout, small)
    assert trainer.fits is False and engine.fits is True and engine.remedies == ()
    assert trainer.total > 16 * SEVEN_B.parameters
    assert [text.partition(" ")[0] for text in trainer.remedies] == ["--gpus", "--lora.rank"]
    named = int(trainer.remedies[0].split()[1].rstrip(":")) - 1
    assert fits(given, replace(layout, trainers=named), small)
    assert not fits(given, replace(layout, trainers=named // 2), small), "the fewest, by doubling"
    assert rooms(given, layout, large)[0].fits is True
    assert rooms(given, layout, None)[0].fits is None, "not known, not guessed"
    (hopeless,) = rooms(given, Layout(), Rate(2**30, "given", "x"))[0].remedies
    assert hopeless.startswith("none of these is enough by itself")


# Time


def test_hops_by_hand(shape):
    rates = replace(GPU, efficiency=Rate(0.5, "given", "x"))
    plain = job(shape, live_share=1.0)
    layout = Layout(trainers=2, engines=2, verifiers=4)
    hops = {hop.name: hop for hop in step_hops(plain, layout, rates)}
    compute, memory = work.decode_flops(plain) / 2 / 5e14, work.decode_bytes(plain, 2) / 1.5e12
    assert memory > compute, "a step this small is bound by memory"
    assert hops["sample"].seconds == pytest.approx(work.prefill_flops(plain) / 2 / 5e14 + memory)
    assert "bound by memory" in hops["sample"].how
    assert hops["verify"].seconds == pytest.approx(8 * 0.2 / 4)
    assert hops["record"].seconds == pytest.approx(48 * 16 / 1e9)
    collective = work.collective_bytes(plain, layout) / 5e10
    assert hops["forward + backward"].seconds == pytest.approx(work.training_flops(plain) / 2 / 5e14 + collective)
    assert hops["optimizer"].seconds == pytest.approx(32 * ALL / 2 / 1.5e12)
    assert hops["publish"].seconds == pytest.approx(4 * ALL * (1 / 1.5e12 + 1 / 1e9 + 1 / 1e9))
    assert hops["verify"].basis == "given"
    assert {hops[name].basis for name in ("sample", "forward + backward", "optimizer", "publish")} == {"extrapolated"}


def test_step_time_overlaps_with_lag():
    stages = {"sample": 6.0, "verify": 1.0, "train": 4.0}
    assert [step_seconds(stages, lag) for lag in (0, 1, 2)] == [11.0, 6.0, 6.0]
    assert step_seconds({"sample": 4.0, "verify": 4.0, "train": 4.0}, 1) == 6.0, "through all hops in two steps"


@pytest.mark.parametrize("layout", [Layout(), Layout(trainers=4), Layout(trainers=4, engines=4, max_lag=1)])
@pytest.mark.parametrize(
    "name", ["groups", "group_size", "prompt_tokens", "completion_tokens", "live_share", "updates"]
)
def test_more_work_is_never_cheaper(name, layout):
    values = [0.125, 0.25, 1.0] if name == "live_share" else [1, 2, 3, 7, 8, 9, 31, 64, 500]
    times, flops = [], []
    for value in values:
        planned = job(SEVEN_B, max_new_tokens=512, element_bytes=2, live_share=1.0, **{})
        planned = replace(planned, **{name: value})
        times.append(step_seconds(stage_seconds(step_hops(planned, layout, GPU), layout), layout.max_lag))
        flops.append(work.training_flops(planned))
    assert times == sorted(times) and flops == sorted(flops)


def test_balance():
    planned = job(SEVEN_B, groups=64, group_size=16, prompt_tokens=512, completion_tokens=1024, max_new_tokens=2048)
    planned = replace(planned, element_bytes=2, tokens_per_microbatch=8192, live_share=1.0)
    layout = Layout(trainers=8, engines=1, verifiers=4)
    enough = engines_needed(planned, layout, GPU)
    assert enough is not None and enough > 1

    def stages(engines):
        changed = replace(layout, engines=engines)
        return stage_seconds(step_hops(planned, changed, GPU), changed)

    assert stages(enough)["sample"] <= stages(enough)["train"] < stages(enough - 1)["sample"]
    hops = step_hops(planned, layout, GPU)
    count = verifiers_needed(hops, layout)
    assert count == math.ceil(64 * 16 * 0.2 / stage_seconds(hops, layout)["train"])


def test_the_best_split_is_the_fastest_that_fits():
    options = {"tokens_per_microbatch": 8192, "max_batch": 64, "max_new_tokens": 2048, "gradient_checkpointing": True}
    given = spec(SEVEN_B, torch.bfloat16, 2560, **options)
    planned = make_job(
        given.config, SEVEN_B, torch.bfloat16, prompt_tokens=512.0, completion_tokens=1024.0, longest=2560
    )
    memory, disk, verify = (Rate(x, "given", "x") for x in (80 * 2**30, 1e11, 0.001))
    rates = replace(GPU, memory=memory, disk=disk, verify=verify)
    plan = make_plan(given, planned, Layout(trainers=8, max_lag=2), rates)
    assert [split.layout.max_lag for split in plan.best] == [0, 2]
    for split in plan.best:
        assert split.layout.devices == 8 and fits(given, split.layout, rates.memory)
        for engines in range(8):
            other = replace(split.layout, engines=engines, trainers=8 - engines)
            if fits(given, other, rates.memory):
                seconds = step_seconds(stage_seconds(step_hops(planned, other, rates), other), other.max_lag)
                assert seconds >= split.step_s
    assert plan.best[1].layout.engines > 0, "with lag, engines of their own overlap"
    slow = make_plan(given, planned, plan.layout, replace(rates, disk=Rate(1e9, "given", "x")))
    assert slow.best[1].layout.engines == 0, "weights through a slow disk cost more than the overlap brings"


# Rates


def test_a_short_probe_of_this_machine(tmp_path):
    found = measure(torch.float32, "cpu", tmp_path, size=64, megabytes=1)
    for rate in (found.compute, found.bandwidth, found.disk):
        assert rate is not None and rate.value > 0 and rate.basis == "measured"
    assert "64^3 product in float32" in found.compute.source
    assert list(tmp_path.iterdir()) == [], "the file it wrote is gone"


def made_run(path, model, seconds=(9.0, 2.0, 2.0), **options):
    """A run with made-up times: 2 groups of 3 completions of 4 tokens on prompts of 3; half of it trained."""
    config = make_config(model=str(model), prompts_per_step=2, group_size=3, max_new_tokens=4, **options)
    given = manifest(config)
    given["facts"]["dtype"] = "float32"
    with RunDir.create(path, given) as run:
        for step, whole in enumerate(seconds, 1):
            run.record(Step(step, make_groups(step)))
            run.log({"step": step, "tokens": 12})
            times = {"sample_s": 0.5, "verify_s": 0.125, "record_s": 0.0625, "update_s": 0.25, "publish_s": 0.0625}
            timing = {name: value * whole for name, value in times.items()}
            run.log_timing({"step": step, "step_s": whole, "sampled_tokens": 24, **timing})
    return path


def plan_of(capsys, *words) -> dict:
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_gives_lengths_shares_and_rates(tmp_path, model, capsys):
    plan = plan_of(capsys, "--run", made_run(tmp_path / "run", model))
    planned = plan["job"]
    assert (planned["groups"], planned["prompt_tokens"], planned["completion_tokens"]) == (2, 3, 4)
    assert planned["live_share"] == 0.5 and planned["dtype"] == "float32"
    hops = {hop["name"]: hop for hop in plan["hops"]}
    assert hops["sample"]["seconds"] == pytest.approx(1.0), "the first step, a warm-up, is left out"
    assert hops["verify"]["seconds"] == pytest.approx(0.25)
    assert hops["record"]["seconds"] == pytest.approx(0.125)
    assert hops["forward + backward"]["seconds"] == pytest.approx(0.5) and hops["optimizer"]["seconds"] == 0
    assert plan["step_s"] == plan["synchronous_s"] == pytest.approx(2.0)
    assert {hop["basis"] for hop in plan["hops"]} == {"measured", "assumed"}
    assert "2 steps of" in hops["sample"]["how"]


def test_what_a_run_saved_stands_for_a_start_model_that_is_gone(tmp_path, model, capsys):
    run = made_run(tmp_path / "run", tmp_path / "gone")
    assert main(["plan", "--run", str(run)]) == 2
    assert "gone' does not exist" in capsys.readouterr().err
    LlamaConfig.from_pretrained(model).save_pretrained(run / "best")
    plan = plan_of(capsys, "--run", run)
    assert plan["job"]["shape"]["parameters"] == ALL and plan["step_s"] == pytest.approx(2.0)


def test_a_run_whose_hops_overlapped_or_were_shared_out_is_not_read_as_one_process(tmp_path, model, capsys):
    pooled = made_run(tmp_path / "pooled", model, pool={"engines": 1})
    ranks = made_run(tmp_path / "ranks", model)
    given = read_json(ranks / "manifest.json")
    given["facts"]["ranks"] = 2
    write_json(ranks / "manifest.json", given)
    for run, how in ((pooled, "with a pool"), (ranks, "on several ranks")):
        assert main(["plan", "--run", str(run)]) == 2
        assert f"{run} ran {how}, so its seconds are not of one hop each" in capsys.readouterr().err


def test_the_pool_of_the_job_is_planned(model, capsys):
    """Its lag and verifiers, where no option of the plan says another."""
    job = ["--model", model, "--prompt-tokens", 100]
    words = [*job, "--pool.engines", 2, "--pool.max_lag", 2, "--pool.verifiers", 7]
    assert (plan_of(capsys, *words)["layout"]["max_lag"], plan_of(capsys, *words)["layout"]["verifiers"]) == (2, 7)
    assert plan_of(capsys, *words, "--max-lag", 1)["layout"]["max_lag"] == 1
    assert plan_of(capsys, *job, "--reward.workers", 5)["layout"]["verifiers"] == 5


def test_a_lag_on_several_trainers_is_said_not_to_start(model, capsys):
    """A pool serves one trainer process, so `tinyllm grpo` would refuse what the plan describes."""
    words = ["--model", model, "--prompt-tokens", 100, "--gpus", 4, "--engine-gpus", 2]
    words += ["--tflops", 100, "--bandwidth-gb-s", 1000, "--network-gb-s", 1, "--disk-gb-s", 1, "--verify-s", 0.1]
    assert any("cannot be started yet" in note for note in plan_of(capsys, *words, "--max-lag", 1)["notes"])
    assert not any("cannot be started" in note for note in plan_of(capsys, *words)["notes"])
    assert main(["plan", *map(str, words)]) == 0
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("fastest use") and "max_lag" in line:
            assert line.endswith("(cannot be started yet)") == ("1 trainer" not in line)


def test_a_step_of_very_many_prompts_is_planned_at_once(model, capsys):
    words = ["--model", model, "--prompt-tokens", 100, "--tflops", 100, "--bandwidth-gb-s", 1000]
    begin = time.monotonic()
    plan_of(capsys, *words, "--prompts_per_step", 10**9)
    assert time.monotonic() - begin < 30


def test_another_job_is_extrapolated_with_the_reasons(tmp_path, model, capsys):
    run = made_run(tmp_path / "run", model)
    one = {hop["name"]: hop for hop in plan_of(capsys, "--run", run)["hops"]}
    plan = plan_of(capsys, "--run", run, "--group_size", 6, "--gpus", 2, "--reward.workers", 4)
    hops = {hop["name"]: hop for hop in plan["hops"]}
    assert {hops[name]["basis"] for name in ("sample", "verify", "record", "forward + backward")} == {"extrapolated"}
    assert "6 rollouts a step, planned 12" in hops["sample"]["how"]
    assert "one device, planned 2" in hops["sample"]["how"]
    assert hops["verify"]["seconds"] == pytest.approx(one["verify"]["seconds"]), "twice as many, twice the verifiers"
    assert hops["record"]["seconds"] == pytest.approx(2 * one["record"]["seconds"])
    assert any("--network-gb-s" in note for note in plan["notes"])


def test_a_run_sampled_by_servers_has_published_to_them(tmp_path, model, capsys):
    run = made_run(tmp_path / "run", model, engine={"urls": ("http://127.0.0.1:8000",)})
    plan = plan_of(capsys, "--run", run, "--gpus", 2, "--engine-gpus", 1)
    hops = {hop["name"]: hop for hop in plan["hops"]}
    assert "sampled on servers" in hops["sample"]["how"] and hops["sample"]["basis"] == "extrapolated"
    assert hops["publish"]["seconds"] == pytest.approx(0.125), "what the run took, sending included"


def test_a_larger_model_is_extrapolated_by_its_flops(tmp_path, model, capsys):
    run = made_run(tmp_path / "run", model)
    deeper = tmp_path / "deeper"
    LlamaConfig.from_pretrained(model, num_hidden_layers=8).save_pretrained(deeper)
    small, large = plan_of(capsys, "--run", run), plan_of(capsys, "--run", run, "--model", deeper)
    assert large["job"]["shape"]["layers"] == 8
    found, was = large["hops"][1], small["hops"][1]
    assert "a model of 0.0M, planned 0.1M" in found["how"] and found["basis"] == "extrapolated"
    assert 3 < found["seconds"] / was["seconds"] < 4, "four times the layers, the same head"


def test_differences_have_a_tolerance(shape):
    plain = job(shape)
    assert differences(plain, replace(plain, prompt_tokens=11), 1) == []
    assert (
        differences(plain, replace(plain, prompt_tokens=15), 1)
        == [
            "prompts of 10 tokens, planned 15",
            "34 trained tokens a step, planned 39",
        ][: 1 if 39 / 34 <= 1.25 else 2]
    )
    assert differences(plain, replace(plain, dtype="bfloat16"), 1) == ["in float32, planned bfloat16"]


def test_a_real_run_predicts_its_own_steps(train, capsys):
    """The sum over hops from mean lengths and rates is the mean step, the first left out."""
    result = train("run", train={"steps": 5})
    steps = [row["step_s"] for row in RunDir.read(result.run_dir).timings()[1:]]
    plan = plan_of(capsys, "--run", result.run_dir)
    assert plan["step_s"] == pytest.approx(sum(steps) / len(steps), rel=0.25)
    assert all(hop["basis"] in ("measured", "assumed") for hop in plan["hops"])
    assert plan["job"]["shape"]["parameters"] == ALL


# The command


def test_the_tables_say_the_basis_of_every_line(tmp_path, model, capsys):
    words = ["plan", "--model", str(model), "--prompt-tokens", "100", "--gpus", "8", "--engine-gpus", "2"]
    hardware = ["--tflops", "989", "--bandwidth-gb-s", "3350", "--gpu-memory-gib", "80", "--network-gb-s", "50"]
    assert main([*words, *hardware, "--disk-gb-s", "1", "--verify-s", "0.01", "--max-lag", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 trainers + 2 engines" in out and "fits into 90% of 80.0 GiB (given)" in out
    lines = out.splitlines()
    for name in ("TFLOP/s of a device", "weights", "activations", "sample", "verify", "forward + backward", "publish"):
        (line,) = [line for line in lines if line.startswith(name)][:1]
        assert any(f"  {basis}" in line for basis in ("given", "computed", "extrapolated", "measured")), line
    for text in (
        "step, synchronous",
        "step, asynchronous",
        "bound by",
        "keep these trainers busy",
        "fastest use of 8 devices",
    ):
        assert text in out
    assert "expected with max_lag 1" in out and "(extrapolated)" in out
    assert "assumed: every completion is taken to have sampling.max_new_tokens = 24" in out
    assert main([*words, "--model.dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "step time: not known without rates" in out and "unknown" in out


def test_json_is_what_the_tables_show(model, capsys):
    words = ["--model", model, "--tflops", 100, "--bandwidth-gb-s", 1000, "--gpu-memory-gib", 1e-3]
    plan = plan_of(capsys, *words, "--verify-s", 0.5, "--data.max_prompt_tokens", 100)
    (room,) = plan["rooms"]
    assert room["total"] == sum(part["bytes"] for part in room["parts"]) and room["fits"] is False
    assert room["remedies"]
    assert plan["job"]["dtype"] == "bfloat16", "auto, on hardware that is given"
    assert plan["rates"]["compute"] == {"value": 1e14, "basis": "given", "source": "--tflops"}
    verify = next(hop for hop in plan["hops"] if hop["name"] == "verify")
    assert verify["seconds"] == 16 * 8 * 0.5 / 2
    assert plan["bound"] == "verify"
    assert any("data.max_prompt_tokens" in text for text in plan["assumed"])


def test_measured_here(model, capsys, monkeypatch):
    monkeypatch.setattr("tinyllm.plan.rates.measure.__kwdefaults__", {"size": 64, "megabytes": 1})
    plan = plan_of(capsys, "--model", model, "--measure", "--model.dtype", "float32", "--prompt-tokens", 100)
    assert plan["rates"]["compute"]["basis"] == plan["rates"]["disk"]["basis"] == "measured"
    assert plan["rates"]["efficiency"]["basis"] == "assumed"
    assert next(hop for hop in plan["hops"] if hop["name"] == "sample")["basis"] == "extrapolated"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "1000000"], "--gpus 1000000: plans are made for at most 4096 devices; lower it"),
        (["--gpus", "many"], "--gpus many: expected whole number"),
        (["--gpus", "2", "--engine-gpus", "2"], "--engine-gpus 2: leaves none of --gpus 2 to train on"),
        (["--gpus", "8", "--engine-gpus", "3", "--gpus-per-engine", "2"], "not a multiple of --gpus-per-engine 2"),
        (["--max-lag", "-1"], "--max-lag -1: must be at least 0"),
        (["--tflops", "100"], "--tflops and --bandwidth-gb-s belong together"),
        (["--efficiency", "1.5"], "--efficiency 1.5: must be at most 1"),
        (["--network-gb-s", "nan"], "--network-gb-s nan: must be a finite number"),
        (["--verify-s", "-1"], "--verify-s -1.0: must be at least 0"),
        (["--run", "nowhere"], "nowhere: no run here"),
        (["--run", ""], '--run = "": must not be empty'),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file"),
        (["--sampling.grup_size", "4"], "did you mean 'sampling.group_size'?"),
        (["--model", "./nowhere"], "model folder './nowhere' does not exist"),
        (
            ["--model", "MODEL", "--completion-tokens", "30"],
            "--completion-tokens 30: more than sampling.max_new_tokens",
        ),
        (["--model", "MODEL", "--prompt-tokens", "500"], "has 512 positions"),
        (
            ["--model", "MODEL", "--prompt-tokens", "400", "--tokens_per_microbatch", "128"],
            "train.tokens_per_microbatch = 128 cannot hold",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, model, capsys):
    assert main(["plan", *(str(model) if word == "MODEL" else word for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_runs_that_cannot_be_learned_from(tmp_path, model, capsys):
    made_run(tmp_path / "empty", model, seconds=())
    with RunDir.create(tmp_path / "sft", build_manifest(to_dict(SFTConfig()), hashes={}, probe={}, kind="sft")):
        pass
    for name, message in (("empty", "has no timed step yet"), ("sft", "is a run of sft, which does not sample")):
        assert main(["plan", "--run", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
