"""A Lightning module: ``training_step`` returns the microbatched loss, and Lightning does the rest.

Run: python examples/torch_lightning.py
"""

import lightning
import torch
from torch import nn
from torch.nn import functional as F

import microbatch.torch as mb


class Classifier(lightning.LightningModule):
    def __init__(self, microbatch_size=8):
        super().__init__()
        self.microbatch_size = microbatch_size
        self.model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4))
        self.losses = []

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def training_step(self, batch, batch_idx):
        loss = mb.microbatch(
            self.loss, 0, self.microbatch_size, mb.AccumulationType.MEAN, remainder="allow"
        )(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(microbatch_size):
    torch.manual_seed(0)
    x, y = torch.randn(600, 20), torch.randint(0, 4, (600,))
    x[torch.arange(600), y] += 2.0
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=100)
    module = Classifier(microbatch_size)
    lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    return module.losses


def main():
    losses, whole = train(microbatch_size=8), train(microbatch_size=None)
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}; whole batches {whole[0]:.3f} to {whole[-1]:.3f}"
    )
    return losses, whole


if __name__ == "__main__":
    main()
