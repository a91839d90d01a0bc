"""A GAN with two optimizers, in Horovod's words: a generator learns to put points on a ring.

``coordd run --as-horovod -n 2 python gan.py``. Under Horovod, gradients of two optimizers need names of
their own, hence the prefixes.
"""

import argparse
import math

import horovod.torch as hvd
import torch
from torch import Tensor, nn, optim

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--double", action="store_true", help="compute in fp64")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", metavar="PATH", help="write the parameters there at the end")
args = parser.parse_args()


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def share(batch: Tensor) -> Tensor:
    """This rank's part of what all ranks have drawn alike."""
    return batch[hvd.rank() :: hvd.size()]


def ring(count: int) -> Tensor:
    angle = 2 * math.pi * torch.rand(count, generator=source)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(count, 2, generator=source)


hvd.init()
torch.manual_seed(args.seed + hvd.rank())
torch.set_default_dtype(torch.float64 if args.double else torch.float32)
source = torch.Generator().manual_seed(args.seed)

generator, critic = network(4, 2), network(2, 1)
critic_optimizer = optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.999))
optimizer = optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
critic_optimizer = hvd.DistributedOptimizer(critic_optimizer, named_parameters=critic.named_parameters(prefix="critic"))
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=generator.named_parameters(prefix="generator"))
for net, its_optimizer in ((generator, optimizer), (critic, critic_optimizer)):
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(its_optimizer, root_rank=0)

criterion = nn.BCEWithLogitsLoss()
total = args.batch_size * hvd.size()
ones, zeros = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)
for step in range(args.steps):
    # The critic: two losses, then one step.
    critic_optimizer.zero_grad()
    loss_real = criterion(critic(share(ring(total))), ones)
    fake = generator(share(torch.randn(total, 4, generator=source)))
    loss_fake = criterion(critic(fake.detach()), zeros)
    (loss_real + loss_fake).backward()
    critic_optimizer.step()

    # The generator: what passes judgement on it does not learn from that, and has no gradients to exchange.
    optimizer.zero_grad()
    critic.requires_grad_(False)
    loss = criterion(critic(fake), ones)
    loss.backward()
    optimizer.step()
    critic.requires_grad_(True)

    if step % 100 == 99:
        loss_of_critic = hvd.allreduce((loss_real + loss_fake).detach(), name="loss_of_critic")
        loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"step {step + 1}: loss of the critic {loss_of_critic:.3f}, of the generator {loss:.3f}")

radius = generator(share(torch.randn(total, 4, generator=source))).norm(dim=1).mean()
radius = hvd.allreduce(radius.detach(), name="radius")
if hvd.rank() == 0:
    print(f"points are {radius:.2f} from the centre; the ring's radius is 1")
    if args.save:
        torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, args.save)
