"""Trains a small GPT in stages, on sums that it learns to do; a checkpoint is loaded at any number of stages.

Two stages: ``coordd run -n 2 python pipeline_gpt.py --save sums``. Then four, which go on: ``coordd run -n 4 python
pipeline_gpt.py --load sums``. No rank ever makes more of the model than its own stages.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import coordd.torch as cd

LETTERS = "0123456789+=;"
CONTEXT = 48


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="of coordd plan, such as zb-h1")
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica, in a batch")
    parser.add_argument("--data-parallel", type=int, default=1, help="replicas of each stage")
    parser.add_argument("--width", type=int, default=64, help="size of the hidden state")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a step, all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--load", metavar="FOLDER", help="begin with what was saved there")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint there at the end")
    parser.add_argument("--picture", metavar="PATH", help="draw the last step there, as .svg or .png")
    return parser.parse_args()


class Block(nn.Module):
    """A layer of a transformer that looks back only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        seen: Tensor = self.layer(x, src_mask=past, is_causal=True)
        return seen


class GPT(nn.Module):
    """A transformer whose last layer has the weights of its first."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        nn.init.normal_(self.letter.weight, std=width**-0.5)
        self.head.weight = self.letter.weight

    def forward(self, letters: Tensor, places: Tensor) -> Tensor:
        """Maps letters, (batch, time), to the scores of the letter that follows each, (batch, time, letters)."""
        x = self.letter(letters) + self.place(places)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def sums(count: int, draw: torch.Generator) -> Tensor:
    """Texts such as ``7+5=12;3+4=7;...``, each of as many letters as the model sees, and one more."""
    pairs = torch.randint(10, (count, CONTEXT, 2), generator=draw).tolist()
    texts = ["".join(f"{a}+{b}={a + b};" for a, b in each) for each in pairs]
    return torch.tensor([[LETTERS.index(letter) for letter in text[: CONTEXT + 1]] for text in texts])


def inputs(texts: Tensor) -> tuple[Tensor, Tensor]:
    return texts, torch.arange(texts.shape[1]).expand(texts.shape)


def loss(scores: Tensor, letters: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), letters.flatten())


def solved(pipe: cd.Pipeline) -> list[str]:
    """Has the model do all sums at a time, and returns those that it does right; every rank gets what it writes."""
    tasks = [f"{a}+{b}={a + b};"[:6] for a in range(10) for b in range(10)]
    texts = torch.tensor([[LETTERS.index(letter) for letter in task[:4]] for task in tasks])
    for _ in range(2):
        texts = torch.cat([texts, pipe.predict(inputs(texts))[:, -1:].argmax(-1)], 1)
    written = ["".join(LETTERS[letter] for letter in text) for text in texts.tolist()]
    return [text for text, task in zip(written, tasks, strict=True) if text == task]


def main() -> None:
    args = arguments()
    cd.check_recording(args.picture)  # now, for it is drawn when all is done
    cd.init()

    def build() -> nn.Module:
        torch.manual_seed(args.seed)
        return GPT(args.width, args.layers)

    config = cd.PipelineConfig(
        schedule=args.schedule,
        microbatches=args.microbatches,
        data_parallel=args.data_parallel,
        clip_norm=1.0,
    )
    pipe = cd.Pipeline(build, config, optimizer=lambda mine: torch.optim.AdamW(mine, lr=args.lr), loss=loss)
    if args.load:
        pipe.load(args.load)

    draw = torch.Generator().manual_seed(args.seed)
    held_out = sums(64, draw)
    start = time.perf_counter()
    bar = tqdm(range(args.max_steps), unit="step", disable=cd.rank() != 0)
    for _ in bar:
        texts = sums(args.batch_size, draw)
        bar.set_postfix(loss=f"{pipe.train_batch(inputs(texts[:, :-1]), texts[:, 1:]):.3f}")
    speed = args.max_steps * args.batch_size * CONTEXT / (time.perf_counter() - start)
    run = pipe.record(args.picture) if args.max_steps else None
    held_out_loss = pipe.eval_batch(inputs(held_out[:, :-1]), held_out[:, 1:])
    right = solved(pipe)
    if args.save:
        pipe.save(args.save)
    if cd.rank() == 0:
        print(f"held-out loss {held_out_loss:.4f} nats a letter, {speed:,.0f} letters/s, {cd.size()} rank(s)")
        print(f"{len(right)} of 100 sums are right:", *right[::12])
        if run:
            print(f"the last step, {run}")
    cd.shutdown()


if __name__ == "__main__":
    main()
