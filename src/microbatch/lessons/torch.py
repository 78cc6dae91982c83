"""Lesson 3, PyTorch: `.grad` accumulates, so a step on all rows can be made a few rows at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from microbatch.lessons._bars import bars
from microbatch.lessons._exercise import Case, Exercise, Refused
from microbatch.torch import backward


def accumulated_loss(model: nn.Module, x: Tensor, y: Tensor, num_microbatches: int) -> Tensor:
    """The mean squared error over all rows, its gradient left in ``.grad``, in equal parts.

    Equivalent to::

        loss = 0
        for x_part, y_part in zip(x.chunk(n), y.chunk(n)):
            part = mse_loss(model(x_part), y_part) / n
            part.backward()
            loss += part.detach()

    Args:
      model: a module that treats rows one by one.
      x: inputs, ``[B, ...]``, floating point.
      y: targets, ``[B, ...]``, of the model's output shape.
      num_microbatches: how many parts, a divisor of B.

    Raises:
      ValueError: the parts would not be equal.
      TypeError: the arrays are not floating point.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> accumulated_loss(model, x, 2 * x, 2).item(), model.weight.grad.item()
    (2.5, -5.0)
    """
    if not (x.is_floating_point() and y.is_floating_point()):
        raise TypeError(
            f"accumulated_loss: x is {x.dtype} and y {y.dtype}; both must be floating point.\n"
            "Convert them first, for example with .float()."
        )
    if num_microbatches < 1 or len(x) % num_microbatches:
        raise ValueError(
            f"accumulated_loss: num_microbatches={num_microbatches} does not divide {len(x)} rows.\n"
            "Use a divisor, so that the parts are equal."
        )
    return backward(_loss_of(model), x, y, microbatch_size=len(x) // num_microbatches)


def picture() -> list[str]:
    """The lesson's numbers as lines of text."""
    after_first, after_both = without_zero_grad()
    whole_loss, whole = _step(_model, lambda m, x, y: accumulated_loss(m, x, y, 1))
    parts_loss, parts = _step(_model, lambda m, x, y: accumulated_loss(m, x, y, 4))
    _, mistaken = _step_per_microbatch()
    _, normed = _step(_with_batch_norm, _in_one)
    _, normed_parts = _step(_with_batch_norm, _in_four)
    return [
        "A weight of 1 and rows y = 2x: first x = [1, 2], then x = [3], without zero_grad between",
        "",
        *bars([("after x = [1, 2]", after_first), ("after x = [3]", after_both)], digits=4),
        "",
        "32 rows, SGD with 0.1: one step on all of them, and on four microbatches of 8, scaled by 1/4",
        "",
        f"  loss on all rows           {whole_loss:.4f}",
        f"  loss in four microbatches  {parts_loss:.4f}",
        f"  largest difference         {_distance(whole, parts):.8f}",
        "",
        "Largest parameter difference from the step on all rows:",
        "",
        *bars(
            [
                ("four microbatches, one step", _distance(whole, parts)),
                ("a step per microbatch", _distance(whole, mistaken)),
                ("batch normalisation", _distance(normed, normed_parts)),
            ],
            digits=8,
            width=20,
        ),
        "",
        "A step per microbatch (zero_grad and step inside the loop) is four steps, not one.",
        "Batch normalisation looks at the rows of one microbatch, so four of them are not one batch;",
        "microbatch.torch refuses such a module unless it is told to allow it.",
    ]


def without_zero_grad() -> tuple[float, float]:
    """The weight's gradient after one backward pass, and after a second one that adds to it."""
    model = _of_ones(1)
    seen = []
    for x in (torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])):
        accumulated_loss(model, x, 2 * x, num_microbatches=len(x))
        assert model.weight.grad is not None
        seen.append(model.weight.grad.item())
    return seen[0], seen[1]


def rows() -> tuple[Tensor, Tensor]:
    """32 rows of the rule (2, −1, 0.5) plus 0.3, with noise of 0.1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, generator=generator)
    noise = 0.1 * torch.randn(32, 1, generator=generator)
    return x, (x @ torch.tensor([2.0, -1.0, 0.5]))[:, None] + 0.3 + noise


def _loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: nn.functional.mse_loss(model(x), y)


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Linear(3, 1)


def _of_ones(features: int) -> nn.Linear:
    """A linear model whose weights are 1; the caller's random numbers stay where they were."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(features, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def _with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), _model())


def _step(
    make: Callable[[], nn.Module], run: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> tuple[float, Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = run(model, *rows())
    optimizer.step()
    return loss.item(), _flat(model)


def _step_per_microbatch() -> tuple[float, Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for x, y in zip(*(tensor.chunk(4) for tensor in rows()), strict=True):
        optimizer.zero_grad()
        loss = _loss_of(model)(x, y)
        loss.backward()
        optimizer.step()
    return loss.item(), _flat(model)


def _in_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = _loss_of(model)(x, y)
    loss.backward()
    return loss.detach()


def _in_four(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return backward(_loss_of(model), x, y, microbatch_size=8, allow_row_mixing=True)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _cases() -> tuple[Case, ...]:
    def run(x: object, y: object, parts: int, twice: bool = False) -> Callable:
        def call(function: Callable) -> tuple[Tensor, Tensor]:
            model = _of_ones(torch.as_tensor(x).shape[-1])
            loss = torch.zeros(())
            for _ in range(1 + twice):
                loss = function(model, torch.as_tensor(x), torch.as_tensor(y), parts)
            if model.weight.grad is None:
                raise RuntimeError("the model's .grad is None: nothing called backward()")
            return torch.as_tensor(loss).detach(), model.weight.grad.reshape(-1)

        return call

    column = [[1.0], [2.0], [3.0], [4.0]]
    double = [[2.0], [4.0], [6.0], [8.0]]
    return (
        Case(
            "typical",
            "accumulated_loss(model, [1, 2, 3, 4], [2, 4, 6, 8], 2)",
            run(column, double, 2),
            (torch.tensor(7.5), torch.tensor([-15.0])),
            (
                "Call backward() on each part; .grad adds up by itself.",
                "Two parts give −5 and −25 as means; the whole batch's mean is their mean, −15.",
                "(mse_loss(model(x_part), y_part) / num_microbatches).backward()",
            ),
        ),
        Case(
            "one part",
            "accumulated_loss(model, [1, 2, 3, 4], [2, 4, 6, 8], 1)",
            run(column, double, 1),
            (torch.tensor(7.5), torch.tensor([-15.0])),
            (
                "One part is the ordinary step.",
                "The answer must not depend on the number of parts.",
                "With one part, the scale is 1/1.",
            ),
        ),
        Case(
            "a gradient from before",
            "accumulated_loss(...) twice, without zero_grad",
            run(column, double, 2, twice=True),
            (torch.tensor(7.5), torch.tensor([-30.0])),
            (
                "backward() adds to .grad, and so must you.",
                "zero_grad belongs to the caller, once per optimizer step.",
                "Remove zero_grad() from the function.",
            ),
        ),
        Case(
            "rows of two numbers",
            "accumulated_loss(model, [[1, 2], [3, 4]], [[0], [0]], 2)",
            run([[1.0, 2.0], [3.0, 4.0]], [[0.0], [0.0]], 2),
            (torch.tensor(29.0), torch.tensor([24.0, 34.0])),
            (
                "Split along the first axis only; the others belong to a row.",
                "x.chunk(n) splits along axis 0; x.view(n, -1) would mix a row's numbers.",
                "for x_part, y_part in zip(x.chunk(n), y.chunk(n))",
            ),
        ),
        Case(
            "the mean against the sum",
            "accumulated_loss(model, [1, 2, 3, 4], [0, 0, 0, 0], 4)",
            run(column, [[0.0]] * 4, 4),
            (torch.tensor(7.5), torch.tensor([15.0])),
            (
                "If the loss is 30 and the gradient 60, the parts' means were added, not averaged.",
                "Scale each part by 1/num_microbatches, before backward().",
                "Return the sum of the scaled, detached parts.",
            ),
        ),
        Case(
            "a wrong dtype",
            "accumulated_loss(model, int64 tensor, int64 tensor, 2)",
            run([[1], [2]], [[2], [4]], 2),
            Refused(),
            (
                "Integer tensors have no gradient and a Linear layer cannot take them.",
                "A RuntimeError from deep inside helps nobody; refuse first, and say which dtype came.",
                "if not x.is_floating_point(): raise TypeError(...)",
            ),
        ),
    )


EXERCISE = Exercise(
    function="accumulated_loss",
    task="accumulated_loss(model, x, y, num_microbatches): the loss over all rows, its gradient in .grad, in equal parts",
    cases=_cases(),
)
