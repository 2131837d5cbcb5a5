"""Hugging Face's Trainer in an elastic job, through `eh.attach`.

    pip install 'elastic_hieravg[huggingface]'
    hieravg run --standalone --nproc-per-node=2 examples/huggingface_trainer.py --steps 100

The Trainer's loop stays as it is: the optimizer's own hook counts every step. Inside a node the Trainer uses
DDP by itself, because `hieravg run` gives it the node as its world; `eh.attach` averages between nodes. Two
things remain. The Trainer is given the steps that are left, because a worker that joins begins at the others'
step; and a callback stops when all stop, and has the learning rate follow the job.
"""

import argparse
import hashlib
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import elastic_hieravg as eh

BATCH = 16


class Classifier(nn.Module):
    """Any model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(points)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Following(TrainerCallback):
    """Has the Trainer follow the job. Reusable as it is."""

    def __init__(self, job: eh.Job, *, max_steps: int) -> None:
        self.job = job
        self.max_steps = max_steps
        self.losses: list[float] = []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        # The Trainer steps its scheduler next. The job's step counts, not how often this worker did that.
        more["lr_scheduler"].last_epoch = self.job.step - 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if self.job.should_stop or self.job.step >= self.max_steps:
            control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        # Evaluations and the summary at the end are told here too, without it.
        if "loss" in more["logs"]:
            self.losses.append(more["logs"]["loss"])
            self.job.report(loss=self.losses[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Hugging Face's Trainer in an elastic job")
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1024, 32, generator=generator)
    labels = (points @ torch.randn(32, 4, generator=generator)).argmax(dim=1)
    rows = [{"points": each, "labels": label} for each, label in zip(points, labels, strict=True)]

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=flags.steps)
    # Joins the job. Model, optimizer and job.step are everybody's from here on.
    job = eh.attach(model, optimizer, num_samples=BATCH)

    following = Following(job, max_steps=flags.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            args=TrainingArguments(
                folder,
                max_steps=max(1, flags.steps - job.step),  # those that are left
                per_device_train_batch_size=BATCH,
                seed=1 + job.node_rank,  # each node goes through the data in its own order
                logging_steps=5,
                logging_first_step=True,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                ddp_find_unused_parameters=False,
                disable_tqdm=True,
            ),
            train_dataset=rows,
            optimizers=(optimizer, scheduler),
            callbacks=[following],
        )
        trainer.train()
    job.close()  # the last global round; leaving it to the end of the program is fine too

    losses = following.losses
    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    steps = trainer.state.global_step
    print(f"rank {job.rank}: {steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, model {digest}")


if __name__ == "__main__":
    main()
