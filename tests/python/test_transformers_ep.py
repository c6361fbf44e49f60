"""DistributedConfig(ep_implementation="smoe") on 2 and 4 gloo processes: the losses and all gradients of tiny models equal
those of eager experts in one process with all tokens."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

if not hasattr(transformers, "__version__") or tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    pytest.skip("needs transformers 5.23", allow_module_level=True)

import models
import smoe
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

NAMES = ("olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss")
SEED = dict(seed=4)


def batch(part, length=16):
    return models.tokens(rows=1 + part, length=length, seed=part).to(torch.get_default_device())


def run(model, parts):
    """The loss of each part, and the gradients of their mean."""
    model.train()
    model.zero_grad()
    losses = [model(input_ids=ids, labels=ids).loss for ids in map(batch, parts)]
    (sum(losses) / len(losses)).backward()
    whole = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], found


def cases(ranks):
    """A name, the model, experts_implementation, and the configuration."""
    for name in NAMES:
        yield name, "eager", dict(fsdp_size=ranks, ep_size=ranks, ep_implementation="smoe")
    yield "qwen3_moe", "smoe", dict(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    if ranks == 4:  # two nodes, and a batch that two ranks share
        yield "olmoe", "eager", dict(fsdp_size=4, ep_size=2, ep_implementation="smoe")
        yield "olmoe", "eager", dict(fsdp_size=2, tp_size=2, ep_size=4, ep_implementation="smoe")
    else:
        yield "olmoe", "eager", dict(tp_size=2, ep_size=2, ep_implementation="smoe")


def results(rank, ranks, folder):
    """A name, the configuration, the part of the batch, its loss and the gradients of every case. With two ranks also
    logits."""
    found, calls, experts = [], [], smoe.ep.experts
    smoe.ep.experts = lambda *given, **options: calls.append(1) or experts(*given, **options)
    for name, implementation, config in cases(ranks):
        config = DistributedConfig(**config)
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/{name}", dtype=torch.get_default_dtype(), experts_implementation=implementation,
            distributed_config=config,
        ).to(torch.get_default_device())
        part = rank // config.tp_size
        before = len(calls)
        early = model(input_ids=batch(part, 4), labels=batch(part, 4)).loss if not found else None
        losses, gradients = run(model, [part])  # the windows have grown, and those of the first call are still there
        if early is not None:
            early.backward()
        assert (len(calls) > before) == (config.ep_implementation == "smoe"), (name, config)
        found.append((name, config.to_dict(), part, losses[0], gradients))
    if ranks == 2:  # without gradients the ranks run their experts on the same batch
        with torch.no_grad():
            found.append(model(input_ids=batch(0)).logits)
    return found


def work(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(results(rank, ranks, folder), f"{folder}/{rank}")
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_results_of_eager(ranks, tmp_path):
    references = {}
    for name in NAMES:
        model = models.tiny(name, **SEED)
        model.save_pretrained(tmp_path / name)
        references[name] = model
    mp.spawn(work, (ranks, tmp_path), nprocs=ranks)
    for rank in range(ranks):
        found = torch.load(tmp_path / str(rank))
        if ranks == 2:
            torch.testing.assert_close(found.pop(), references["olmoe"](input_ids=batch(0)).logits, rtol=1e-4, atol=1e-4)
        for name, config, part, loss, gradients in found:
            losses, exact = run(references[name], range(config["fsdp_size"]))
            assert loss == pytest.approx(losses[part], rel=1e-5), (name, config)
            assert gradients.keys() == exact.keys()
            for parameter, gradient in gradients.items():
                assert models.error(gradient, exact[parameter]) < 1e-5, (name, config, parameter)


def test_an_older_transformers_is_refused():
    code = "import transformers; transformers.__version__ = '5.22.1'; import smoe.transformers; smoe.transformers.SmoeEP"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "expert parallelism needs transformers 5.23 or later, this is 5.22.1" in done.stderr, done.stderr
