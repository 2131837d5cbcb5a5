"""An image classifier with BatchNorm. The images are drawn here, so nothing is downloaded.

    hieravg run --standalone --nproc-per-node=2 examples/image_classifier.py --steps 100

Running means and variances of BatchNorm are averaged with the parameters, and its counters take the maximum:
all replicas end with the same statistics. Rank 0 evaluates in `job.quiet()`: standing still there is no hang.
"""

import argparse
import hashlib

import torch
from torch import Tensor, nn

import elastic_hieravg as eh

BATCH = 32
EVALUATION_STEPS = 25


def draw(num_images: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images of 16 by 16 with a bar; its direction, one of four, is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num_images,), generator=generator)
    images = 0.7 * torch.randn(num_images, 1, 16, 16, generator=generator)
    across = torch.arange(16)
    shifts = torch.randint(-4, 5, (num_images,), generator=generator)
    for image, label, shift in zip(images, labels.tolist(), shifts.tolist(), strict=True):
        middle = (across + shift).clamp(0, 15) if label >= 2 else torch.full((16,), 8 + shift)
        rows, columns = (across, middle) if label % 2 else (middle, across)
        image[0, rows, columns.flip(0) if label == 3 else columns] += 2.0
    return images, labels


def make_model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4 * 4, 4))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        found = float((model(images).argmax(dim=1) == labels).float().mean())
    model.train()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="an image classifier with BatchNorm")
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    held_out = draw(256, seed=-1)
    losses: list[float] = []

    with eh.join() as job:
        averager = job.averager(model, optimizer)
        while job.step < flags.steps and not job.should_stop:
            images, labels = draw(BATCH, seed=job.step * job.world_size + job.rank)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=BATCH)
            losses.append(loss.item())
            job.report(loss=loss)
            if job.rank == 0 and job.step % EVALUATION_STEPS == 0:
                with job.quiet():
                    job.report(accuracy=accuracy(model, *held_out))

    values = torch.cat([each.flatten().double() for each in model.state_dict().values()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    # A worker that joins in the very last round makes no step.
    trend = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "unknown"
    print(
        f"rank {job.rank}: {len(losses)} steps, loss {trend}, model {digest}, "
        f"accuracy {accuracy(model, *held_out):.2f}"
    )


if __name__ == "__main__":
    main()
