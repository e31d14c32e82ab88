"""The dense forward: visibility, selection, gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from latentkv.layout import KVLayout
from latentkv.model import dense
from latentkv.model.config import ModelConfig
from latentkv.model.weights import Weights


def run(config: ModelConfig, weights: Weights, tokens: torch.Tensor, **options) -> dense.DenseOutput:
    with torch.no_grad():
        return dense.forward(config, weights, tokens, dense.DenseOptions(**options))


def test_logits_depend_on_no_later_token(config: ModelConfig, weights: Weights, tokens: torch.Tensor):
    other = tokens[:300].clone()
    other[200:] = 1
    a, b = (run(config, weights, t[None]).logits[0] for t in (tokens[:300], other))
    assert torch.equal(a[:200], b[:200])
    assert not torch.equal(a[200], b[200])


def test_padding_to_whole_blocks_changes_nothing(config: ModelConfig, weights: Weights, tokens: torch.Tensor):
    long, short = (run(config, weights, tokens[None, :n]).logits[0] for n in (256, 131))
    assert torch.equal(long[:131], short)


def test_window_layer_sees_exactly_128_tokens(config: ModelConfig, tokens: torch.Tensor):
    # one window-only layer: token 0 reaches position 127 and not 128
    from latentkv.model.weights import init_weights

    only = dataclasses.replace(
        config, ratios=(0,), kv_source_layers=(), index_source_layers=(), candidate_source_layer=-1
    )
    weights = init_weights(only, seed=3)
    other = tokens[:256].clone()
    other[0] = (other[0] + 1) % 256
    a, b = (run(only, weights, t[None]).logits[0] for t in (tokens[:256], other))
    changed = (a != b).any(-1)
    assert bool(changed[127])
    assert not bool(changed[128:].any())


def test_compressed_rows_are_visible_once_their_last_token_has_passed():
    run_ = dense._Run(ModelConfig(), {}, dense.DenseOptions(), batch=1, length=128, device=torch.device("cpu"))
    for ratio in (1, 2):
        visible = run_.visible(ratio)
        for t in range(128):
            assert visible[t].nonzero().flatten().tolist() == [
                j for j in range(128 // ratio) if (j + 1) * ratio - 1 <= t
            ]


def test_selection_takes_k_rows_or_all_that_are_visible(config: ModelConfig, weights: Weights, tokens: torch.Tensor):
    out = run(config, weights, tokens[None, :300])
    for layer, ratio in ((1, 2), (3, 1), (5, 1)):
        counts = out.selections[layer][0].sum(-1)
        expected = torch.tensor([min((t + 1) // ratio, config.index_topk) for t in range(300)])
        assert torch.equal(counts, expected)


def test_reindex_layer_stays_inside_the_candidates(config: ModelConfig, weights: Weights, tokens: torch.Tensor):
    out = run(config, weights, tokens[None, :300])
    assert out.candidates is not None
    assert not bool((out.selections[5] & ~out.candidates).any())
    blocks = out.candidates[0].unflatten(-1, (-1, 8)).any(-1).sum(-1)
    assert int(blocks.max()) == config.candidate_blocks
    newest = torch.arange(300) // 8
    assert bool(out.candidates[0, torch.arange(300), newest * 8].all())  # the newest block is kept
    assert not torch.equal(out.selections[5], out.selections[3])


def test_short_context_needs_no_indexer(config: ModelConfig, weights: Weights, tokens: torch.Tensor):
    short = tokens[None, : config.index_topk]
    scrambled = {n: torch.flip(w, [0]) if ".index." in n else w for n, w in weights.items()}
    assert torch.equal(run(config, weights, short).logits, run(config, scrambled, short).logits)
    longer = tokens[None, :100]
    assert not torch.equal(run(config, weights, longer).logits, run(config, scrambled, longer).logits)


def test_ties_go_to_the_lower_index_when_exact():
    logits, allowed = torch.zeros(1, 6), torch.tensor([[True, True, False, True, True, True]])
    assert dense.select(logits, allowed, 2, exact=True).tolist() == [[True, True, False, False, False, False]]
    assert dense.select(logits, allowed, 2, exact=False).sum() == 5


def test_candidate_blocks_are_those_of_the_largest_logits():
    logits = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    lengths = [48, 33, 8, 0]
    visible = torch.arange(48) < torch.tensor(lengths)[:, None]
    kept = dense.candidate_blocks(logits, visible, 2, 8)
    for row, length in enumerate(lengths):
        blocks = range(-(-length // 8))
        best = sorted(blocks, key=lambda b: -float(logits[row, 8 * b : min(8 * b + 8, length)].max()))
        keep = {len(blocks) - 1} | set([b for b in best if b != len(blocks) - 1][:1]) if length else set()
        assert kept[row].nonzero().flatten().tolist() == [j for j in range(length) if j // 8 in keep]


def test_joint_softmax_matches_autograd_of_the_plain_formula():
    g = torch.Generator().manual_seed(1)
    near, far, sink = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 2, 4), (3, 2, 5), (2,)))
    near_mask, far_mask = torch.rand(3, 4, generator=g) > 0.3, torch.rand(3, 5, generator=g) > 0.3
    grad = torch.randn(3, 2, 9, generator=g, dtype=torch.float64)
    plain = [t.clone().requires_grad_() for t in (near, far, sink)]
    scores = torch.cat((plain[0], plain[1]), -1) * 0.5
    scores = scores.masked_fill(~torch.cat((near_mask, far_mask), -1).unsqueeze(1), -torch.inf)
    p = scores.exp() / (scores.exp().sum(-1, keepdim=True) + plain[2].exp()[None, :, None])
    (p * grad).sum().backward()
    ours = [t.float().requires_grad_() for t in (near, far, sink)]
    p_near, p_far = dense._JointSoftmax.apply(ours[0], ours[1], near_mask, far_mask, ours[2], 0.5)
    assert torch.allclose(torch.cat((p_near, p_far), -1).double(), p, atol=1e-6)
    ((p_near.float() * grad[..., :4].float()).sum() + (p_far.float() * grad[..., 4:].float()).sum()).backward()
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a.grad.double(), b.grad, atol=1e-5)


def test_fake_quantization_is_what_pages_give_back():
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(2))
    assert torch.equal(dense.fake_quant(x, KVLayout.BF16, compressed=True), x)
    v4 = dense.fake_quant(x, KVLayout.V4, compressed=False)
    assert torch.equal(v4[:, 448:], x[:, 448:])
    error = {
        name: float((dense.fake_quant(x, KVLayout.parse(name), compressed=False) - x).std())
        for name in ("v41", "v41_fp4", "v41_mxfp4")
    }
    assert error["v41"] < 0.04 < 0.08 < error["v41_fp4"] < error["v41_mxfp4"]


def test_straight_through_passes_the_quantized_value_and_the_plain_gradient():
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    y = dense._straight_through(x, lambda v: dense.fake_quant(v, KVLayout.V41_FP4, compressed=True))
    assert torch.equal(y, dense.fake_quant(x.detach().float(), KVLayout.V41_FP4, compressed=True).bfloat16())
    y.float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.fixture(scope="module")
def gradients(config: ModelConfig, weights: Weights, tokens: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    trained = {n: w.float().requires_grad_(not n.endswith("router_bias")) for n, w in weights.items()}
    out = dense.forward(config, trained, tokens[None, :256], dense.DenseOptions(math=torch.float32, index_loss=True))
    names = [n for n, w in trained.items() if w.requires_grad]
    result = {}
    for key, loss in (("text", out.logits.square().mean()), ("index", out.index_loss)):
        grads = torch.autograd.grad(loss, [trained[n] for n in names], retain_graph=True, allow_unused=True)
        result[key] = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
    return result


def test_indexer_learns_from_its_own_loss_only(gradients: dict[str, dict[str, torch.Tensor]]):
    indexer = set(gradients["index"])
    assert indexer == {f"layers.{i}.index.{n}" for i in (1, 3) for n in ("wk", "k_norm", "wq_b", "head_weights")} | {
        f"layers.5.index.{n}" for n in ("wq_b", "head_weights")
    }
    assert all(float(g.abs().max()) > 0 for g in gradients["index"].values())
    assert not any(".index." in n for n in gradients["text"])


def test_text_loss_reaches_every_other_weight(config: ModelConfig, gradients: dict[str, dict[str, torch.Tensor]]):
    from latentkv.model.weights import weight_shapes

    missing = {n for n in weight_shapes(config) if ".index." not in n and "router_bias" not in n} - set(
        gradients["text"]
    )
    # the last sublayer's mixing of streams is handed on, so all of it but nothing else may be unused
    assert not missing
    assert all(float(g.abs().max()) > 0 for g in gradients["text"].values())
