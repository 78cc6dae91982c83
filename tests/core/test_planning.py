"""The search against brute force, budgets, and what a plan says."""

import base64
import io
import json
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch._errors import BudgetError
from microbatch._memory import (
    Budget,
    control_group_bytes,
    format_bytes,
    host_memory_bytes,
    resolve_budget,
)
from microbatch._planning import lower_to, make_plan
from microbatch._search import candidate_sizes, is_affine, search

BATCHES = st.integers(1, 3000) | st.sampled_from([4096, 2**20, 720_720, 1021])


def largest_that_fits(probe, budget_bytes, sizes):
    return max((s for s in sizes if probe(s) <= budget_bytes), default=None)


def plan_of(probe, batch_size, budget_bytes, *, remainder=False, seconds=None, whole_saves=0):
    sizes = candidate_sizes(batch_size, remainder=remainder)
    found = search(probe, batch_size, budget_bytes, sizes, whole_saves=whole_saves)
    return make_plan(
        found,
        sizes,
        Budget(budget_bytes, "given"),
        name="loss",
        framework="jax",
        batch_size=batch_size,
        remainder=remainder,
        seconds=seconds,
    )


@given(
    BATCHES,
    st.integers(0, 10**9),
    st.integers(1, 10**7),
    st.floats(0, 1.3),
    st.booleans(),
    st.booleans(),
)
def test_affine_programs_take_four_probes_and_give_the_largest(
    batch_size, fixed, per_row, share, remainder, prefers_divisors
):
    sizes = candidate_sizes(batch_size, remainder=remainder)
    budget = int((fixed + per_row * batch_size) * share)
    calls = []

    def probe(size):
        calls.append(size)
        return fixed + per_row * size

    found = search(probe, batch_size, budget, sizes, prefers_divisors=prefers_divisors)
    assert len(calls) == len(found.probed) <= 4 + prefers_divisors
    largest = largest_that_fits(probe, budget, sizes)
    even = [s for s in sizes if largest and batch_size % s == 0 and largest < 2 * s <= 2 * largest]
    assert found.microbatch_size == max(even if prefers_divisors else (), default=largest)
    assert found.affine


@given(BATCHES, st.integers(0, 10**6), st.integers(1, 10**4), st.floats(0, 1.2), st.integers(0, 1))
def test_a_whole_batch_without_loop_and_accumulator_is_found(
    batch_size, fixed, per_row, share, early
):
    accumulator = fixed // 2
    probe = lambda size: fixed + per_row * size - (accumulator if size == batch_size else 0)
    sizes = candidate_sizes(batch_size, remainder=False)
    budget = int((fixed + per_row * batch_size) * share)
    found = search(probe, batch_size, budget, sizes, whole_saves=accumulator)
    assert found.microbatch_size == largest_that_fits(probe, budget, sizes)
    assert len(found.probed) <= 4 or not found.affine


@given(BATCHES, st.lists(st.integers(0, 10**6), min_size=400, max_size=400), st.floats(0, 1.1))
def test_any_growing_program_never_gives_a_size_that_does_not_fit(batch_size, steps, share):
    sizes = candidate_sizes(batch_size, remainder=False)
    total, growing = 0, {}
    for size, step in zip(sizes, steps, strict=False):
        total += step
        growing[size] = total
    budget = int(total * share)
    found = search(growing.__getitem__, batch_size, budget, sizes)
    assert len(found.probed) <= 4 + 2 * len(sizes).bit_length()
    if found.microbatch_size is None:
        assert growing[sizes[0]] > budget
    else:
        assert found.probed[found.microbatch_size] <= budget
        if not found.affine:
            assert found.microbatch_size == largest_that_fits(growing.__getitem__, budget, sizes)


def test_a_switch_of_algorithm_is_said_and_bisected():
    probe = lambda size: 10 * size if size < 256 else 40 * size
    plan = plan_of(probe, 4096, 12_000)
    assert plan.microbatch_size == 256
    assert not plan.affine
    assert "not affine" in plan.explanation
    assert is_affine({1: 10, 2: 20, 4: 40}, 8) and not is_affine({1: 10, 2: 30, 4: 40}, 8)


def test_divisors_are_preferred_and_a_remainder_is_offered_where_much_better():
    prime = plan_of(lambda size: 100 * size, 1021, 30_000)
    assert prime.microbatch_size == 1
    assert prime.with_remainder == 256  # the most even cut that fits: 4 pieces
    assert 'remainder="allow"' in prime.explanation
    allowed = plan_of(lambda size: 100 * size, 1021, 30_000, remainder=True)
    assert allowed.microbatch_size == 256
    assert [c.tail for c in allowed.candidates if c.microbatch_size == 256] == [1021 % 256]
    sizes = candidate_sizes(1000, remainder=True)
    near = lambda **options: search(lambda size: 100 * size, 1000, 39_000, sizes, **options)
    assert near().microbatch_size == 334  # 3 pieces
    assert near(prefers_divisors=True).microbatch_size == 250  # 4 equal ones


def test_M3_says_that_microbatching_will_not_help_and_why():
    whole_saves = 400 * 2**20
    probe = lambda size: 1200 * 2**20 + 2**10 * size - (whole_saves if size == 64 else 0)
    plan = plan_of(probe, 64, 4 * 2**30, whole_saves=whole_saves)
    assert plan.microbatch_size == 64
    assert not plan.helps
    assert "Microbatching will not help" in plan.explanation
    assert "1.2 GiB" in plan.explanation and "800 MiB" in plan.explanation


def test_nothing_fits_says_what_is_fixed():
    plan = plan_of(lambda size: 10_000 + size, 64, 5_000)
    assert plan.microbatch_size is None and not plan.fits and plan.exit_code == 1
    assert plan.num_microbatches == 0
    assert "Nothing fits" in plan.explanation and "cannot help" in plan.explanation


def test_the_fastest_that_fits_is_chosen_where_time_was_measured():
    plan = plan_of(lambda size: size, 64, 40, seconds={32: 2.0, 16: 1.0, 8: 1.5})
    assert plan.microbatch_size == 16
    assert "1.5" in str(plan)


def test_several_processes_take_the_smallest():
    plan = plan_of(lambda size: size, 64, 40)
    lowered = lower_to(plan, 9, candidate_sizes(64, remainder=False))
    assert (plan.microbatch_size, lowered.microbatch_size) == (32, 8)
    assert lowered.num_microbatches == 8
    assert lowered.predicted_bytes == 8
    assert "Another process can hold only 9, so all use 8." in lowered.explanation
    nothing = lower_to(plan, 0, candidate_sizes(64, remainder=False))
    assert (nothing.microbatch_size, nothing.predicted_bytes, nothing.fits) == (None, 1, False)
    assert nothing.explanation.endswith("Another process can hold no size, so none fits.")
    assert lower_to(plan, 64, ()) is plan


def test_a_plan_prints_and_serialises():
    plan = plan_of(lambda size: 2**20 * size, 8, 5 * 2**20)
    assert json.loads(json.dumps(plan.to_dict()))["microbatch_size"] == 4
    assert str(plan) == (
        "plan(loss): 8 rows, budget 5.0 MiB (given)\n"
        "\n"
        "rows  microbatches    memory  fits\n"
        "   1             8  ~1.0 MiB   yes\n"
        "   2             4   2.0 MiB   yes\n"
        "   4             2   4.0 MiB   yes  <-\n"
        "   8             1   8.0 MiB    no\n"
        "\n"
        "4 rows a microbatch (2 microbatches) need 4.0 MiB of 5.0 MiB."
    )
    assert '<tr style="font-weight: bold"><td>4</td>' in plan._repr_html_()


def test_a_margin_is_named_where_it_is_counted():
    plan = replace(plan_of(lambda size: 2**20 * size, 8, 5 * 2**20), margin_bytes=2**19)
    assert str(plan).splitlines()[2] == "rows  microbatches  memory and margin  fits"
    assert plan.to_dict()["margin_bytes"] == 2**19


def test_html_shows_a_hostile_name_as_text():
    sizes = candidate_sizes(4, remainder=False)
    found = search(lambda size: size, 4, 10, sizes)
    plan = make_plan(
        found,
        sizes,
        Budget(10, "given"),
        name="<script>alert(1)</script>",
        framework="jax",
        batch_size=4,
        remainder=False,
    )
    assert "<script>" not in plan._repr_html_() and "&lt;script&gt;" in plan._repr_html_()


def test_a_plan_draws_itself():
    pytest.importorskip("matplotlib")
    plain = plan_of(lambda size: size, 64, 40)
    timed = plan_of(lambda size: size, 64, 40, seconds={32: 2.0, 16: 1.0})
    assert len(plain.plot().axes) == 1
    assert len(timed.plot().axes) == 2


def test_the_chosen_size_is_drawn_on_the_line_its_margin_included():
    pytest.importorskip("matplotlib")
    plan = replace(plan_of(lambda size: size * 2**20, 64, 40 * 2**20), margin_bytes=8 * 2**20)
    plan = replace(plan, predicted_bytes=plan.predicted_bytes - plan.margin_bytes)
    (axes,) = plan.plot().axes
    needed, budget = (line.get_xydata() for line in axes.lines)
    chosen = axes.collections[-1].get_offsets()
    assert chosen.tolist() == [[32, 32 * 2**20]]
    assert [32, 32 * 2**20] in needed.tolist()
    assert {y for _, y in budget.tolist()} == {40 * 2**20}


def test_a_notebook_shows_the_figure():
    image = pytest.importorskip("matplotlib.image")
    plan = plan_of(lambda size: size * 2**20, 64, 40 * 2**20, seconds={32: 2.0, 16: 1.0})
    found = re.search(r'<img width="(\d+)" .*base64,([^"]+)">', plan._repr_html_())
    pixels = image.imread(io.BytesIO(base64.b64decode(found[2])))
    assert abs(pixels.shape[1] - 2 * int(found[1])) <= 1
    # The budget's line, in its own colour and unlike the paper.
    assert (abs(pixels[..., :3] - [0.71, 0.14, 0.09]).max(-1) < 0.03).sum() > 100


def test_without_matplotlib_a_notebook_shows_the_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = plan_of(lambda size: size, 64, 40)._repr_html_()
    assert "<table>" in shown and "<img" not in shown


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("12GiB", 12 * 2**30),
        ("12 gib", 12 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("512 b", 512),
        (7, 7),
        ("80%", 800),
        ("12.5 %", 125),
        (None, 900),
    ],
)
def test_budgets_are_read(given, count):
    assert resolve_budget(given, 1000, "cpu").bytes == count


@pytest.mark.parametrize(
    "given", ["12", "12 bananas", "", "0%", "101%", "-3GiB", 0, -5, True, 0.9, "GiB", "1..5GB"]
)
def test_budgets_that_cannot_be_read_are_refused(given):
    with pytest.raises(BudgetError, match="80%"):
        resolve_budget(given, 1000, "cpu")


@pytest.mark.parametrize("given", [None, "50%"])
def test_unknown_memory_asks_for_a_number(given):
    with pytest.raises(BudgetError, match=r'unknown[\s\S]*memory_budget="12GiB"'):
        resolve_budget(given, None, "tpu:0")
    assert resolve_budget("1GiB", None, "tpu:0").bytes == 2**30


def test_control_groups_of_both_versions(tmp_path):
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    (root / "memory").mkdir()
    membership.write_text("0::/a/b\n")
    assert control_group_bytes(membership, root) is None
    (root / "a" / "b" / "memory.max").write_text("max\n")
    (root / "a" / "memory.max").write_text("5000\n")
    assert control_group_bytes(membership, root) == 5000
    # Version 1, whose group lies outside what the container shows.
    membership.write_text("4:cpu,memory:/host/path\n1:cpu:/x\n")
    (root / "memory" / "memory.limit_in_bytes").write_text("7000\n")
    assert control_group_bytes(membership, root) == 7000
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert control_group_bytes(membership, root) is None
    assert control_group_bytes(tmp_path / "missing", root) is None


def test_the_host_has_memory():
    assert host_memory_bytes() > 2**28


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
