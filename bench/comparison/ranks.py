"""bench/peers.py --ranks W: expert parallelism, one process for each GPU. Every process has T tokens and E/W experts.

Jobs: `alone`, what this process's experts have to compute, on rows that are here already; `smoe-ep`, smoe.ep.experts;
`a2a-smoe` and `a2a-grouped_mm`, Transformers' AllToAllEP with smoe's and with its own grouped_mm as the local experts; and
`torch`, all_to_all of pairs and a compiled grouped_mm, as torchtitan runs them. They run by turns, in the same order on all
processes; the time of a turn is that of the slowest process.
"""

import math
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import implementations, inputs, records, timing
from .processes import Failed
from .run import now, say
from .worker import DTYPES, one_line, version_of

FEW_TOKENS = 64  # at most so many: the forward without gradients is measured in a CUDA graph too
_EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


class Layer:
    """The tensors of this process. ids and weights of all processes come from one seed."""

    def __init__(self, shape, rank, ranks, device, dtype, routing, seed):
        self.shape, self.rank, self.ranks, self.local = shape, rank, ranks, shape.E // ranks
        same = torch.Generator(device).manual_seed(seed)
        self.all_ids = inputs.make_ids(ranks * shape.T, shape.E, shape.K, routing, same)
        scores = torch.randn(self.all_ids.shape, device=device, generator=same).softmax(-1)
        own = torch.Generator(device).manual_seed(1 + seed * ranks + rank)
        self.normal = lambda *size, scale=1.0: torch.empty(*size, device=device, dtype=dtype).normal_(0, scale, generator=own)
        mine = slice(rank * shape.T, (rank + 1) * shape.T)
        self.ids, self.weights, self.all_weights = self.all_ids[mine], scores[mine], scores
        self.x, self.dout = self.normal(shape.T, shape.d), self.normal(shape.T, shape.d)
        self.w1 = torch.nn.Parameter(self.normal(self.local, 2 * shape.n, shape.d, scale=shape.d**-0.5))
        self.w2 = torch.nn.Parameter(self.normal(self.local, shape.d, shape.n, scale=shape.n**-0.5))

    def received(self):
        """x, local ids (-1: another process's) and weights of the tokens that have one of this process's experts."""
        ids = self.all_ids - self.rank * self.local
        ids = ids.masked_fill((ids < 0) | (ids >= self.local), -1)
        here = (ids >= 0).any(1)
        ids, weights = ids[here], self.all_weights[here]
        if ids.shape[1] > self.local:  # at most so many are local
            order = (ids < 0).to(torch.int8).argsort(dim=1, stable=True)[:, : self.local]
            ids, weights = ids.gather(1, order), weights.gather(1, order)
        return self.normal(len(ids), self.shape.d), ids, weights

    def rows_sent(self):
        """Rows that leave this process in one direction: {"pairs": ..., "dedup": ...}."""
        peers = self.ids // self.local
        pairs = int((peers != self.rank).sum())
        dedup = sum(int((peers == peer).any(1).sum()) for peer in range(self.ranks) if peer != self.rank)
        return {"pairs": pairs, "dedup": dedup}


# ---- jobs: each makes (leaves, forward, dout, rows sent, smoe.ep's group) ----


def _alone(layer, mesh):
    import smoe

    x, ids, weights = layer.received()
    leaves = [x.requires_grad_(), weights.detach().requires_grad_(), layer.w1, layer.w2]
    return leaves, lambda: smoe.experts(leaves[0], ids, *leaves[1:]), layer.normal(*x.shape), None, None


def _leaves(layer):
    return [layer.x.detach().requires_grad_(), layer.weights.detach().requires_grad_(), layer.w1, layer.w2]


def _smoe_ep(layer, mesh):
    import smoe

    s, leaves = layer.shape, _leaves(layer)
    group = smoe.ep.Group(mesh["ep"], max_tokens=s.T, hidden=s.d, num_experts=s.E, top_k=s.K, dtype=layer.x.dtype)
    ids, run = layer.ids.int(), smoe.ep.experts
    return leaves, lambda: run(leaves[0], ids, *leaves[1:], group=group), layer.dout, "dedup", group


def _all_to_all_ep(peer):
    def make(layer, mesh):
        from transformers.distributed.expert_parallel import AllToAllEP

        implementation, leaves = implementations.ALL[peer], _leaves(layer)
        implementation.load()
        bound = implementation.bind(layer.shape._replace(E=layer.local, K=1), layer.w1, layer.w2)

        class Local(torch.nn.Module):
            num_experts = layer.local

            def forward(self, x, ids, weights):
                return bound(x, *implementation.given(ids, weights, layer.local, x.dtype))

        exchange = AllToAllEP(Local(), mesh["ep"], mesh["tp"])
        run = lambda: exchange(leaves[0], layer.ids, leaves[1].to(layer.x.dtype))
        return leaves, run, layer.dout, "pairs", None

    return make


def _torch(layer, mesh):
    sys.path.append(str(_EXAMPLES))
    from ep_all_to_all import Exchange

    leaves, group = _leaves(layer), mesh["ep"].get_group()

    def rows(x, offsets, w1, w2):
        gate, up = torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)

    compute = torch.compile(rows) if layer.x.is_cuda else rows

    def run():
        way = Exchange(layer.ids, layer.shape.E, group)
        return way.combine(compute(way.dispatch(leaves[0]), way.offsets[1:], *leaves[2:]), leaves[1])

    return leaves, run, layer.dout, "pairs", None


MAKERS = {
    "alone": _alone,
    "smoe-ep": _smoe_ep,
    "a2a-smoe": _all_to_all_ep("smoe-concatenated"),
    "a2a-grouped_mm": _all_to_all_ep("transformers"),
    "torch": _torch,
}


class Job:
    def __init__(self, name, layer, mesh):
        self.leaves, self.forward, self.dout, self.sent, self.group = MAKERS[name](layer, mesh)

    def backward(self, out):
        return torch.autograd.grad(out, self.leaves, self.dout)

    def results(self):
        out = self.forward()
        return [out.detach(), *self.backward(out)]

    def memory(self):
        """Peak bytes of forward and backward beside weights and inputs; None on the CPU."""
        if not self.dout.is_cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.results()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def passes(self, few):
        made = {"forward": self.forward, "both": (self.forward, self.backward)}
        return made | ({"graph": self.captured()} if few and self.sent != "pairs" else {})

    def captured(self):
        """The forward without gradients in a CUDA graph; those of all_to_all read sizes on the host and have none."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                self.forward()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad(), torch.cuda.graph(graph):
            self.forward()
        return graph.replay


# ---- one process ----


class Rank:
    def __init__(self, rank, options):
        self.rank, self.options, self.cuda = rank, options, options.device == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.clock = timing.clock_of(options.device)
        extra = {"device_id": self.device} if self.cuda else {}
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
        address = f"tcp://127.0.0.1:{options.port}"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=options.ranks, **extra)
        self.mesh = dist.device_mesh.init_device_mesh(options.device, (options.ranks, 1), mesh_dim_names=("ep", "tp"))

    def most(self, *values):
        """The largest of each over the processes; on the host."""
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def gather(self, value):
        values = [None] * self.options.ranks
        dist.all_gather_object(values, value)
        return values

    def prepare(self, name, layer):
        """The job and its results, or the reason of the first process that cannot run it."""
        try:
            job = Job(name, layer, self.mesh)
            made, results, why = job, job.results(), None
        except Exception as error:  # noqa: BLE001, any failure of a job is its result
            made, results, why = None, None, one_line(error)
        why = next((reason for reason in self.gather(why) if reason), None)
        return made, results, why

    def turn(self, job):
        """[ms] of the slowest process, for a pair also of its second function."""
        (last,) = self.most(timing.settle(self.clock, job, 0))
        for _ in range(math.ceil(self.options.settle / last)):
            timing.run(job)
        self.clock.synchronize()
        dist.barrier()
        count = min(timing.MOST_RUNS, max(timing.LEAST_RUNS, int(self.options.timed / last)))
        return self.most(*[statistics.median(times) for times in zip(*self.clock.each(job, count), strict=True)])

    def measure(self, shape, routing):
        """{job: figures or its failure}"""
        o, found, jobs, groups, first = self.options, {}, {}, [], None
        layer = Layer(shape, self.rank, o.ranks, self.device, DTYPES[o.dtype], routing, o.seed)
        sent = layer.rows_sent()
        for name in o.jobs:
            job, results, why = self.prepare(name, layer)
            if why:
                found[name] = {"failed": why}
                continue
            first = results if name == "smoe-ep" else first
            apart = self.most(*_apart(results, first)) if job.sent and first else None
            figures = self.most(job.memory() or 0, job.group.window_bytes if job.group else 0, sent.get(job.sent, 0) * shape.d * layer.x.element_size())
            names = ("peak_bytes", "window_bytes", "sent_bytes")
            found[name] = {"apart": apart} | dict(zip(names, map(int, figures), strict=True))
            jobs |= {(name, key): one for key, one in job.passes(self.cuda and shape.T <= FEW_TOKENS).items()}
            groups += [job.group] if job.group else []
        found |= self.rounds(jobs, f"{shape.name} {routing}", found)
        for group in groups:
            group.close()
        return found

    def rounds(self, jobs, layer, found):
        times, begin, index = {}, time.monotonic(), 0
        while self.most(index < self.options.least_rounds or time.monotonic() - begin < self.options.shape_seconds)[0]:
            for name, key in timing.order_of(list(jobs), index, layer):
                one, *backward = self.turn(jobs[name, key])
                times.setdefault((name, key), []).append(one)
                for ms in backward:
                    times.setdefault((name, "backward"), []).append(ms)
            index += 1
        medians = {}
        for (name, key), ms in times.items():
            medians.setdefault(name, {"rounds": index})[f"{key}_ms"] = statistics.median(ms)
        return {name: found[name] | figures for name, figures in medians.items()}


def _apart(ours, theirs):
    """Relative differences of O, dX, dS, dW1, dW2 from smoe-ep's."""
    norms = [((a.float() - b.float()).norm(), b.float().norm()) for a, b in zip(ours, theirs, strict=True)]
    return [float(difference / norm) if norm else float(difference) for difference, norm in norms]


def _work(rank, options, shapes):
    one = Rank(rank, options)
    name = torch.cuda.get_device_name() if one.cuda else "CPU"
    for routing in options.routings:
        for shape in shapes:
            if one.most(time.monotonic() > options.deadline)[0]:
                break
            if rank == 0:
                say(f"{shape.name} {routing} on {options.ranks} processes")
            found = one.measure(shape, routing)
            if rank == 0:
                records.append(options.records, [_record(options, shape, routing, name, job) | found[job] for job in found])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a job that failed may have left work that never ends


def _record(options, shape, routing, device, job):
    sizes = shape._asdict() | {"shape": shape.name}
    del sizes["name"]
    versions = {package: version_of(package) for package in ("smoe", "torch", "transformers")}
    return sizes | {
        "commit": options.commit, "device": device, "ranks": options.ranks, "part": "experts", "routing": routing,
        "dtype": options.dtype, "settle_s": options.settle, "timed_s": options.timed, "peer": job, "tuning": 0, "date": now(),
        "versions": versions,
    }  # fmt: skip


# ---- the program ----


def measure(options, shapes):
    there = torch.cuda.device_count()
    if options.device == "cuda" and there < options.ranks:
        raise Failed(f"--ranks {options.ranks}: torch finds {there} CUDA devices")
    options.deadline = time.monotonic() + options.seconds
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(_work, (options, shapes), nprocs=options.ranks)
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        raise Failed(f"a process of --ranks failed: {error}") from None


def table(there):
    """Lines: for each layer and job the times, and the share of `alone`'s time of both passes."""
    lines, group = [], None
    for record in there:
        title = tuple(record.get(key) for key in ("device", "ranks", "dtype", "routing", "shape", "T", "d", "n", "E", "K"))
        if title != group:
            group, alone = title, None
            device, ranks, dtype, routing, shape, *sizes = title
            lines += ["", f"{shape} (T {sizes[0]}, d {sizes[1]}, n {sizes[2]}, E {sizes[3]}, K {sizes[4]}), {routing} routing, {dtype}, "
                      f"{ranks} x {device}", f"{'job':16}{'forward':>10}{'backward':>10}{'both ms':>10}{'share':>8}{'graph':>10}"
                      f"{'MB sent':>10}{'peak MB':>10}{'window MB':>11}"]  # fmt: skip
        if "failed" in record:
            lines.append(f"{record['peer']:16}failed: {record['failed']}")
            continue
        alone = record["both_ms"] if record["peer"] == "alone" else alone
        share = f"{alone / record['both_ms']:.2f}" if alone else "-"
        times = "".join(f"{record[key]:10.3f}" for key in ("forward_ms", "backward_ms", "both_ms"))
        graph = f"{record['graph_ms']:10.4f}" if "graph_ms" in record else f"{'-':>10}"
        sizes = "".join(f"{record[key] / 1e6:{width}.1f}" for key, width in
                        (("sent_bytes", 10), ("peak_bytes", 10), ("window_bytes", 11)))  # fmt: skip
        lines.append(f"{record['peer']:16}{times}{share:>8}{graph}{sizes}")
    return "\n".join(lines)
