"""Trains a small network of `toygrad`, a framework of eighty lines, on several ranks.

``coordd run -n 2 python train.py``, or ``python train.py`` for one process: both end with the same weights.
"""

import numpy as np
from coordd_toygrad import DistributedSGD, allreduce, broadcast_parameters
from toygrad import Tensor, backward, matmul, mean_squared_error, tanh

from coordd import api

STEPS, BATCH = 300, 64


def main() -> None:
    api.init()
    random = np.random.default_rng(0)
    parameters = {"hidden": Tensor(random.normal(size=(4, 32)) / 2), "out": Tensor(random.normal(size=(32, 1)) / 6)}
    broadcast_parameters(parameters)
    optimizer = DistributedSGD(parameters, rate=0.3)
    for step in range(STEPS):
        x = random.normal(size=(BATCH, 4))
        wanted = np.sin(x[:, :1] + x[:, 1:2])
        mine = slice(api.rank(), None, api.size())
        hidden = tanh(matmul(Tensor(x[mine]), parameters["hidden"]))
        loss = mean_squared_error(matmul(hidden, parameters["out"]), wanted[mine])
        backward(loss)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            mean = float(allreduce(loss, name="loss").value)
            if api.rank() == 0:
                print(f"step {step:3}: loss {mean:.4f}")
    if api.rank() == 0:
        print("weights:", " ".join(f"{each:.9f}" for each in parameters["out"].value[:3, 0]))
    api.shutdown()


if __name__ == "__main__":
    main()
