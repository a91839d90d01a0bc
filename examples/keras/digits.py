"""Trains a small CNN on scikit-learn's handwritten digits with Keras 3, data-parallel, on TensorFlow or PyTorch.

Two ranks: ``coordd run -n 2 python digits.py``. One process, with the same script: ``python digits.py``. Keras runs on
what ``KERAS_BACKEND`` says, ``tensorflow`` or ``torch``; the ranks need not even agree on it.
The batch size is the global one: each rank computes its share of every batch, so the ranks together take the very same
steps as a single process.
"""

import argparse
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import coordd.keras as cd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks together")
    parser.add_argument("--lr", type=float, default=0.07, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", metavar="PATH", help="write the weights there at the end, as NumPy's .npz")
    return parser.parse_args()


class Shares(keras.utils.PyDataset):
    """This rank's share of each full batch; all ranks shuffle alike, anew for every epoch."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int) -> None:
        super().__init__()
        self._images, self._labels = images, labels
        self._batch_size = batch_size
        self._random = np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self._images) // self._batch_size

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        batch = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        share = batch[cd.rank() :: cd.size()]
        return self._images[share], self._labels[share]

    def on_epoch_end(self) -> None:
        self._order = self._random.permutation(len(self._images))


def digits(seed: int) -> list[np.ndarray]:
    """1797 images of 8 x 8 pixels: training images, test images, training labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return list(train_test_split(pixels, labels, test_size=0.2, random_state=seed, stratify=labels))


def network(seed: int) -> keras.Model:
    start = keras.initializers.GlorotUniform
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="silu", kernel_initializer=start(seed)),
            keras.layers.Conv2D(64, 3, padding="same", activation="silu", kernel_initializer=start(seed + 1)),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_initializer=start(seed + 2)),
        ]
    )


def main() -> None:
    args = arguments()
    cd.init()
    if args.batch_size % cd.size():
        sys.exit(f"--batch-size {args.batch_size} cannot be shared equally by {cd.size()} ranks")
    train_images, test_images, train_labels, test_labels = digits(args.seed)
    model = network(args.seed)
    model.compile(
        optimizer=cd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        Shares(train_images, train_labels, args.batch_size, args.seed),
        epochs=args.epochs,
        shuffle=False,  # the data set has done it, alike on all ranks
        callbacks=[cd.callbacks.BroadcastGlobalVariablesCallback(0), cd.callbacks.MetricAverageCallback()],
        verbose=2 if cd.rank() == 0 else 0,
    )
    mine = slice(cd.rank(), None, cd.size())
    hits = model.predict(test_images[mine], verbose=0).argmax(1) == test_labels[mine]
    score = cd.allreduce(hits.sum(), op=cd.Sum) / len(test_labels)
    if cd.rank() == 0:
        print(f"test accuracy {score:.2%} on {cd.size()} rank(s), Keras on {keras.backend.backend()}")
        if args.save:
            np.savez(args.save, *model.get_weights())
    cd.shutdown()


if __name__ == "__main__":
    main()
