"""rounding_by_expert.py on a tiny checkpoint with random weights. The losses are those of the same model whose
MoE layers are smoe.moe with the rounding rule, and the counts are the library's."""

import array
import struct
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import OlmoeConfig, OlmoeForCausalLM  # noqa: E402
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock  # noqa: E402

import smoe  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rounding_by_expert as tool  # noqa: E402

TILE, SEQUENCES, CONTEXT, EXPERTS, K = 8, 2, 24, 8, 2


def make(folder, renormalize):
    torch.manual_seed(3)
    sizes = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=256)
    model = OlmoeForCausalLM(
        OlmoeConfig(
            **sizes,
            num_experts=EXPERTS,
            num_experts_per_tok=K,
            norm_topk_prob=renormalize,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,  # so large that pairs and their order change the loss
        )
    )
    model.save_pretrained(folder / "checkpoint")
    data = torch.randint(256, (20 * CONTEXT + 1,)).tolist()
    header = struct.pack("<3i", 20240520, 1, len(data)).ljust(1024, b"\0")
    (folder / "val_000.bin").write_bytes(header + array.array("H", data).tobytes())
    return str(folder / "checkpoint"), str(folder / "val_000.bin")


@pytest.mark.parametrize(("rule", "renormalize"), [("nr-f", False), ("nr-f", True), ("up", False), ("down", False)])
def test_losses_and_counts_are_those_of_the_library(tmp_path, monkeypatch, rule, renormalize):
    checkpoint, path = make(tmp_path, renormalize)
    passes = tool.read_passes(path, CONTEXT, SEQUENCES)
    assert passes.shape == (10, SEQUENCES, CONTEXT + 1)
    experts = tool.Experts(checkpoint, rule, TILE)
    rounded = experts.loss(passes, lambda layer, selected, rounded: rounded)
    plain = experts.loss(passes)
    counts = []

    def forward(self, x):
        made = smoe.moe(
            x.flatten(0, 1), self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj, top_k=K,
            norm_topk_prob=renormalize, rounding=rounding, tile=TILE, counts=True,
        )  # fmt: skip
        counts.append(made.counts)
        return made.out.view_as(x)

    monkeypatch.setattr(OlmoeSparseMoeBlock, "forward", forward)
    model = OlmoeForCausalLM.from_pretrained(checkpoint)
    for rounding, loss in ((rule.replace("-", "_"), rounded), ("none", plain)):
        counts.clear()
        with torch.no_grad():
            losses = [
                cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()) for tokens in passes
            ]
        assert torch.stack(losses).mean().item() == pytest.approx(loss, rel=1e-6)
    assert abs(rounded - plain) > 1e-4
    # now `counts` are those of plain top-K, for layers 0 and 1 of each pass in turn
    count = torch.stack(counts).view(len(passes), 2, EXPERTS)
    assert torch.equal(experts.sums["pairs"], count.sum(0).double())
    low = count % TILE
    up = {"nr-f": 2 * low > TILE, "up": low > 0, "down": low < 0}[rule]  # 48 tokens: the upper multiple always exists
    assert torch.equal(experts.sums["added"], (TILE - low).where(up, 0).sum(0).double())
    assert torch.equal(experts.sums["dropped"], low.where(~up, 0).sum(0).double())
    assert torch.equal(experts.sums["emptied"], ((count > 0) & (count < TILE) & ~up).sum(0).double())
    assert torch.equal(experts.sums["dropped weight"] > 0, experts.sums["dropped"] > 0)


def test_a_tile_above_the_tokens_drops_all_pairs(tmp_path):
    checkpoint, path = make(tmp_path, False)
    experts = tool.Experts(checkpoint, "up", SEQUENCES * CONTEXT + 1)
    passes = tool.read_passes(path, CONTEXT, SEQUENCES)[:3]
    experts.loss(passes)
    found = tool.shares(experts.sums, passes, TILE)
    whole = ("dropped %", "dropped weight %", "tokens without expert %", "their weight %")
    assert found["added %"] == "0.0" and {found[name] for name in whole} == {"100.0"}


def test_a_count_is_never_rounded_above_the_tokens():
    scores = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6], [0.6, 0.4], [0.45, 0.55]])
    selected = tool.top_k(scores, 1)
    assert selected.sum(0).tolist() == [4, 2]
    # 4 of 6 tokens, tile 4: kept. 2 of 6: up to 4 adds the tokens with the best scores, down leaves none.
    assert tool.round_pairs(scores, selected, "up", 4)[:, 1].tolist() == [False, False, True, True, True, True]
    assert tool.round_pairs(scores, selected, "nr-f", 4).sum(0).tolist() == [4, 0]  # half a tile goes down
    assert tool.round_pairs(scores, selected, "up", 3).sum(0).tolist() == [6, 3]
    assert tool.round_pairs(scores, selected, "up", 5).sum(0).tolist() == [5, 5]
    assert tool.round_pairs(scores, selected, "up", 7).sum(0).tolist() == [0, 0]  # 7 tokens do not exist


def test_the_tables_have_the_shares_of_the_sums(tmp_path, monkeypatch, capsys):
    pairs = torch.tensor([[10.0, 40, 20, 30], [8, 2, 4, 6]], dtype=torch.float64)
    sums = {name: torch.zeros_like(pairs) for name in tool.SUMS} | {"pairs": pairs, "weight": pairs / 4}
    sums["dropped"] = torch.tensor([[6.0, 4, 10, 3], [0, 1, 0, 3]], dtype=torch.float64)
    passes = torch.zeros(2, SEQUENCES, 16)
    found = tool.shares(sums, passes, tile=16)
    assert found["dropped %"] == "22.5" and found["losing experts %"] == "12.5"  # 27 of 120; one expert of eight
    assert found["their weight %"] == "8.3" and found["mean < M/2 %"] == "62.5"  # 10 of 120; counts below 16
    assert found["busiest"] == "1.60"
    rows, masks = tool.by_quarter(sums, 2)
    assert [row["mean count"] for row in rows] == ["3.0", "6.0", "9.0", "12.0"]
    assert [row["dropped %"] for row in rows] == ["58.3", "41.7", "16.7", "8.3"]
    assert masks[0].tolist() == [[True, False, False, False], [False, True, False, False]]

    checkpoint, path = make(tmp_path, False)
    command = [f"--tile={TILE}", "--passes=3", "--losses", path, checkpoint]
    monkeypatch.setattr(sys, "argv", ["rounding_by_expert.py", *command])
    assert tool.main() == 0
    text = capsys.readouterr().out
    assert text.count("by popularity") == 1 and "without those of quarter 4" in text and "3 passes" in text
