"""A training loop as Horovod's documentation teaches it: warm-up, schedule, checkpoints, metrics averaged over ranks.

Not a word of it is coordd's: ``coordd run --as-horovod -n 2 python training.py``.
"""

import argparse
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Sample = tuple[Tensor, Tensor]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt", help="where checkpoints go")
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in fp16")
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches whose gradients are summed locally")
parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
parser.add_argument("--val-batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--base-lr", type=float, default=0.02, help="learning rate of one rank")
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2).flatten(1)
        return functional.log_softmax(self.out(functional.relu(self.hidden(x))), dim=1)


class Metric:
    """The mean over batches and ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, value: Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self) -> float:
        return (self.sum / self.n).item()


def adjust_learning_rate(epoch: int, batch_idx: int) -> None:
    """Goes from the rate of one rank to that of all, then down by steps."""
    at = epoch + float(batch_idx + 1) / len(train_loader)
    if at < args.warmup_epochs:
        factor = 1.0 / hvd.size() * (at * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        factor = 1.0 if epoch < args.epochs - 2 else 0.1
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(dim=1).eq(target).float().mean()


def train(epoch: int) -> None:
    model.train()
    train_sampler.set_epoch(epoch)
    loss_of_epoch = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        parts = list(zip(data.split(args.batch_size), target.split(args.batch_size), strict=True))
        for x, y in parts:
            loss = functional.nll_loss(model(x), y)
            loss_of_epoch.update(loss)
            loss.div_(len(parts))
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: train loss {loss_of_epoch.avg:.4f}")


def validate(epoch: int) -> None:
    model.eval()
    loss, hits = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            output = model(data)
            loss.update(functional.nll_loss(output, target))
            hits.update(accuracy(output, target))
    if hvd.rank() == 0:
        print(f"epoch {epoch}: validation loss {loss.avg:.4f}, accuracy {100 * hits.avg:.2f}%")


def save_checkpoint(epoch: int) -> None:
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch))


hvd.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)

# The last checkpoint, if there is one; rank 0 tells the others.
resume_from_epoch = 0
for epoch in range(args.epochs, 0, -1):
    if Path(args.checkpoint_format.format(epoch=epoch - 1)).exists():
        resume_from_epoch = epoch
        break
resume_from_epoch = int(hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item())

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
train_set, val_set = (torch.utils.data.Subset(dataset, range(*ends)) for ends in ((0, 1536), (1536, 1792)))
train_sampler: DistributedSampler[Sample] = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=args.batch_size * args.batches_per_allreduce, sampler=train_sampler)
val_sampler: DistributedSampler[Sample] = DistributedSampler(
    val_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
val_loader = DataLoader(val_set, batch_size=args.val_batch_size, sampler=val_sampler)

model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=args.momentum)
compression: Any = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    print(f"goes on after epoch {resume_from_epoch} of {args.epochs}; without checkpoints here it would start anew")
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch - 1))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    validate(epoch)
    save_checkpoint(epoch)
