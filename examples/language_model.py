"""A small language model that reads the source of Python's own library, one byte after the other.

    hieravg run --standalone --nproc-per-node=2 examples/language_model.py --steps 300

Levels and periods come from the launcher, as in `--hierarchy node=8,global=64`; with `--warmup-steps 50` the
first steps each end with a global round. The learning rate is a function of `job.step`: then there is nothing
to set for a worker that joins.
"""

import argparse
import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import elastic_hieravg as eh

BATCH, LENGTH, WIDTH = 16, 64, 64
CORPUS_BYTES_MAX = 2_000_000
RATE, RATE_STEPS = 3e-3, 20


def read_corpus() -> Tensor:
    """Modules of the standard library, in order, as bytes."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > CORPUS_BYTES_MAX:
            break
    return torch.frombuffer(bytearray(text[:CORPUS_BYTES_MAX]), dtype=torch.uint8).long()


class LanguageModel(nn.Module):
    """A transformer of two layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        values = self.layers(self.tokens(text) + self.places, mask=mask, is_causal=True)
        logits: Tensor = self.head(values)
        return logits


def draw(corpus: Tensor, *, seed: int) -> Tensor:
    """Pieces of the text, from places that follow from the seed."""
    starts = torch.randint(len(corpus) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([corpus[start : start + LENGTH + 1] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description="a small language model on the standard library's source")
    parser.add_argument("--steps", type=int, default=300)
    flags = parser.parse_args()

    corpus = read_corpus()
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses: list[float] = []

    with eh.join() as job:
        averager = job.averager(model, optimizer)
        while job.step < flags.steps and not job.should_stop:
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (job.step + 1) / RATE_STEPS)
            pieces = draw(corpus, seed=job.step * job.world_size + job.rank)
            logits = model(pieces[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=BATCH)
            losses.append(loss.item())
            job.report(loss=loss, bits_per_byte=loss.item() / math.log(2))

    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    # A worker that joins in the very last round makes no step.
    trend = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "unknown"
    print(f"rank {job.rank}: {len(losses)} steps, loss {trend}, model {digest}")


if __name__ == "__main__":
    main()
