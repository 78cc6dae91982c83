"""Which microbatch size fits? `plan`, which predicts, beside finders that try sizes until memory runs out.

A device's memory is simulated: live tensor bytes are counted, and beyond a limit comes the error that CUDA raises, which the
finders know.
"""

import gc
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks._harness import Bar, Table
from benchmarks.torch_training import GPT
from microbatch.torch import plan
from microbatch.torch._tracking import TensorBytes

MIB = 2**20
ROWS = 512
# Of what the whole batch takes beyond one row.
SHARES = (0.12, 0.25, 0.4)


class Device(TensorBytes):
    """A device with little memory: an allocation beyond the limit is refused as CUDA refuses it."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.errors = 0

    def __torch_dispatch__(self, *call: Any) -> Any:
        result = super().__torch_dispatch__(*call)
        needed = self.live_bytes
        if needed > self.limit_bytes:
            del result  # what is refused takes nothing
            self.errors += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. {needed:,} bytes are needed, there are {self.limit_bytes:,}."
            )
        return result


@dataclass
class Case:
    """A model, a loss and a batch; `passes` counts forward passes with real numbers."""

    name: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    batch: torch.Tensor
    passes: int = field(default=0)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        self.passes += type(rows) is torch.Tensor  # not where only shapes are followed
        return self.loss_fn(self.model, rows)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters())

    def train(self, size: int) -> None:
        """Two steps of two microbatches each: from the second on, the optimizer's state is there too."""
        optimizer = self.optimizer()
        for _ in range(2):
            for rows in (self.batch[:size], self.batch[-size:]):
                self.loss(rows).backward()
            optimizer.step()
            optimizer.zero_grad()

    def peak_bytes(self, size: int) -> int:
        """What `train` takes; deterministic, so one run says it."""
        with self.on_device(math.inf) as device:
            self.train(size)
        return device.peak_bytes

    def on_device(self, limit_bytes: float) -> Device:
        """A device that holds the model and the batch already."""
        self.model.zero_grad()
        device = Device(limit_bytes)
        device.hold([*self.model.parameters(), self.batch])
        return device


@dataclass(frozen=True)
class Found:
    """What a way found, and what it took."""

    size: int
    errors: int
    passes: int
    probes: int
    seconds: float

    @property
    def microbatches(self) -> int:
        """How many make a batch."""
        return -(-ROWS // self.size)


def workloads() -> list[Table]:
    """The sizes that each way finds, and what finding them takes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the finders collect garbage at each trial: what was imported is not their work
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    names = list(WAYS)
    sizes, found = [], []
    for case in _cases():
        least, most = case.peak_bytes(1), case.peak_bytes(len(case.batch))
        for share in SHARES:
            limit = int(least + share * (most - least))
            largest = _largest(case, limit)
            here = {name: _measured(way, case, limit) for name, way in WAYS.items()}
            sizes.append(
                (case.name, limit / MIB, largest, *(here[name].size for name in names)),
            )
            found.append((largest, here))
    return [_sizes(sizes, names), _costs(found, names)]


def _sizes(rows: Sequence[tuple[Any, ...]], names: list[str]) -> Table:
    return Table(
        name="sizes-found",
        title="Finding a microbatch size in PyTorch: the rows that each way finds",
        columns=("", "memory MiB", "largest that fits", *names),
        rows=tuple(rows),
        note="Memory is simulated: beyond the limit comes CUDA's out-of-memory error. A step is two microbatches and "
        "AdamW. `plan` takes the most even cut into the fewest microbatches; `plan, any "
        "size` is the end of its line, (memory − fixed_bytes) / bytes_per_row.",
    )


def _costs(found: Sequence[tuple[int, dict[str, Found]]], names: list[str]) -> Table:
    total = lambda name, figure: sum(getattr(here[name], figure) for _, here in found)
    shares = {name: [here[name].size / largest for largest, here in found] for name in names}
    fewest = sum(-(-ROWS // largest) for largest, _ in found)

    def row(name: str) -> tuple[Any, ...]:
        return (
            name,
            f"{100 * sum(shares[name]) / len(found):.0f}",
            f"{100 * min(shares[name]):.0f}",
            total(name, "microbatches"),
            total(name, "errors"),
            total(name, "passes"),
            total(name, "probes"),
            round(total(name, "seconds"), 2),
        )

    halving, line = "Lightning binsearch", "plan, any size"
    reached = (
        (
            Bar("plan", "number of memory errors", 0.0, halving),
            total("plan", "errors") / total(halving, "errors"),
        ),
        (
            Bar("plan", "number of microbatches", 1.05, "the largest size"),
            total("plan", "microbatches") / fewest,
        ),
        (Bar(line, "number of rows", 1.0, "the largest size"), max(shares[line])),
        (Bar("the largest size", "number of rows", 1.05, line), 1 / min(shares[line])),
    )
    return Table(
        name="finding-a-size",
        title=f"Finding a microbatch size in PyTorch: what it takes, {len(found)} searches together",
        columns=(
            "",
            "mean % of the largest",
            "least %",
            "microbatches a batch",
            "memory errors",
            "forward passes",
            "passes of shapes alone",
            "seconds",
        ),
        rows=tuple(row(name) for name in names),
        bars=reached,
        note=f"With the largest sizes there would be {fewest} microbatches. Seconds promise nothing: those of the ways that try "
        "sizes contain the counting of bytes, and their collections of garbage.",
    )


def _cases() -> list[Case]:
    square = lambda model, x: model(x).square().mean()
    tokens = lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())]
    convolutions = [m for c in (3, 16, 16) for m in (nn.Conv2d(c, 16, 3, padding=1), nn.ReLU())]
    return [
        Case("MLP, 4 × 256", nn.Sequential(*layers), square, torch.randn(ROWS, 256)),
        Case("GPT, 2 × 64", GPT(64, 2, 256), tokens, torch.randint(0, 256, (ROWS, 32))),
        Case("CNN, 3 × 16", nn.Sequential(*convolutions), square, torch.randn(ROWS, 3, 16, 16)),
    ]


def _largest(case: Case, limit_bytes: int) -> int:
    """The largest size whose steps stay within the limit, by halving: bytes grow with the size."""
    low, high = 0, len(case.batch)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if case.peak_bytes(middle) <= limit_bytes else (low, middle)
    return low


def _measured(way: Callable[[Case, int], tuple[int, int, int]], case: Case, limit: int) -> Found:
    before = case.passes
    start = time.perf_counter()
    size, errors, probes = way(case, limit)
    seconds = time.perf_counter() - start
    passes = case.passes - before
    errors += case.peak_bytes(size) > limit  # training at the size that was found
    return Found(size, errors, passes, probes, seconds)


def _plan(case: Case, limit: int) -> tuple[int, int, int]:
    planned = _planned(case, limit)
    return planned.microbatch_size, 0, planned.probes


def _plan_any_size(case: Case, limit: int) -> tuple[int, int, int]:
    planned = _planned(case, limit)
    size = int((limit - planned.fixed_bytes) / planned.bytes_per_row)
    return size, 0, planned.probes


def _planned(case: Case, limit: int) -> Any:
    return plan(
        case.loss, memory_budget=limit, remainder="allow", optimizer=case.optimizer(), device="cpu"
    )(case.batch)


def _accelerate(case: Case, limit: int, **options: Any) -> tuple[int, int, int]:
    def train(batch_size: int) -> int:
        case.model.zero_grad()
        case.train(batch_size)
        return batch_size

    with case.on_device(limit) as device:
        size = find_executable_batch_size(train, **options)()
    return size, device.errors, 0


def _accelerate_from_all(case: Case, limit: int) -> tuple[int, int, int]:
    return _accelerate(case, limit, starting_batch_size=len(case.batch))


class _Rows(Dataset):
    """Rows of the batch on the device, as views."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.batch[indices[0] : indices[-1] + 1]


class _Module(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model
        self.case = case
        self.batch_size = 2

    def training_step(self, rows: torch.Tensor) -> torch.Tensor:
        return self.case.loss(rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            _Rows(self.case.batch), batch_size=self.batch_size, collate_fn=lambda rows: rows
        )


def _lightning(case: Case, limit: int, mode: str) -> tuple[int, int, int]:
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        case.on_device(limit) as device,
    ):
        warnings.simplefilter("ignore")  # about workers and loggers
        trainer = pl.Trainer(
            accelerator="cpu",
            accumulate_grad_batches=2,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=1,
        )
        size = Tuner(trainer).scale_batch_size(_Module(case), mode=mode)
    return size, device.errors, 0


WAYS: dict[str, Callable[[Case, int], tuple[int, int, int]]] = {
    "plan": _plan,
    "plan, any size": _plan_any_size,
    "Accelerate, from 128": _accelerate,
    "Accelerate, from all rows": _accelerate_from_all,
    "Lightning power": lambda case, limit: _lightning(case, limit, "power"),
    "Lightning binsearch": lambda case, limit: _lightning(case, limit, "binsearch"),
}
