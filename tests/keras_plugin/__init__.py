"""In a job with several backends this chooses that of a rank, before anything imports Keras."""

import os

if backends := os.environ.get("TEST_KERAS_BACKENDS"):
    chosen = backends.split(",")
    os.environ["KERAS_BACKEND"] = chosen[int(os.environ["OMPI_COMM_WORLD_RANK"]) % len(chosen)]
