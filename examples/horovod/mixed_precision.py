"""Mixed precision in Horovod's words: autocast, a `GradScaler`, and gradients that are clipped before the step.

``coordd run --as-horovod -n 2 python mixed_precision.py``.
"""

import argparse

import horovod.torch as hvd
import torch
from torch import nn, optim

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument(
    "--init-scale", type=float, default=2.0**16, help="of the loss; too large a one is halved step by step"
)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", metavar="PATH", help="write the parameters there at the end")
args = parser.parse_args()

hvd.init()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank())

model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)).to(device)
teacher = nn.Linear(16, 4, bias=False)
optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scaler = torch.amp.GradScaler(device, init_scale=args.init_scale)

generator = torch.Generator().manual_seed(args.seed)
skipped = 0
for step in range(args.steps):
    # All ranks draw the same inputs, and each takes its share.
    inputs = torch.randn(args.batch_size * hvd.size(), 16, generator=generator)[hvd.rank() :: hvd.size()]
    targets = teacher(inputs).argmax(dim=1)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        output = model(inputs.to(device))
        loss = nn.functional.cross_entropy(output.float(), targets.to(device))
    scaler.scale(loss).backward()
    # Gradients have to be complete before they are unscaled and clipped, and must not be reduced again.
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 20 == 19:
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"step {step + 1}: loss {mean:.4f}")

skips = hvd.allgather_object(skipped)
if hvd.rank() == 0:
    print(f"skipped {skips} steps, by rank; scale {scaler.get_scale():g}")
    if args.save:
        torch.save(model.state_dict(), args.save)
