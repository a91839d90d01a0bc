"""What pipelines are for, measured on real ranks: models that are faster, and larger, than one rank could have them.

Start it with ``python -m coordd_tools.stages {speedup,growth,cap}``.
"""
