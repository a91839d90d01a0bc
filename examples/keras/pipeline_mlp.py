"""Trains NKFlow's example in stages, each on a rank of its own, with Keras 3 on TensorFlow or PyTorch.

Four stages of two layers: ``coordd run -n 4 python pipeline_mlp.py``. One process, with the same script: ``python
pipeline_mlp.py``. On two or three ranks the layers are dealt out by themselves. The network is that of NKFlow (Zhong et
al., Computer Science 51(12), 2024, section 3.2), with activations, for scikit-learn's handwritten digits.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import coordd.keras as cd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="of coordd plan, such as gpipe")
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica, in a batch")
    parser.add_argument("--data-parallel", type=int, default=1, help="replicas of each stage")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="images a step, all ranks together")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", metavar="PATH", help="draw the last step there, as .svg or .png")
    parser.add_argument("--save", metavar="PATH", help="write the model there at the end, as .keras")
    return parser.parse_args()


def digits(seed: int) -> list[np.ndarray]:
    """1797 images of 8 x 8 pixels: training images, test images, training labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images / 16).astype("float32").reshape(-1, 8, 8)
    return list(train_test_split(pixels, labels, test_size=0.2, random_state=seed, stratify=labels))


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = arguments()
    cd.check_recording(args.picture)  # now, for it is drawn when all is done
    cd.init()
    keras.utils.set_random_seed(args.seed)  # the same weights at the start, however many ranks there are
    train_images, test_images, train_labels, test_labels = digits(args.seed)
    pipe = cd.Pipeline(
        network(),
        cd.Config(
            layers_per_proc=[2, 2, 2, 2] if cd.size() == 4 * args.data_parallel else "auto",
            schedule=args.schedule,
            microbatches=args.microbatches,
            data_parallel=args.data_parallel,
            seed=args.seed,
        ),
        optimizer=keras.optimizers.Adam(args.lr),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    pipe.fit(
        train_images,
        train_labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(test_images, test_labels),
        verbose=2,
    )
    run = pipe.record(args.picture)
    loss, accuracy = pipe.evaluate(test_images, test_labels, batch_size=len(test_images))
    model = pipe.whole()
    if cd.rank() == 0:
        stages = " | ".join(f"{len(span)} layer{'s' * (len(span) != 1)}" for span in pipe.layout.spans)
        print(f"{cd.size()} rank(s), {args.data_parallel} replica(s) of {stages}, on {keras.backend.backend()}")
        print(f"test accuracy {accuracy:.2%}, loss {loss:.4f}")
        print(f"the last step, {run}")
        if args.save:
            model.save(args.save)
    cd.shutdown()


if __name__ == "__main__":
    main()
