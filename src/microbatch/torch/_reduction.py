"""How the losses of microbatches make the loss of the batch: weights in, scales out; numbers only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from microbatch._checks import check_choice
from microbatch._errors import MicrobatchError

Reduction = Literal["mean", "sum", "sum_over_weight"]
REDUCTIONS = ("mean", "sum", "sum_over_weight")
WeightFn = Callable[..., Any]


@dataclass(frozen=True)
class Term:
    """One loss: how it is reduced, and which column of the weights it uses (0 is the rows)."""

    reduction: Reduction
    column: int


@dataclass(frozen=True)
class Terms:
    """All losses of a call: one `Term` for everything, or one for each key of the mapping that is returned."""

    terms: Mapping[str | None, Term]
    weight_fns: tuple[WeightFn | None, ...]

    @property
    def named(self) -> bool:
        """Whether losses are told apart by key."""
        return None not in self.terms

    def of(self, where: str, keys: Sequence[str | None]) -> dict[str | None, Term]:
        """The term of each loss that came (None is a single loss); keys that do not match are refused."""
        if not self.named:
            return dict.fromkeys(keys, self.terms[None])
        if set(keys) != set(self.terms):
            single = list(keys) == [None]
            came = "a single loss" if single else f"the keys {', '.join(map(repr, keys))}"
            raise MicrobatchError(
                f"{where}: the loss has {came}, but reduction and weight_fn name "
                f"{', '.join(map(repr, self.terms))}.\n"
                "Name every loss that is returned; None in weight_fn stands for rows."
            )
        return {key: self.terms[key] for key in keys}


def terms_of(where: str, reduction: Any, weight_fn: Any) -> Terms:
    """`reduction` and `weight_fn`, each one value or a mapping by the losses' keys, as `Terms`."""
    mappings = [m for m in (reduction, weight_fn) if isinstance(m, Mapping)]
    keys: list[str | None] = list(mappings[0]) if mappings else [None]
    if isinstance(reduction, Mapping) and isinstance(weight_fn, Mapping):
        unknown = [key for key in weight_fn if key not in reduction]
        if unknown:
            raise MicrobatchError(
                f"{where}: weight_fn has {unknown[0]!r}, which reduction lacks.\n"
                f"Use keys of reduction: {', '.join(map(repr, reduction))}."
            )
    weight_fns: list[WeightFn | None] = [None]
    terms: dict[str | None, Term] = {}
    for key in keys:
        label = "reduction" if key is None else f"reduction[{key!r}]"
        kind = reduction[key] if isinstance(reduction, Mapping) else reduction
        check_choice(where, label, kind, REDUCTIONS)
        weigh = weight_fn.get(key) if isinstance(weight_fn, Mapping) else weight_fn
        if weigh is not None and not callable(weigh):
            raise MicrobatchError(
                f"{where}: weight_fn={weigh!r} is not a function.\n"
                "Give a function of loss_fn's arguments, for example lambda x, y: (y != -100).sum()."
            )
        if kind == "sum":
            if weigh is not None and not isinstance(weight_fn, Mapping) and key is not None:
                weigh = None
            elif weigh is not None:
                raise MicrobatchError(
                    f'{where}: {label}="sum" has no weights, and a weight_fn was given.\n'
                    'Use reduction="mean" for a loss that is a mean over its weight, "sum_over_weight" for a sum '
                    "that is to be divided by the total weight, or leave weight_fn out."
                )
        if weigh not in weight_fns:
            weight_fns.append(weigh)
        terms[key] = Term(kind, weight_fns.index(weigh))
    return Terms(terms, tuple(weight_fns))


def scale(term: Term, weight: float, total: float) -> float:
    """What a microbatch's loss is multiplied with; 0 says that it counts for nothing.

    >>> scale(Term("mean", 0), 2.0, 22.0) == 2 / 22, scale(Term("sum", 0), 2.0, 22.0)
    (True, 1.0)
    >>> scale(Term("sum_over_weight", 1), 2.0, 20.0), scale(Term("sum_over_weight", 1), 0.0, 20.0)
    (0.05, 0.0)
    """
    if term.reduction == "sum":
        return 1.0
    if weight == 0:
        return 0.0
    return weight / total if term.reduction == "mean" else 1.0 / total
