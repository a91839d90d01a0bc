"""Trains a CNN in stages, each on a rank of its own, on scikit-learn's handwritten digits.

Two stages: ``coordd run -n 2 python pipeline_cnn.py``. Two stages with two replicas each: ``coordd run -n 4 python
pipeline_cnn.py --data-parallel 2``. One process, with the same script: ``python pipeline_cnn.py``.
The network is that of NKFlow (Zhong et al., Computer Science 51(12), 2024, section 4.2), for smaller images.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from tqdm import tqdm

import coordd.torch as cd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="of coordd plan, such as gpipe or zb-h1")
    parser.add_argument("--microbatches", type=int, default=10, help="of each replica, in a batch")
    parser.add_argument("--data-parallel", type=int, default=1, help="replicas of each stage")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1000, help="images a step, all ranks together")
    parser.add_argument("--lr", type=float, default=6e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10_000, help="stop after so many steps at the latest")
    parser.add_argument("--picture", metavar="PATH", help="draw the last step there, as .svg or .png")
    return parser.parse_args()


def digits(seed: int) -> list[Tensor]:
    """Training images, test images, training labels, test labels; 8 x 8 pixels each."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    parts = train_test_split(pixels.numpy(), labels, test_size=0.2, random_state=seed, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


def shifted(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Nine times as many: each image where it is, and moved by a pixel in each direction."""
    wide = pad(images, (1, 1, 1, 1))
    moved = [wide[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    return torch.cat(moved), labels.repeat(9)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def main() -> None:
    args = arguments()
    cd.check_recording(args.picture)  # now, for it is drawn when all is done
    cd.init()
    torch.manual_seed(args.seed)
    images, test_images, labels, test_labels = digits(args.seed)
    images, labels = shifted(images, labels)
    config = cd.PipelineConfig(
        schedule=args.schedule, microbatches=args.microbatches, data_parallel=args.data_parallel, seed=args.seed
    )
    pipe = cd.Pipeline(network(), config, optimizer=lambda mine: torch.optim.Adam(mine, lr=args.lr), loss=cross_entropy)

    shuffles = torch.Generator().manual_seed(args.seed)  # alike on all ranks
    batches = [
        batch
        for _ in range(args.epochs)
        for batch in torch.randperm(len(images), generator=shuffles).split(args.batch_size)
    ][: args.max_steps]
    seconds = []
    bar = tqdm(batches, unit="step", disable=cd.rank() != 0)
    for batch in bar:
        begin = time.perf_counter()
        loss = pipe.train_batch(images[batch], labels[batch])
        seconds.append(time.perf_counter() - begin)
        bar.set_postfix(loss=f"{loss:.4f}")

    run = pipe.record(args.picture)
    hits = (pipe.predict(test_images).argmax(1) == test_labels).float().mean()
    if cd.rank() == 0:
        stages = " | ".join(f"{len(span)} layer{'s' * (len(span) != 1)}" for span in pipe.layout.spans)
        print(f"{cd.size()} rank(s), {args.data_parallel} replica(s) of {stages}")
        print(
            f"test accuracy {hits:.2%} after {len(batches)} steps of {1e3 * sorted(seconds)[len(batches) // 2]:.0f} ms"
        )
        print(f"the last step, {run}")
    cd.shutdown()


if __name__ == "__main__":
    main()
