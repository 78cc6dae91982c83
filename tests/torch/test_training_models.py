"""Small models of the kinds that people train: a language model with ragged texts, and a contrastive pair of encoders."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import microbatch.torch as mb

VOCABULARY = 64


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        b, t, w = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # Tied.

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def ragged(rows=16, longest=32):
    ids = torch.randint(0, VOCABULARY, (rows, longest))
    lengths = torch.linspace(2, longest, rows).long()[torch.randperm(rows)]
    labels = ids.masked_fill(torch.arange(longest) >= lengths[:, None], -100)
    labels[5] = -100  # A text without a label.
    return ids, labels


def token_loss(model, ids, labels):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def count(ids, labels):
    return (labels[:, 1:] != -100).sum()


def relative_error(grads, exact):
    difference = sum(((g.double() - e) ** 2).sum() for g, e in zip(grads, exact, strict=True))
    return math.sqrt(difference / sum((e**2).sum() for e in exact))


def test_N1_N15_a_language_model_is_as_accurate_as_its_whole_batch():
    model, (ids, labels) = GPT(), ragged()
    exact = copy.deepcopy(model).double()
    token_loss(exact, ids, labels).backward()
    wanted = [p.grad for p in exact.parameters()]

    losses = []

    def gradient(size, weight_fn=count):
        model.zero_grad()
        loss_fn = lambda ids, labels: token_loss(model, ids, labels)
        losses.append(mb.backward(loss_fn, ids, labels, microbatch_size=size, weight_fn=weight_fn))
        return [p.grad.clone() for p in model.parameters()]

    whole = relative_error(gradient(None), wanted)
    for size in (8, 3, 1):
        assert relative_error(gradient(size), wanted) <= 2 * whole + 1e-7
    torch.testing.assert_close(torch.stack(losses[1:]), losses[0].expand(3))
    # The mean of means, beside it: far off, and NaN where a microbatch has no label.
    assert relative_error(gradient(2, weight_fn=None), wanted) > 0.1
    gradient(1, weight_fn=None)
    assert losses[-1].isnan()


class Encoders(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        layers = lambda width: nn.Sequential(
            nn.Linear(width, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8)
        )
        self.left, self.right = layers(12), layers(10)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, left, right):
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


def contrastive(left, right, scale):
    logits = scale.exp() * left @ right.T
    target = torch.arange(len(left))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def test_N20_a_learned_temperature_is_counted_once():
    model, left, right = Encoders(0.0), torch.randn(24, 12), torch.randn(24, 10)
    exact = copy.deepcopy(model).double()
    contrastive(*exact.encode(left.double(), right.double()), exact.scale).backward()
    encode = mb.microbatch(model.encode, (0, 1), 4, mb.AccumulationType.CONCAT)
    contrastive(*encode(left, right), model.scale).backward()
    for p, e in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), e.grad, rtol=1e-5, atol=1e-7)


def test_N21_the_second_pass_replays_dropout():
    """The oracle keeps every microbatch's graph, so that there is one pass only."""
    model, left, right = Encoders(0.5), torch.randn(24, 12), torch.randn(24, 10)
    torch.manual_seed(7)
    parts = [model.encode(a, b) for a, b in zip(left.split(4), right.split(4))]
    contrastive(*(torch.cat(side) for side in zip(*parts)), model.scale).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    after = torch.get_rng_state()
    model.zero_grad()
    torch.manual_seed(7)
    encode = mb.microbatch(model.encode, (0, 1), 4, mb.AccumulationType.CONCAT)
    contrastive(*encode(left, right), model.scale).backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-7)
    assert torch.equal(torch.get_rng_state(), after)
