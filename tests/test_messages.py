"""What is refused, in which words: every line, in every front."""

from functools import partial

import numpy as np
import pytest

from microbatch import (
    AccumulationType,
    Accumulator,
    AccumulatorError,
    BatchError,
    Carry,
    CheckpointError,
    EmptyStream,
    MicrobatchError,
    MicrobatchSizeError,
)
from microbatch._errors import BudgetError, PlanError
from tests.laws.fronts import FRONTS

MEAN, SUM, MAX = AccumulationType.MEAN, AccumulationType.SUM, AccumulationType.MAX
KINDS = "MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST"


@pytest.fixture(scope="module", params=FRONTS)
def front(request):
    return FRONTS[request.param]()


def loss(params, batch):
    return (batch["x"] * params).sum()


def rows(x):
    return x


def pair(x):
    return x.sum(), {"n": x.sum()}


def tokens(count=10, width=2):
    return {"x": np.ones((count, width))}


def refused(front, error, words, fun, *options, args=None, **keywords):
    """Asserts the type and every line of the message; ``{axes}`` is the front's keyword for axes."""
    args = (1.0, tokens()) if args is None else args
    with pytest.raises(error) as caught:
        front.microbatch(fun, *options, **keywords)(*front.arrays(args))
    lines = "\n".join(line.strip() for line in words.strip().split("\n"))
    actual = "\n".join(line.strip() for line in str(caught.value).split("\n"))
    assert actual == lines.replace("{axes}", front.axes)


def test_C7_a_size_that_does_not_divide(front):
    refused(
        front,
        MicrobatchSizeError,
        """
        microbatch(loss): batch['x'] has 10 rows along axis 0, not divisible by microbatch_size=3.
        Use 1, 2, 5 or 10, or remainder="allow" for a last microbatch of 1 row.
        """,
        loss,
        1,
        3,
    )


def test_C7_the_way_out_works_when_pasted(front):
    args = front.arrays((1.0, tokens()))
    for size in (1, 2, 5, 10):
        assert float(front.microbatch(loss, 1, size)(*args)) == 20.0
    assert float(front.microbatch(loss, 1, 3, remainder="allow")(*args)) == 20.0


def test_a_count_that_does_not_divide(front):
    refused(
        front,
        MicrobatchSizeError,
        """
        microbatch(loss): batch['x'] has 10 rows along axis 0, not divisible by num_microbatches=3.
        Use 1, 2, 5 or 10, or remainder="allow" for a last microbatch of fewer rows.
        """,
        loss,
        1,
        None,
        num_microbatches=3,
    )


@pytest.mark.parametrize(
    ("size", "what", "use"),
    [
        (0, "microbatch_size=0 is not positive.", "Use 1 or more."),
        (-5, "microbatch_size=-5 is not positive.", "Use 1 or more."),
        (2.0, "microbatch_size=2.0 is a float, not an integer.", None),
        (True, "microbatch_size=True is a bool, not an integer.", None),
        ("8", "microbatch_size='8' is a str, not an integer.", None),
    ],
)
def test_C3_a_size_that_is_no_positive_integer(front, size, what, use):
    use = use or "Use a positive int, for example microbatch_size=8."
    refused(front, MicrobatchSizeError, f"microbatch(loss): {what}\n{use}", loss, 1, size)


def test_C3_a_size_is_refused_before_there_is_a_call(front):
    with pytest.raises(MicrobatchSizeError):
        front.microbatch(loss, 1, 0)


def test_C4_no_batch_argument(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): no batch argument.
        Name at least one by position in argnums or by name in argnames.
        """,
        loss,
        (),
        2,
    )


def test_C4_a_number_out_of_range(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): argnums holds 2, but loss(params, batch) has 2 positional parameters.
        Use 0 to 1, or negative numbers from the end.
        """,
        loss,
        2,
        2,
    )


def test_C4_a_name_that_the_function_lacks(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): argnames holds 'bach', but loss(params, batch) has no such parameter.
        Use one of 'params', 'batch'.
        """,
        loss,
        (),
        2,
        argnames="bach",
    )


def test_C4_a_batch_argument_that_is_not_given(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): batch argument 'batch' (argnums 1) was not given; the call has 1 positional argument.
        Pass it, or take it out of the batch arguments.
        """,
        loss,
        1,
        2,
        args=(1.0,),
    )


def test_C4_an_argument_named_twice(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): batch argument 'batch' is named twice.
        Name it once, in argnums or in argnames.
        """,
        loss,
        1,
        2,
        argnames="batch",
    )


def test_C5_a_scalar_in_the_batch(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): batch['x'] is a scalar and has no axis 0 to split.
        Pass it as an argument of its own that is not a batch argument, or give it rows.
        """,
        loss,
        1,
        2,
        args=(1.0, {"x": np.float32(3)}),
    )


def test_C5_unequal_rows(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): batch arguments need equally many rows, and these have different numbers:
        params: 4 along axis 0 of shape (4,)
        batch['x']: 10 along axis 0 of shape (10, 2)
        Give them the same number of rows, or name each one's axis in {axes}.
        """,
        loss,
        (0, 1),
        2,
        args=(np.ones(4), tokens()),
    )


def test_axes_that_do_not_match_the_arguments(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): {axes}=(0, 1) has 2 entries for 1 batch argument (batch).
        Give one integer for all, or one per batch argument: argnums first, then argnames.
        """,
        loss,
        1,
        2,
        in_axes=(0, 1),
    )


def test_an_axis_that_the_array_lacks(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): batch['x'] is of shape (10, 2) and has no axis 2 to split.
        Pass it as an argument of its own that is not a batch argument, or give it rows.
        """,
        loss,
        1,
        2,
        in_axes=2,
    )


def test_an_axis_that_is_no_integer(front):
    refused(
        front,
        BatchError,
        """
        microbatch(loss): batch['x'] has 0.0 for its axis of rows.
        Use an integer.
        """,
        loss,
        1,
        2,
        in_axes=0.0,
    )


def test_C6_an_accumulator_that_is_no_prefix(front):
    expected = """
        microbatch(pair): the accumulator is not a prefix of the output.
        accumulator: (*, *, *)
        output:      (*, {'n': *})
        Give one accumulator for the whole output, or one per part of it.
        """
    if front.name == "jax":
        expected = expected.replace("(*, *, *)", "PyTreeDef((*, *, *))")
        expected = expected.replace("(*, {'n': *})", "PyTreeDef((*, {'n': *}))")
    refused(front, AccumulatorError, expected, pair, 0, 2, (SUM, SUM, SUM), args=(np.ones(4),))


def test_an_accumulator_that_is_none(front):
    refused(
        front,
        AccumulatorError,
        f"""
        microbatch(pair): accumulator[1] is 'sum', not an accumulator.
        Use one of {KINDS}, an Accumulator or a Carry.
        """,
        pair,
        0,
        2,
        (SUM, "sum"),
        args=(np.ones(4),),
    )


def test_N12_a_mean_of_integers(front):
    refused(
        front,
        AccumulatorError,
        """
        microbatch(first): output['n'] has dtype int32; MEAN averages floating-point and complex values.
        Use SUM or LAST for it, or return it as a float.
        """,
        first,
        0,
        2,
        MEAN,
        args=(np.ones(4, np.int32),),
    )


def first(x):
    return {"n": x[0]}


def test_an_output_whose_rows_are_summed(front):
    place = "the last microbatch" if front.name == "jax" else "microbatch 1"
    refused(
        front,
        AccumulatorError,
        f"""
        microbatch(rows): output is float32[1] in {place} and float32[3] before it; SUM cannot combine them.
        Use CONCAT for outputs with rows, or return one shape and dtype.
        """,
        rows,
        0,
        3,
        SUM,
        remainder="allow",
        args=(np.ones(4),),
    )


def test_ones_own_accumulator_without_weights(front):
    refused(
        front,
        AccumulatorError,
        """
        microbatch(rows): the last microbatch has fewer rows, and the custom accumulator of output takes no weight.
        Give its update a keyword parameter weight, or use a microbatch_size that divides the batch.
        """,
        rows,
        0,
        3,
        Accumulator(lambda spec: 0.0, lambda carry, value, index: carry, lambda carry: carry),
        remainder="allow",
        args=(np.ones(4),),
    )


def test_N11_the_largest_of_zero_rows(front):
    with pytest.raises(
        EmptyStream, match=r"MAX of zero rows has no value.*\nGive at least one row\."
    ):
        front.microbatch(rows, 0, 2, MAX)(front.arrays(np.ones((0, 2))))


def test_a_count_and_a_size(front):
    with pytest.raises(MicrobatchSizeError, match=r"are both given\.\nGive one of them"):
        front.microbatch(rows, 0, 2, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "choices"),
    [("order", "'strided', 'contiguous'"), ("remainder", "'error', 'allow'")],
)
def test_a_word_that_is_no_choice(front, name, choices):
    refused(
        front,
        MicrobatchError,
        f"microbatch(rows): {name}='other' is unknown.\nUse one of {choices}.",
        rows,
        0,
        2,
        **{name: "other"},
    )


@pytest.mark.parametrize("options", [{"fun": None}, {"weight_fn": 3.0}, {"weight_fn": "rows"}])
def test_what_is_no_function(front, options):
    name, value = next(iter(options.items()))
    advice = "Give a function." if name == "fun" else "Give a function, or leave it out."
    sizes = {"argnums": 0, "microbatch_size": 2}
    for transformation, given in (("microbatch", sizes), ("accumulate", {})):
        with pytest.raises(MicrobatchError) as caught:
            getattr(front.module, transformation)(**{"fun": rows, **given, **options})
        what = f"{name}={value!r} is a {type(value).__name__}, not a function.\n{advice}"
        assert str(caught.value).partition(": ")[2] == what


@pytest.mark.parametrize("value", [3, None, ("x", 1)])
def test_argnames_that_are_no_strings(front, value):
    with pytest.raises(BatchError, match=r"argnames=.* holds .*\.\nUse strings\."):
        front.microbatch(rows, 0, 2, argnames=value)


def test_streams_that_are_none(front):
    folded = front.module.accumulate(rows)
    for value in (3, None):
        with pytest.raises(BatchError, match=f"microbatches={value} cannot be iterated over"):
            folded(microbatches=value)
    with pytest.raises(CheckpointError, match="checkpoint=3 is not a path"):
        folded(microbatches=[(front.arrays(np.ones(2)),)], checkpoint=3)
    with pytest.raises(MicrobatchError, match="micro_batches_grads is a NoneType"):
        front.module.gradient_accumulation(None, 2)


def test_an_axis_to_reshape_that_is_no_integer(front):
    with pytest.raises(BatchError, match="tree has '0' for its axis of rows"):
        front.module.reshape_batch_axis(front.arrays(np.ones(4)), 2, axis="0")


def test_budgets_and_candidates_that_are_none(front):
    if front.name == "numpy":
        pytest.skip("nothing to plan")
    x = front.arrays(np.ones(4))
    with pytest.raises(BudgetError, match=r"memory_budget=\[1\] is a list"):
        front.microbatch(rows, 0, "auto", memory_budget=[1])(x)
    for value in (2, "2"):
        with pytest.raises(PlanError, match=f"candidates={value!r} is no sequence"):
            front.module.plan(rows, 0, candidates=value)(x)


def test_a_batch_argument_cannot_be_carried(front):
    with pytest.raises(MicrobatchError, match="microbatch"):
        front.microbatch(rows, 0, 2, Carry(0))(front.arrays(np.ones(4)))


def test_every_error_is_a_value_error_with_a_way_out(front):
    """The contract's word for what a caller catches."""
    with pytest.raises(ValueError, match="divisible"):
        front.microbatch(loss, 1, 3)(*front.arrays((1.0, tokens())))


ARRAYS = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]


@pytest.mark.parametrize(
    ("gradients", "steps", "error", "words"),
    [
        (
            [],
            1,
            MicrobatchError,
            "gradient_accumulation: micro_batches_grads is empty.\nGive one gradient per microbatch.",
        ),
        (
            ARRAYS,
            3,
            MicrobatchSizeError,
            "gradient_accumulation: accumulation_steps=3, and there are 2 gradients.\n"
            "Use at most 2, or give more gradients.",
        ),
        (
            ARRAYS,
            0,
            MicrobatchSizeError,
            "gradient_accumulation: accumulation_steps=0 is not positive.\nUse 1 or more.",
        ),
        (
            ARRAYS,
            2.0,
            MicrobatchSizeError,
            "gradient_accumulation: accumulation_steps=2.0 is a float, not an integer.\n"
            "Use a positive int, for example accumulation_steps=8.",
        ),
        (
            [ARRAYS[0], np.ones(3)],
            2,
            MicrobatchError,
            "gradient_accumulation: micro_batches_grads[1] has shape (3,), and micro_batches_grads[0] has (2,).\n"
            "Give gradients of the same parameters.",
        ),
        (
            [{"w": ARRAYS[0]}, {"v": ARRAYS[1]}],
            2,
            MicrobatchError,
            "gradient_accumulation: micro_batches_grads[1] has the leaves micro_batches_grads[1]['v'], and the "
            "first has micro_batches_grads[0]['w'].\nGive gradients of the same parameters.",
        ),
        (
            [np.array([1], np.int32)],
            1,
            AccumulatorError,
            "gradient_accumulation: micro_batches_grads[0] has dtype int32, which cannot hold a mean.\n"
            "Give floating-point gradients, for example of dtype float32.",
        ),
    ],
)
def test_gradients_that_cannot_be_averaged(front, gradients, steps, error, words):
    call = partial(front.module.gradient_accumulation, front.arrays(gradients), steps)
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == words
