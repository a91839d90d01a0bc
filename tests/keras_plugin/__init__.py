"""In a job with several backends this chooses that of a rank, before anything imports Keras."""

import os

import coordd

if backends := os.environ.get("TEST_KERAS_BACKENDS"):
    chosen = backends.split(",")
    os.environ["KERAS_BACKEND"] = chosen[coordd.rank() % len(chosen)]
