"""The mean of the first K gradients, in every front."""

import numpy as np
import pytest

from tests.laws.trees import assert_same_tree


@pytest.mark.parametrize(
    ("gradients", "steps", "expected"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], 2, [2.0, 3.0]),
        ([[1.0, 0.0], [3.0, 2.0], [100.0, 100.0]], 2, [2.0, 1.0]),
        ([[1.0, 0.0], [3.0, 2.0], [100.0, 100.0]], 1, [1.0, 0.0]),
        ([[[1.0], [2.0]], [[3.0], [6.0]]], 2, [[2.0], [4.0]]),
        ([1.0, 2.0, 6.0], 3, 3.0),
    ],
)
def test_the_textbooks_numbers(front, gradients, steps, expected):
    arrays = front.arrays([np.array(gradient) for gradient in gradients])
    result = front.results(front.module.gradient_accumulation(arrays, steps))
    assert_same_tree(result, np.array(expected), units_of_rounding=1)
    assert result.dtype == np.float32


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_later_gradients_are_ignored_and_trees_kept(front, steps):
    rng = np.random.default_rng(0)
    trees = [{"w": rng.normal(size=(2, 3)), "b": (rng.normal(size=3), None)} for _ in range(5)]
    for tree in trees[steps:]:
        tree["w"][:] = np.nan
    result = front.results(front.module.gradient_accumulation(front.arrays(trees), steps))
    mean = lambda pick: np.mean([pick(tree) for tree in trees[:steps]], axis=0)
    assert_same_tree(result, {"w": mean(lambda t: t["w"]), "b": (mean(lambda t: t["b"][0]), None)})


def test_one_step_is_the_first_gradient_itself(front):
    first, second = front.arrays([np.ones(3), np.zeros(3)])
    assert front.module.gradient_accumulation([first, second], 1) is first


def test_the_gradients_are_left_as_they_were(front):
    gradients = front.arrays([np.ones(3), np.zeros(3)])
    front.module.gradient_accumulation(gradients, 2)
    assert_same_tree(front.results(gradients), [np.ones(3), np.zeros(3)])


def test_half_precision_is_summed_in_float32(front):
    big = front.arrays(np.full(2, 60000.0, np.float16))
    result = front.results(front.module.gradient_accumulation([big] * 4, 4))
    assert result.dtype == np.float16
    assert result.tolist() == [60000.0, 60000.0]


def test_a_generator_of_gradients_will_do(front):
    gradients = (front.arrays(np.full(2, float(i))) for i in range(3))
    assert front.results(front.module.gradient_accumulation(gradients, 3)).tolist() == [1.0, 1.0]


def test_it_is_the_gradient_of_the_whole_batch(front):
    if front.value_and_grad is None:
        pytest.skip("NumPy has no derivatives")
    x = np.array([1.0, 2.0, 3.0, 4.0])
    gradient = lambda part: front.value_and_grad(lambda w, x: ((w * x) ** 2).mean())(
        *front.arrays((np.float64(1.0), part))
    )[1]
    result = front.module.gradient_accumulation([gradient(x[:2]), gradient(x[2:])], 2)
    assert float(result) == 15.0
