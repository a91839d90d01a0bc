"""A seeded simulation: all ranks of a job in one thread, in virtual time, with every fault that can happen.

The protocol is the real one (`Coordinator`, `Member`, the wire format); the network, the data plane and the scripts are
simulated. The same seed gives the same run. Start it with ``python -m coordd_tools.sim --seeds 1000``.
"""
