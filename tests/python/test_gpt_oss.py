"""gpt-oss stores its experts' weights transposed. smoe reads them through copies that live as long as a call, so what their owner
sees of a parameter never changes: neither its strides nor its address."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
import smoe.transformers  # noqa: E402
from models import error, step, tiny, tokens  # noqa: E402

WEIGHTS = ("gate_up_proj", "down_proj")


def expert_weights(model):
    return [getattr(layer.mlp.experts, name) for layer in model.model.layers for name in WEIGHTS]


def test_parameters_stay_as_they_are(tmp_path, calls):
    """What needs contiguous parameters or gradients works after forward, backward and inference."""
    from safetensors.torch import load_file, save_file

    model = tiny("gpt_oss")
    seen = lambda: [(p.data_ptr(), p.stride(), p._version) for p in model.parameters()]
    before, values = seen(), copy.deepcopy(model.state_dict())
    step(model, "smoe")
    with torch.inference_mode():
        model(input_ids=tokens())
    assert len(calls) == 4 and seen() == before
    assert all(p.grad.stride() == p.stride() for p in model.parameters())
    assert len(torch.nn.utils.parameters_to_vector(model.parameters())) == sum(p.grad.view(-1).numel() for p in model.parameters())
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(values[name], loaded[name]) for name in values)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    losses = []

    def again():
        optimizer.zero_grad()
        losses.append(model(input_ids=tokens(), labels=tokens()).loss)
        losses[-1].backward()
        return losses[-1]

    optimizer.step(again)
    assert losses[-1] < losses[0]


def test_copies_end_with_their_call(calls):
    """What a forward keeps for its backward of the experts' weights is the parameters' own memory."""
    model = tiny("gpt_oss")
    model.set_experts_implementation("smoe")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    shapes = [shape for weight in expert_weights(model) for shape in (weight.shape, weight.transpose(1, 2).shape)]
    found = {tensor.data_ptr() for tensor in kept if tensor.shape in shapes}
    assert len(calls) == 2 and found == {weight.data_ptr() for weight in expert_weights(model)}
    loss.backward()


def updates(first, second, optimizer, folder):
    """What two steps with `second` change, after two steps with `first` and a restart from saved states."""
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    for implementation in (first, second):
        model = tiny("gpt_oss", num_hidden_layers=1)
        states = make(model)
        if folder.exists():
            saved = torch.load(folder)
            model.load_state_dict(saved[0])
            states.load_state_dict(saved[1])
        before = copy.deepcopy(model.state_dict())
        model.set_experts_implementation(implementation)
        for _ in range(2):
            states.zero_grad()
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            states.step()
        torch.save((model.state_dict(), states.state_dict()), folder)
    folder.unlink()
    return torch.cat([(value - before[name]).flatten() for name, value in model.state_dict().items()])


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "plain"])
def test_a_run_resumes_with_another_implementation(optimizer, tmp_path):
    options = dict(foreach=False) if optimizer == "plain" else {optimizer: True}
    wanted = updates("eager", "eager", options, tmp_path / "states")
    for first, second in (("eager", "smoe"), ("smoe", "eager"), ("grouped_mm", "smoe"), ("smoe", "smoe")):
        found = updates(first, second, options, tmp_path / "states")
        assert error(found, wanted) < 1e-3, (first, second)


def test_writes_through_data_are_seen():
    """Such a write does not change the version of a tensor, so a copy kept from an earlier call would be used."""
    model, eager = tiny("gpt_oss"), tiny("gpt_oss")
    step(model, "smoe")
    for both in zip(expert_weights(model), expert_weights(eager)):
        for weight in both:
            weight.data.mul_(0.5)
    found, exact = step(model, "smoe"), step(eager, "eager")
    for name, value in exact.items():
        assert error(found[name], value) < 2e-5, name


@pytest.mark.parametrize("ids", [[[3, 1], [0, 3]], [[3, 8], [-1, 2]], [[5, 5], [5, 1]]])
def test_few_tokens_copy_their_experts_alone(ids, calls):
    """Without gradients the experts of few tokens alone are copied. Ids that a rank does not have, and an id that its token
    has twice, are skipped as ever."""
    experts = tiny("gpt_oss").model.layers[0].mlp.experts
    x, ids, weights = torch.randn(2, 32), torch.tensor(ids), torch.rand(2, 2)
    copied = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        gather = smoe.transformers._gather_experts
        patch.setattr(smoe.transformers, "_gather_experts", lambda *given: copied.append(1) or gather(*given))
        found = smoe.transformers.experts_forward(experts, x, ids, weights)
    wanted = smoe.transformers.experts_forward(experts, x, ids, weights)
    assert len(copied) == 1 and len(calls) == 2 and error(found, wanted) < 1e-6


def shard(rank, address, results):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from smoe._context import Context

    torch.set_num_threads(1)
    calls, forward = [], Context.forward
    Context.forward = lambda self, *fields: calls.append(1) or forward(self, *fields)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    found = {}
    for implementation in ("eager", "smoe"):
        model = tiny("gpt_oss")
        model.set_experts_implementation(implementation)  # on the class that fully_shard makes this has no effect
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            ids = tokens(seed=rank)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        found[implementation] = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert len(calls) == 4  # two layers, two steps
    torch.save(found, f"{results}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 needs a GPU")
def test_gradients_under_fsdp2_are_those_of_eager(tmp_path):
    torch.multiprocessing.spawn(shard, (tmp_path / "store", tmp_path / "result"), nprocs=2)
    found = torch.load(f"{tmp_path / 'result'}.0")
    for name, wanted in found["eager"].items():
        assert error(found["smoe"][name], wanted) < 1e-4, name


# ---- prepare(), by which a user asks for another layout ----


def test_prepare_keeps_the_values(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny("gpt_oss")
    before = copy.deepcopy(model.state_dict())
    weight = smoe.transformers.prepare(model).model.layers[0].mlp.experts.gate_up_proj
    address = weight.data_ptr()
    assert weight.transpose(1, 2).is_contiguous()
    plain = step(tiny("gpt_oss"), "smoe")
    assert all(torch.equal(value, plain[name]) for name, value in step(model, "smoe").items())
    after = model.state_dict()
    assert weight.data_ptr() == address and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="smoe")
    assert torch.equal(step(loaded, "smoe")["logits"], step(model, "smoe")["logits"])


@pytest.mark.parametrize("switch", ["before a step", "after a step"])
def test_training_goes_on_after_prepare(switch):
    """A fused optimizer on the CPU reads weights, gradients and states in memory order. All of them must change together."""
    found = {}
    for second in ("eager", "smoe"):
        model = tiny("gpt_oss")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for index, implementation in enumerate(["eager", second, second]):
            if implementation == "smoe" and index == 1:
                smoe.transformers.prepare(model, optimizer)
            model.set_experts_implementation(implementation)
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            if index > 0 or switch == "after a step":
                optimizer.step()
        found[second] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert error(found["smoe"], found["eager"]) < 1e-4


def test_prepare_in_inference_mode_leaves_weights_trainable():
    """The call changes the order of the weights. It must not make inference tensors of them, which no backward can use."""
    model, eager = tiny("gpt_oss"), tiny("gpt_oss")
    model.set_experts_implementation("smoe")
    with torch.inference_mode():
        smoe.transformers.prepare(model)(input_ids=tokens())
    found, exact = step(model, "smoe"), step(eager, "eager")
    for name, value in exact.items():
        assert error(found[name], value) < 1e-4, name


def test_a_model_made_in_inference_mode_runs_outside_of_it():
    """Its weights are inference tensors before and after their order changes, so a later call outside of this mode works."""
    with torch.inference_mode():
        model, eager = tiny("gpt_oss"), tiny("gpt_oss")
    model.set_experts_implementation("smoe")
    with torch.no_grad():
        for _ in range(2):
            assert error(model(input_ids=tokens()).logits, eager(input_ids=tokens()).logits) < 1e-5
            smoe.transformers.prepare(model)
