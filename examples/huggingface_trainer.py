"""Hugging Face's Trainer in an elastic job, through `eh.attach`. Needs `pip install transformers accelerate`.

    hieravg run --standalone --nproc-per-node=2 examples/huggingface_trainer.py --steps 100

The Trainer's loop stays as it is. Each step of the optimizer is counted by the optimizer's own hook. Inside a
node the Trainer uses DDP by itself, because `hieravg run` gives it the node as its world; `eh.attach` averages
between nodes. Two things remain: to stop when all stop, and to begin where the others are.
"""

import argparse
import hashlib
import tempfile

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

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
    """Ends the Trainer's loop when the job ends, and tells the job of the loss."""

    def __init__(self, job: eh.Job) -> None:
        self.job = job
        self.losses: list[float] = []

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.job.report(loss=self.losses[-1])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        control.should_training_stop |= self.job.should_stop


def main() -> None:
    parser = argparse.ArgumentParser(description="Hugging Face's Trainer in an elastic job")
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    # Joins the job. Model, optimizer and job.step are everybody's from here on.
    job = eh.attach(model, optimizer, num_samples=BATCH)
    scheduler.last_epoch = job.step

    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1024, 32, generator=generator)
    labels = (points @ torch.randn(32, 4, generator=generator)).argmax(dim=1)
    rows = [{"points": each, "labels": label} for each, label in zip(points, labels, strict=True)]
    following = Following(job)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            args=TrainingArguments(
                folder,
                max_steps=max(1, flags.steps - job.step),  # those that are left
                per_device_train_batch_size=BATCH,
                seed=1 + job.node_rank,  # each node goes through the data in its own order
                logging_steps=5,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                ddp_find_unused_parameters=False,
                disable_tqdm=True,
            ),
            train_dataset=rows,  # type: ignore[arg-type, unused-ignore]
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
