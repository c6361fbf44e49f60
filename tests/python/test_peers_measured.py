"""What bench/peers.py measures, without a GPU: inputs, errors against fp64, times, the whole step."""

import argparse
import collections
import contextlib
import functools
import math
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference as plain
import torch
from conftest import make_layer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from comparison import deepgemm, implementations, inputs, measured, reference, run, step, suites, timing, tuning, worker  # noqa: E402

TINY = suites.TINY[0]

# ---- inputs and errors ----

LAYOUTS = [
    (rows + turned, turned) for rows in ("concatenated", "interleaved", "up_first") for turned in ("", " transposed")
]


def exact_results(made, dout):
    """O and the gradients in fp64, by autograd through reference.py."""
    leaves = [made[name].detach().double().requires_grad_() for name in ("x", "w1", "w2", "weights")]
    out = plain.experts(leaves[0], made["ids"], leaves[3], leaves[1], leaves[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


@pytest.fixture
def tiny():
    return inputs.Inputs(TINY, "cpu", torch.float32, seed=3)


@pytest.mark.parametrize("w1_layout, w2_layout", LAYOUTS)
def test_errors_tell_wrong_results_from_exact_ones(tiny, w1_layout, w2_layout):
    made = {name: getattr(tiny, name) for name in ("x", "w1", "w2", "weights", "ids")}
    out, dx, dw1, dw2, ds = exact_results(made, tiny.dout)
    dw1, dw2 = inputs.arrange_w1(dw1, w1_layout), inputs.arrange_w2(dw2, w2_layout)
    found = {"O": out, "dX": dx, "dW1": dw1, "dW2": dw2, "dS": ds}
    for name, error in reference.errors(tiny, found, w1_layout, w2_layout).items():
        assert error < 1e-12, name
    for name in reference.NAMES:
        wrong = found | {name: found[name] * 1.01}
        for other, error in reference.errors(tiny, wrong, w1_layout, w2_layout).items():
            assert error == pytest.approx(0.01 if other == name else 0, abs=1e-9), (name, other)


@pytest.mark.parametrize("w1_layout, w2_layout", LAYOUTS)
def test_layouts_hold_the_same_rows(tiny, w1_layout, w2_layout):
    n = TINY.n
    gate, up = inputs.gate_and_up(inputs.arrange_w1(tiny.w1, w1_layout)[2], w1_layout)
    assert torch.equal(gate, tiny.w1[2, :n]) and torch.equal(up, tiny.w1[2, n:])
    assert inputs.arrange_w2(tiny.w2, w2_layout).shape == ((8, 32, 64) if w2_layout else (8, 64, 32))


class GroupedGemms:
    """DeepGEMM's functions that the arm calls, and what they demand on Hopper. A block is computed if its first row has an
    expert. Other rows stay NaN."""

    ALIGNMENT = 8

    def get_mk_alignment_for_contiguous_layout(self):
        return self.ALIGNMENT

    def m_grouped_bf16_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        assert a.is_contiguous() and d.is_contiguous() and grouped_layout.is_contiguous() and a.dtype == b.dtype == d.dtype
        assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == (len(a),) and len(a) % self.ALIGNMENT == 0
        assert d.shape == (len(a), b.shape[1]) and a.shape[1] == b.shape[2]
        d.fill_(torch.nan)
        for start in range(0, len(a), self.ALIGNMENT):
            block = slice(start, start + self.ALIGNMENT)
            group = int(grouped_layout[start])
            assert set(grouped_layout[block].tolist()) <= {group, -1}
            if group >= 0:
                d[block] = a[block] @ b[group].T

    def m_grouped_bf16_gemm_nn_contiguous(self, a, b, d, grouped_layout):
        self.m_grouped_bf16_gemm_nt_contiguous(a, b.transpose(1, 2), d, grouped_layout)

    def k_grouped_bf16_gemm_tn_contiguous(self, a, b, d, ks, grouped_layout, c):
        assert a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype
        assert c is d and d.is_contiguous() and d.dtype == torch.float32 and d.shape == (len(ks), a.shape[1], b.shape[1])
        assert grouped_layout.dtype == torch.int32 and grouped_layout.tolist() == ks and sum(ks) == len(a) == len(b)
        assert all(type(k) is int and k % self.ALIGNMENT == 0 for k in ks)
        for group, (left, right) in enumerate(zip(a.split(ks), b.split(ks), strict=True)):
            d[group] += left.T.float() @ right.float()


class Unwritten(torch.autograd.Function):
    """The rows of x behind `end` are NaN, and so are those of its gradient."""

    @staticmethod
    def forward(ctx, x, end):
        ctx.end = end
        return x.index_fill(0, torch.arange(end, len(x)), torch.nan)

    @staticmethod
    def backward(ctx, gradient):
        return Unwritten.forward(ctx, gradient, ctx.end), None


def fp8_grouped_mm(a, b, ends, out_dtype, pad_token_groups_for_grouped_mm):
    """torchao's function, without fp8, and what it demands."""
    assert ends.dtype == torch.int32 and not (ends % 16).any() and len(ends) == len(b) and not pad_token_groups_for_grouped_mm
    assert a.is_contiguous() and b.transpose(1, 2).is_contiguous() and a.shape[1] == b.shape[1]
    bounds = [0, *ends.tolist()]
    a = Unwritten.apply(a, bounds[-1])
    out = [a[begin:end] @ w for begin, end, w in zip(bounds, bounds[1:], b, strict=False)]
    return Unwritten.apply(torch.cat([*out, a.new_zeros(len(a) - bounds[-1], b.shape[2])]).to(out_dtype), bounds[-1])


AGREE = [(name, *limits) for name in ("smoe", "smoe-concatenated", "transformers", "loop", "deepgemm", "torchao-f8")
         for limits in ((torch.float32, 1e-6, 1e-4), (torch.bfloat16, 1e-2, 0.05))]  # fmt: skip


@pytest.mark.parametrize("name, dtype, limit, of_layer", [*AGREE, ("smoe-f8", torch.float32, 0.1, 0.1)])
def test_all_implementations_agree_on_the_cpu(tiny, name, dtype, limit, of_layer):
    if name == "transformers":
        pytest.importorskip(name)
    implementation = implementations.ALL[name]
    if name == "deepgemm":
        implementation.use(GroupedGemms(), lambda function: function)
    elif name == "torchao-f8":
        implementation.use(fp8_grouped_mm, lambda function: function)
    else:
        implementation.load()
    given = inputs.Inputs(TINY, "cpu", dtype, seed=3)
    one = measured.Measured(implementation, given, "experts")
    times, out, gradients = one.first_call(timing.CpuClock())
    errors = one.errors(out, gradients)
    assert set(errors) == {"O", "dX", "dW1", "dW2", "dS"} and min(times.values()) > 0
    assert max(errors.values()) < limit and min(errors.values()) > (0.01 if name == "smoe-f8" else 0), errors
    layer = measured.Measured(implementation, given, "layer")
    _, out, gradients = layer.first_call(timing.CpuClock())
    loop = implementations.ALL["loop"]
    forward, backward = measured.Measured(loop, given, "layer").both
    wanted = backward(forward())
    for mine, theirs in zip(gradients[::3], wanted[::3], strict=True):  # of x and of the router
        assert (mine - theirs).norm() < of_layer * theirs.norm()
    assert measured.new_t_seconds(implementation, given, "experts", timing.CpuClock()) > 0


@pytest.mark.parametrize("ids", [[[3, 0]], [[2, 5], [2, 1], [5, 2]], [[0, 1]] * 20])
def test_rows_for_deepgemm_are_sorted_and_padded(ids):
    """Experts without a row, and one with more than a block: each row's token and expert, and room for any counts."""
    ids = torch.tensor(ids)
    rows = deepgemm.sort(ids, 6, 8)
    counts = ids.flatten().bincount(minlength=6)
    assert rows.padded.tolist() == [-(-count // 8) * 8 for count in counts.tolist()]
    assert rows.padded.sum() <= len(rows.token) <= rows.padded.sum() + 8 * ids.numel() and len(rows.token) % 8 == 0
    assert torch.equal(rows.token[rows.place], torch.arange(len(ids))[:, None].expand_as(ids))
    assert torch.equal(rows.expert[rows.place].long(), ids) and (rows.token >= 0).sum() == ids.numel()
    assert torch.equal(rows.token < 0, rows.expert < 0)


def test_the_portable_kernels_have_turns_of_their_own(monkeypatch, tiny):
    monkeypatch.delenv("SMOE_KERNELS", raising=False)
    portable = implementations.ALL["smoe-portable"]
    portable.load()
    from smoe._context import context_of

    usual = context_of(tiny.x)
    with portable.turn():
        own = context_of(tiny.x)
        assert own is not usual and context_of(tiny.x) is own and os.environ["SMOE_KERNELS"] == "portable"
        with pytest.raises(RuntimeError, match="the kernels are ''"):  # of a context of the CPU
            portable.check_code()
    assert context_of(tiny.x) is usual and os.environ["SMOE_KERNELS"] == "best"
    with portable.turn():
        assert context_of(tiny.x) is own


def test_code_by_anything_but_mma_sync_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    peer = implementations.ALL["scattermoe-mma"]
    (tmp_path / "a").mkdir()
    for text, good in (("add.f32", False), ("mma.sync.aligned", True), ("mma.sync wgmma.mma_async", False)):
        (tmp_path / "a/kernel.ptx").write_text(text)
        with contextlib.nullcontext() if good else pytest.raises(RuntimeError, match="by mma.sync"):
            peer.check_code()


def test_momoes_weights_are_scattered_and_gathered_again():
    made = make_layer(T=5, E=4, K=2)
    momoe = implementations.ALL["momoe"]
    mask, dense = momoe.given(made["ids"], made["weights"].detach(), 4, torch.float32)
    assert torch.equal(mask.sum(0), torch.full((5,), 2)) and torch.equal(dense != 0, mask != 0)
    assert torch.equal(momoe.by_token(dense, made["ids"]), made["weights"].detach())


def test_each_routing_has_its_spread_of_counts():
    generator = torch.Generator().manual_seed(0)
    counts = {}
    for routing in inputs.ROUTINGS:
        ids = inputs.make_ids(1000, 16, 3, routing, generator)
        assert all(len(set(row)) == 3 for row in ids.tolist()) and ids.min() >= 0 and ids.max() < 16
        counts[routing] = ids.flatten().bincount(minlength=16).sort().values.tolist()
    assert counts["uniform"][-1] - counts["uniform"][0] <= 1
    assert counts["random"][-1] < 250 and counts["skewed"][-1] > 600 and counts["skewed"][0] < 100
    with pytest.raises(ValueError, match="--routing nosuch"):
        inputs.make_ids(4, 4, 1, "nosuch", generator)


def test_weights_are_exact_in_bf16(tiny):
    assert torch.equal(tiny.weights, tiny.weights.bfloat16().float())
    fewer = tiny.first(7)
    assert fewer.shape.T == len(fewer.ids) == 7 and fewer.w1 is tiny.w1 and tiny.shape.T == 96
    assert measured.new_tokens(TINY) == 84 and measured.new_tokens(TINY._replace(T=1)) is None


# ---- times ----


class CountingClock:
    """A clock for which every run of a job takes the time that the job returns."""

    def synchronize(self):
        pass

    def each(self, job, count):
        return [[job()] for _ in range(count)]


def test_every_job_has_every_place_and_follows_every_other():
    names = ["a", "b", "c", "d"]
    orders = [timing.order_of(names, i, "a layer") for i in range(60)]
    assert orders == [timing.order_of(names, i, "a layer") for i in range(60)]
    assert orders != [timing.order_of(names, i, "another layer") for i in range(60)]
    assert all(sorted(one) == names for one in orders)
    for place in range(4):
        assert {order[place] for order in orders} == set(names)
    before = {(a, b) for order in orders for a, b in zip(order, order[1:])}  # noqa: B905, the last has no next
    assert len(before) == 12  # every job follows every other one
    ran = []
    assert timing.turn(CountingClock(), lambda: ran.append(1) or 97.0, 0, 0) == [97.0]
    assert len(ran) == 4  # one untimed, three timed


def test_the_second_of_a_pair_has_a_time_of_its_own(monkeypatch):
    """It gets what the first returns. Its time starts where the first ends."""
    now, got = [0.0], []
    monkeypatch.setattr(timing, "time", argparse.Namespace(perf_counter=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    pair = (lambda: passes(0.1) or "kept", lambda kept: got.append(kept) or passes(0.01))
    for times in (*timing.CpuClock().each(pair, 3), timing.turn(timing.CpuClock(), pair, 0, 0)):
        assert times == pytest.approx([110, 10])
    assert got == ["kept"] * 7
    (whole,) = timing.turn(timing.CpuClock(), pair[0], 0, 0)
    assert whole == pytest.approx(100)


def test_a_round_times_the_backward_in_both(tiny):
    asked = worker.Worker(lambda message: None)
    asked.hello("cpu", ["loop", "cublas"])
    asked.prepare(list(TINY), "experts", "random", "f32", 0, ["forward", "both"], False, ["loop", "cublas"])
    times = asked.round(0, "a layer", 0, 0)["times"]
    assert times.keys() == {f"{peer} {name}" for peer in ("loop", "cublas") for name in ("forward", "backward", "both")}
    assert all(0 < times[f"{peer} backward"] < times[f"{peer} both"] for peer in ("loop", "cublas"))


def test_a_record_says_how_many_configurations_were_tuned_for_it(tiny, monkeypatch):
    asked = worker.Worker(lambda message: None)
    asked.hello("cpu", ["loop"])
    asked.tuned = collections.Counter(configurations=99)  # of another layer
    tunes = lambda: asked.tuned.update(configurations=9, finalists=3)
    for check, expected in ((tunes, {"configurations": 9, "finalists": 3}), (lambda: None, None)):
        monkeypatch.setattr(implementations.ALL["loop"], "check_code", check)
        found = asked.prepare(list(TINY), "experts", "random", "f32", 0, ["forward"], False, ["loop"])["measured"]["loop"]
        assert "failed" not in found and found.get("triton_tuning") == expected


def test_times_are_medians_over_rounds():
    rounds = [{"x forward": f, "x both": b, "y forward": 9.0} for f, b in ((1.0, 3.0), (9.0, 4.0), (2.0, 5.0))]
    assert run.times_of(rounds, "x") == {"forward_ms": 2.0, "both_ms": 4.0, "backward_ms": 2.0}
    assert run.times_of(rounds, "x", 2.0)["backward_ms"] == 4.0
    assert run.times_of(rounds, "y") == {"forward_ms": 9.0}
    with_backward = [one | {"x backward": 1.5} for one in rounds]
    assert run.times_of(with_backward, "x")["backward_ms"] == 1.5


def test_a_capture_that_fails_leaves_out_the_graph(monkeypatch):
    """Whatever a library raises in a capture, the other passes must be measured."""
    monkeypatch.setattr(measured.torch.cuda, "synchronize", lambda: None)
    for error in (RuntimeError("capturing"), ValueError("not during a capture")):
        layer = object.__new__(measured.Measured)
        layer.forward, layer.captured = (lambda: None), (lambda error=error: exec("raise error", {"error": error}))
        assert list(layer.jobs(["forward", "inference", "graph"])) == ["forward", "inference"]


# ---- the whole step ----


def test_every_layer_of_the_step_differentiates():
    """The network of step.py in eager mode: all parameters must get gradients, and a step must lower the loss of its
    tokens."""
    model = step.Model(1, 2, 16, 32, 32, 16, 8, 2)
    with torch._dynamo.config.patch(disable=True):
        network = step.LanguageModel(model, implementations.ALL["loop"], "cpu")
        tokens = torch.randint(0, step.VOCABULARY, (33,))
        loss = network(tokens[:-1], tokens[1:])
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert loss.item() == pytest.approx(torch.tensor(float(step.VOCABULARY)).log().item(), rel=0.02)
    parameters = sum(p.numel() for p in network.parameters())
    idle = 6 * 3 * 16 * 32
    assert step.step_flops(model, parameters) == 6 * 32 * (parameters - idle + 16 * 32)


class PretendedTriton:
    """Triton's autotuner; its configuration i takes ms[i] to run. `log` tells what happens; a compilation waits until all
    are under way."""

    def __init__(self, monkeypatch, ms, threads):
        owner, self.log, self.warmed, self.ms, self.now = self, [], threading.Barrier(len(ms), timeout=60), ms, 0.0

        class Kernel:
            def warmup(self, x, *, grid, block):
                owner.mode.append_job(lambda: (owner.warmed.wait(), owner.log.append(("compiled", x, grid, block))))

        class Config:
            pre_hook = None

            def __init__(self, block):
                self.block = block

            def all_kwargs(self):
                return {"block": self.block}

        class Autotuner:
            configs, fn = [Config(block) for block in range(len(ms))], Kernel()

            @functools.cached_property
            def do_bench(self):
                return lambda call, quantiles: [owner.log.append(("in full", call())) or 1.0] * 3

            def _bench(self, x, *, config, grid, warmup):
                assert (x, grid, warmup) == (7, (1,), False)

                def call():
                    owner.now += ms[config.block]
                    return config.block

                return self.do_bench(call, quantiles=(0.5, 0.2, 0.8)) if ms[config.block] < math.inf else [math.inf] * 3

            def prune_configs(self, kwargs):
                return self.configs

            def run(self, x, **kwargs):
                self.nargs = {"x": x}
                configs = self.prune_configs(kwargs)
                if not kwargs["warmup"]:
                    self.timings = {config.block: self._bench(x, config=config, **kwargs)[0] for config in configs}

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = owner.now

            def elapsed_time(self, end):
                return end.at - self.at

        class AsyncCompileMode:
            def __init__(self, executor, *, ignore_errors):
                assert ignore_errors
                self.executor, self.jobs = executor, []

            def append_job(self, job):
                self.jobs.append(self.executor.submit(job))

            def __enter__(self):
                owner.mode = self

            def __exit__(self, *_):
                for job in self.jobs:
                    job.result()

        active = SimpleNamespace(
            get_device_interface=lambda: SimpleNamespace(Event=Event, synchronize=lambda: None),
            get_empty_cache_for_benchmark=lambda: "cache",
            clear_cache=lambda cache: self.log.append(("cleared", cache)),
        )
        self.Autotuner = Autotuner
        runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=AsyncCompileMode))
        monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
        monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=Autotuner))
        monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: range(threads))


def test_configurations_are_compiled_side_by_side_before_one_is_timed(monkeypatch):
    count = 4
    triton = PretendedTriton(monkeypatch, [1.0] * count, count)
    counted = tuning.tune_fast()
    assert tuning.tune_fast() is counted  # of no effect
    triton.Autotuner().run(7, grid=(1,), warmup=False)
    assert sorted(triton.log[:count]) == [("compiled", 7, (1,), block) for block in range(count)]
    assert triton.log[count:] == [("in full", block) for block in range(count)]
    triton.Autotuner().run(7, grid=(1,), warmup=True)  # the caller compiles
    assert len(triton.log) == 2 * count and counted == {"configurations": count, "finalists": count}


def test_the_tuner_times_only_the_fastest_of_a_long_list(monkeypatch):
    ms = [9.0, 5.0, math.inf, *(6.0 + i / 100 for i in range(tuning.FINALISTS)), 6.3, 5.1]
    triton = PretendedTriton(monkeypatch, ms, len(ms))
    counted, tuner = tuning.tune_fast(), triton.Autotuner()
    tuner.run(7, grid=(1,), warmup=False)
    expected = sorted((block for block in range(len(ms)) if ms[block] <= tuning.CLOSE * 5.0), key=ms.__getitem__)
    assert len(expected) > tuning.FINALISTS and list(tuner.timings) == expected[: tuning.FINALISTS]
    assert [block for what, *block in triton.log if what == "in full"] == [[block] for block in tuner.timings]
    assert counted == {"configurations": len(ms), "finalists": tuning.FINALISTS}

    slow = PretendedTriton(monkeypatch, [1.0, *[2.0] * 8], 9)  # the only one that is fast
    tuning.tune_fast()
    slow.Autotuner().run(7, grid=(1,), warmup=False)
    assert [entry for entry in slow.log if entry[0] == "in full"] == [("in full", 0)]

    none = PretendedTriton(monkeypatch, [math.inf] * 9, 9)  # the tuner must meet that itself
    tuning.tune_fast()
    tuner = none.Autotuner()
    tuner.run(7, grid=(1,), warmup=False)
    assert len(tuner.timings) == tuning.FINALISTS


def test_a_brief_timing_runs_a_slow_kernel_twice_and_a_fast_one_more_often(monkeypatch):
    for ms, runs in ((20.0, 2), (2.0, 5), (1e-5, 17)):
        triton, calls = PretendedTriton(monkeypatch, [ms], 1), []

        def call(triton=triton, calls=calls, ms=ms):
            calls.append(ms)
            triton.now += 100 * ms if len(calls) == 1 else ms  # loading the code

        assert tuning.briefly(sys.modules["triton.runtime"].driver.active)(call) == [pytest.approx(ms)]
        assert len(calls) == runs and triton.log == [("cleared", "cache")] * (runs - 1)


def test_without_a_triton_that_compiles_in_threads_nothing_changes(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    assert not tuning.tune_fast()


def test_the_cause_of_an_error_is_named():
    with pytest.raises(OSError, match="library") as raised:
        try:
            raise OSError("undefined symbol: f")
        except OSError as error:
            raise OSError("could not load the library") from error
    assert worker.one_line(raised.value) == "OSError: could not load the library: undefined symbol: f"
    assert worker.one_line(ValueError("a\nb")) == "ValueError: a b"
