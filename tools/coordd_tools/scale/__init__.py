"""Ten thousand ranks in one thread: the cost of the tree of coordinators, in virtual time.

The network is a model; the code that handles messages is real (`Foreman`, `Coordinator`, `Member`, the wire format).
The CPU time of each such object is measured and charged to the rank to which it belongs.
Start it with ``python -m coordd_tools.scale --ranks 10000 --tensors 1000``.
"""
