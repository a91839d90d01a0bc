"""Trains a small GPT, byte by byte, on the sources of Python's own standard library, data-parallel.

Two ranks: ``coordd run -n 2 python charlm.py``. One process, with the same script: ``python charlm.py``.
"""

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import coordd.torch as cd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="size of the hidden state")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads a block")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step, all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compression", type=lambda name: getattr(cd.Compression, name)(), default="none")
    parser.add_argument("--max-steps", type=int, default=300)
    return parser.parse_args()


class GPT(nn.Module):
    """A transformer that reads bytes."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        """Maps bytes, (batch, time), to the scores of the byte that follows each, (batch, time, 256)."""
        past = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x: Tensor = self.byte(text) + self.place[: text.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=past, is_causal=True)
        scores: Tensor = self.head(x)
        return scores

    def loss(self, windows: Tensor) -> Tensor:
        """The mean cross entropy, in nats a byte."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def sources() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """This rank's share of ``count`` random pieces of text; all ranks draw the same ones."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[(starts + torch.arange(length))[cd.rank() :: cd.size()]].long()


@torch.no_grad()
def sample(model: GPT, prompt: bytes, length: int, context: int) -> str:
    """Lets the model write on from the prompt."""
    text = torch.tensor([list(prompt)])
    for _ in range(length):
        scores = model(text[:, -context:])[:, -1] / 0.7
        text = torch.cat([text, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    written = bytes(text[0].tolist()).decode(errors="replace")
    return "".join(letter for letter in written if letter.isprintable() or letter == "\n")


def main() -> None:
    args = arguments()
    cd.init()
    if args.batch_size % cd.size():
        sys.exit(f"--batch-size {args.batch_size} cannot be shared equally by {cd.size()} ranks")
    torch.manual_seed(args.seed)
    text = sources()
    train, held_out = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])
    model = GPT(args.width, args.layers, args.heads, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = cd.DistributedOptimizer(optimizer, model.named_parameters(), compression=args.compression)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.max_steps)
    cd.broadcast_parameters(model.state_dict(), root_rank=0)

    draw = torch.Generator().manual_seed(args.seed)
    start = time.perf_counter()
    bar = tqdm(range(args.max_steps), unit="step", disable=cd.rank() != 0)
    for step in bar:
        optimizer.zero_grad()
        loss = model.loss(windows(train, args.batch_size, args.context + 1, draw))
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{cd.allreduce(loss.detach()):.3f}")
    speed = args.max_steps * args.batch_size * args.context / (time.perf_counter() - start)
    with torch.no_grad():
        loss = cd.allreduce(model.loss(windows(held_out, 4 * args.batch_size, args.context + 1, draw)))
    if cd.rank() == 0:
        print(f"held-out loss {loss:.3f} nats a byte, {speed:,.0f} tokens/s on {cd.size()} rank(s)")
        print(f"{args.compression.ratio:.1f} times fewer bytes, {args.compression.error:.1%} lost or late")
        print(sample(model, b"def ", 200, args.context))
    cd.shutdown()


if __name__ == "__main__":
    main()
