"""Trains a small CNN on scikit-learn's handwritten digits, data-parallel.

Two ranks: ``coordd run -n 2 python digits.py``. One process, with the same script: ``python digits.py``.
The batch size is the global one: each rank computes its share of every batch, so the ranks together take the very same
steps as a single process.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import islice

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import coordd.torch as cd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks together")
    parser.add_argument("--lr", type=float, default=0.07, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compression", type=lambda name: getattr(cd.Compression, name)(), default="none")
    parser.add_argument("--max-steps", type=int, default=10_000, help="stop after so many steps at the latest")
    parser.add_argument("--save", metavar="PATH", help="write the parameters there at the end")
    return parser.parse_args()


def digits(seed: int) -> list[Tensor]:
    """1797 images of 8 x 8 pixels: training images, test images, training labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    parts = train_test_split(pixels.numpy(), labels, test_size=0.2, random_state=seed, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def batches(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """This rank's share of one full batch after the other; all ranks shuffle alike."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        for batch in order[: count - count % batch_size].split(batch_size):
            yield batch[cd.rank() :: cd.size()]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that are recognised; every rank looks at some of them."""
    mine = slice(cd.rank(), None, cd.size())
    hits = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return cd.allreduce(hits, op=cd.Sum).item() / len(labels)


def main() -> None:
    args = arguments()
    cd.init()
    if args.batch_size % cd.size():
        sys.exit(f"--batch-size {args.batch_size} cannot be shared equally by {cd.size()} ranks")
    torch.manual_seed(args.seed)
    train_images, test_images, train_labels, test_labels = digits(args.seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = cd.DistributedOptimizer(optimizer, model.named_parameters(), compression=args.compression)
    cd.broadcast_parameters(model.state_dict(), root_rank=0)

    steps = min(args.epochs * (len(train_images) // args.batch_size), args.max_steps)
    shares = islice(batches(len(train_images), args.batch_size, args.seed), steps)
    bar = tqdm(shares, total=steps, unit="step", disable=cd.rank() != 0)
    for step, share in enumerate(bar):
        optimizer.zero_grad()
        loss = cross_entropy(model(train_images[share]), train_labels[share])
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{cd.allreduce(loss.detach()):.4f}")

    score = accuracy(model, test_images, test_labels)
    if cd.rank() == 0:
        print(f"test accuracy {score:.2%} after {steps} steps on {cd.size()} rank(s)")
        if args.compression.ratio > 1:
            print(f"{args.compression.ratio:.1f} times fewer bytes, {args.compression.error:.1%} lost or late")
        if args.save:
            torch.save(model.state_dict(), args.save)
    cd.shutdown()


if __name__ == "__main__":
    main()
