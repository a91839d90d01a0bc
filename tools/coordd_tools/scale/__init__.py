"""Ten thousand ranks in one thread: what the tree of coordinators costs, in virtual time.

The network is a model; what handles the messages is real (`Foreman`, `Coordinator`, `Member`, the wire format). Each
time that such an object is at work the clock is read, and the time goes to the account of the rank that it belongs to.
Start it with ``python -m coordd_tools.scale --ranks 10000 --tensors 1000``.
"""
