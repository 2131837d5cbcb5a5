"""Lightning in an elastic job, through `eh.attach` in a callback.

    pip install 'elastic_hieravg[lightning]'
    hieravg run --standalone --nproc-per-node=2 examples/lightning_module.py --steps 100

The callback is all there is to it: it joins when Lightning has made the optimizer, stops when all stop, and
leaves with the last global round. Lightning runs on one device per worker; the averager connects the workers.
"""

import argparse
import hashlib
from contextlib import ExitStack
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_hieravg as eh

BATCH = 16


class Averaging(lightning.Callback):
    """Reusable as it is, for modules with one optimizer."""

    def __init__(self, *, num_samples: int, max_steps: int) -> None:
        self.num_samples = num_samples
        self.max_steps = max_steps
        self.losses: list[float] = []
        self.job: eh.Job
        self.quiet = ExitStack()

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # From here on the model, the optimizer's state and job.step are everybody's.
        self.job = eh.attach(pl_module, trainer.optimizers[0], num_samples=self.num_samples)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(outputs["loss"].item())
        self.job.report(loss=self.losses[-1])
        # Steps are counted by the job, not by Lightning: a worker that joins begins at the others' step.
        if self.job.should_stop or self.job.step >= self.max_steps:
            trainer.should_stop = True

    # A validation makes no steps, and is not to be taken for a hang.
    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.quiet.enter_context(self.job.quiet())

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.quiet.close()

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.job.close()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self.layers(points), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        points, labels = batch
        self.log("accuracy", (self.layers(points).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning in an elastic job")
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1280, 32, generator=generator)
    labels = (points @ torch.randn(32, 4, generator=generator)).argmax(dim=1)
    # Without a seed every worker shuffles in its own way.
    loader = DataLoader(TensorDataset(points[:1024], labels[:1024]), batch_size=BATCH, shuffle=True)
    held_out = DataLoader(TensorDataset(points[1024:], labels[1024:]), batch_size=256)

    model = Classifier()
    averaging = Averaging(num_samples=BATCH, max_steps=flags.steps)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[averaging],
        plugins=[LightningEnvironment()],  # not torchrun's variables: the world is ours to change
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, held_out)

    job, losses = averaging.job, averaging.losses
    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    print(
        f"rank {job.rank}: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, model {digest}, "
        f"accuracy {trainer.callback_metrics['accuracy']:.2f}"
    )


if __name__ == "__main__":
    main()
