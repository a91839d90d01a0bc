"""Trains a small network on scikit-learn's handwritten digits with TensorFlow's own means: a tape in a `tf.function`.

Two ranks: ``coordd run -n 2 python digits.py``. One process, with the same script: ``python digits.py``.
The batch size is the global one: each rank computes its share of every batch, so the ranks together take the very same
steps as a single process.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import coordd.tensorflow as cd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks together")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", metavar="PATH", help="write the weights there at the end, as NumPy's .npz")
    return parser.parse_args()


def digits(seed: int) -> list[np.ndarray]:
    """1797 images of 64 pixels: training images, test images, training labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images / 16).astype("float32")
    return list(train_test_split(pixels, labels, test_size=0.2, random_state=seed, stratify=labels))


class Network(tf.Module):
    """64 pixels, 128 hidden units, 10 digits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.hidden = tf.Variable(random.normal(0, 0.15, (64, 128)).astype("float32"), name="hidden")
        self.shift = tf.Variable(tf.zeros(128), name="shift")
        self.out = tf.Variable(random.normal(0, 0.1, (128, 10)).astype("float32"), name="out")

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        return tf.nn.silu(images @ self.hidden + self.shift) @ self.out


def batches(count: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """This rank's share of one full batch after the other; all ranks shuffle alike."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(count)
        for start in range(0, count - count % batch_size, batch_size):
            yield order[start : start + batch_size][cd.rank() :: cd.size()]


def main() -> None:
    args = arguments()
    cd.init()
    if args.batch_size % cd.size():
        sys.exit(f"--batch-size {args.batch_size} cannot be shared equally by {cd.size()} ranks")
    train_images, test_images, train_labels, test_labels = digits(args.seed)
    network = Network(args.seed)
    cd.broadcast_variables(network.trainable_variables, root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images))
            loss = tf.reduce_mean(losses)
        tape = cd.DistributedGradientTape(tape)
        for variable, gradient in zip(
            network.trainable_variables, tape.gradient(loss, network.trainable_variables), strict=True
        ):
            variable.assign_sub(args.lr * gradient)
        return loss

    shares = batches(len(train_images), args.batch_size, args.seed)
    bar = tqdm(range(args.steps), unit="step", disable=cd.rank() != 0)
    for number in bar:
        share = next(shares)
        loss = step(tf.constant(train_images[share]), tf.constant(train_labels[share]))
        if number % 40 == 0:
            bar.set_postfix(loss=f"{float(cd.allreduce(loss)):.4f}")

    mine = slice(cd.rank(), None, cd.size())
    hits = np.argmax(network(test_images[mine]), 1) == test_labels[mine]
    score = int(cd.allreduce(tf.constant(hits.sum()), op=cd.Sum)) / len(test_labels)
    if cd.rank() == 0:
        print(f"test accuracy {score:.2%} after {args.steps} steps on {cd.size()} rank(s)")
        if args.save:
            np.savez(args.save, *network.trainable_variables)
    cd.shutdown()


if __name__ == "__main__":
    main()
