"""The textbook exercises: their numbers, their refusals, and the checking of a learner's solution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from microbatch.lessons import LESSONS, check, load
from microbatch.lessons._bars import bars
from microbatch.lessons._exercise import Refused
from microbatch.lessons.mean import gradient_accumulation
from microbatch.lessons.scan import microbatched_grads
from microbatch.lessons.torch import accumulated_loss, without_zero_grad

X = jnp.array([1.0, 2.0, 3.0, 4.0])
ZEROS = jnp.zeros(4)


class TestScan:
    def test_numbers_of_the_lesson(self):
        assert float(microbatched_grads(1.0, 0.0, X, ZEROS, 2.0)) == 60.0
        assert float(microbatched_grads(1.0, 0.0, X[:2], ZEROS[:2], 1)) == 10.0
        assert float(microbatched_grads(1.0, 0.0, X[2:], ZEROS[2:], 1)) == 50.0

    @pytest.mark.parametrize("count", [1, 2, 4, 2.0, np.float32(4.0), np.int64(2)])
    def test_any_count_gives_the_whole_batch(self, count):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(2, 8)).astype(np.float32)
        exact = np.sum(2 * x.astype(float) * (0.7 * x.astype(float) - y))
        got = microbatched_grads(0.7, 3.0, jnp.asarray(x), jnp.asarray(y), count)
        assert got.shape == ()
        np.testing.assert_allclose(got, exact, rtol=1e-5)

    def test_under_jit_with_a_static_count(self):
        jitted = jax.jit(microbatched_grads, static_argnames="n_microbatches")
        assert float(jitted(1.0, 0.0, X, ZEROS, n_microbatches=2.0)) == 60.0

    def test_a_traced_count_is_refused_with_the_way_out(self):
        with pytest.raises(TypeError, match="static_argnames"):
            jax.jit(microbatched_grads)(1.0, 0.0, X, ZEROS, 2.0)

    @pytest.mark.parametrize("count", [2.5, 0.0, -2.0, 3.0, 8.0, float("nan"), float("inf")])
    def test_a_count_that_cannot_be_is_refused(self, count):
        with pytest.raises(ValueError):
            microbatched_grads(1.0, 0.0, X, ZEROS, count)

    def test_other_dtypes_and_shapes_are_refused(self):
        with pytest.raises(TypeError, match="int32"):
            microbatched_grads(1.0, 0.0, jnp.arange(4), jnp.arange(4), 2.0)
        with pytest.raises(TypeError, match="float16"):
            microbatched_grads(1.0, 0.0, X, ZEROS.astype(jnp.float16), 2.0)
        with pytest.raises(ValueError, match="reshape"):
            microbatched_grads(1.0, 0.0, X[:, None], ZEROS[:, None], 2.0)

    def test_b_is_unused(self):
        assert float(microbatched_grads(1.0, 1e9, X, ZEROS, 2.0)) == 60.0

    def test_picture(self):
        lines = load("scan").picture()
        for wanted in (("part 1", "10"), ("part 2", "50"), ("total", "60")):
            assert any(
                line.split() and line.startswith(wanted[0]) and line.endswith(wanted[1])
                for line in lines
            )
        assert any(line.startswith("mean of 4 rows") and line.endswith("15") for line in lines)
        assert any(line.startswith("sum of 2 means") and line.endswith("30") for line in lines)


class TestMean:
    def test_numbers_of_the_lesson(self):
        a, b, c = np.array([1.0, 0.0]), np.array([3.0, 2.0]), np.array([100.0, 100.0])
        np.testing.assert_array_equal(gradient_accumulation([a, b, c], 2), [2.0, 1.0])
        np.testing.assert_array_equal(gradient_accumulation([a, b, c], 1), a)

    def test_picture(self):
        text = "\n".join(load("mean").picture())
        assert "K=2 gives [2, 1]" in text
        assert "[1, 2] and [3, 4] with K=2 give [2, 3]" in text
        assert "The same with PyTorch tensors: [2, 3]" in text


class TestTorch:
    def test_numbers_of_the_lesson(self):
        assert without_zero_grad() == pytest.approx((-5.0, -23.0), abs=5e-5)

    def test_picture(self):
        text = "\n".join(load("torch").picture())
        assert "-5.0000" in text and "-23.0000" in text
        assert text.count("4.0989") == 2
        assert "largest difference         0.00000000" in text
        mistake = next(
            line for line in text.splitlines() if line.startswith("a step per microbatch")
        )
        assert float(mistake.split()[-1]) > 0.1
        normed = next(line for line in text.splitlines() if line.startswith("batch norm"))
        assert float(normed.split()[-1]) > 1e-4

    def test_equals_the_ordinary_step(self):
        model = nn.Linear(3, 1)
        x, y = torch.randn(12, 3), torch.randn(12, 1)
        nn.functional.mse_loss(model(x), y).backward()
        whole = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        accumulated_loss(model, x, y, 4)
        for p, right in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(p.grad, right)

    def test_unequal_parts_and_integers_are_refused(self):
        model = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="divide"):
            accumulated_loss(model, torch.ones(4, 1), torch.ones(4, 1), 3)
        with pytest.raises(TypeError, match="int64"):
            accumulated_loss(model, torch.ones(4, 1).long(), torch.ones(4, 1).long(), 2)

    def test_leaves_the_random_state_alone(self):
        before = torch.get_rng_state()
        load("torch").picture()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", LESSONS)
class TestExercises:
    def test_the_solution_passes_its_own_check(self, name):
        lesson = load(name)
        outcomes = check(lesson.EXERCISE, getattr(lesson, lesson.EXERCISE.function))
        assert [(o.case.name, o.came) for o in outcomes if not o.passed] == []
        assert len(outcomes) == 6

    def test_a_wrong_solution_fails_every_case(self, name):
        outcomes = check(load(name).EXERCISE, lambda *args: None)
        assert not any(o.passed for o in outcomes)
        assert all(o.hint == o.case.hints[0] for o in outcomes)

    def test_hints_come_one_after_another_and_the_last_one_stays(self, name):
        exercise = load(name).EXERCISE
        for seen, index in ((0, 0), (1, 1), (2, 2), (7, 2)):
            outcomes = check(exercise, lambda *args: None, {c.name: seen for c in exercise.cases})
            assert [o.hint for o in outcomes] == [c.hints[index] for c in exercise.cases]

    def test_refusing_everything_passes_only_what_must_be_refused(self, name):
        def refuse(*args):
            raise ValueError("no")

        outcomes = check(load(name).EXERCISE, refuse)
        assert [o.passed for o in outcomes] == [isinstance(o.case.right, Refused) for o in outcomes]

    def test_hints_are_three_different_sentences(self, name):
        for case in load(name).EXERCISE.cases:
            assert len(set(case.hints)) == 3


def common_mistakes():
    """Solutions that learners hand in, and the cases that must catch them."""

    def sum_instead_of_mean(gradients, steps):
        return sum(gradients[:steps])

    def all_of_them(gradients, steps):
        return sum(gradients) / len(gradients)

    def surplus_in_the_sum(gradients, steps):
        return sum(gradients) / steps

    def mean_of_means(w, b, x, y, n):
        parts = zip(jnp.split(x, int(n)), jnp.split(y, int(n)), strict=True)
        return sum(jax.grad(lambda w: jnp.mean((w * p - q) ** 2))(w) for p, q in parts)

    def without_scale(model, x, y, n):
        loss = 0
        for p, q in zip(x.chunk(n), y.chunk(n), strict=True):
            part = nn.functional.mse_loss(model(p), q)
            part.backward()
            loss += part.detach()
        return loss

    def with_zero_grad(model, x, y, n):
        model.zero_grad()
        return accumulated_loss(model, x, y, n)

    return [
        ("mean", sum_instead_of_mean, "the mean against the sum"),
        ("mean", all_of_them, "surplus gradients"),
        ("mean", surplus_in_the_sum, "surplus gradients"),
        ("scan", mean_of_means, "typical"),
        ("torch", without_scale, "the mean against the sum"),
        ("torch", with_zero_grad, "a gradient from before"),
    ]


@pytest.mark.parametrize(("name", "mistake", "caught_by"), common_mistakes())
def test_common_mistakes_are_caught(name, mistake, caught_by):
    outcomes = check(load(name).EXERCISE, mistake)
    assert caught_by in [o.case.name for o in outcomes if not o.passed]


def test_bars_of_edges():
    assert bars([]) == []
    assert bars([("zero", 0.0)]) == ["zero" + " " * 34 + "0"]
    assert all("nan" in line for line in bars([("x", float("nan"))]))
