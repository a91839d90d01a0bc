"""Types by name, in a process that has not imported those that NumPy lacks."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from coordd.ops.dtypes import dtype_of

NAMES = ["bool", "uint8", "int64", "float16", "float32", "complex128", "bfloat16", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("name", NAMES)
def test_a_type_has_its_name(name: str) -> None:
    assert dtype_of(name).name == name


def test_foreign_types_are_those_of_ml_dtypes() -> None:
    assert dtype_of("bfloat16") == np.dtype(ml_dtypes.bfloat16)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="float7"):
        dtype_of("float7")


def test_foreign_types_are_imported_where_one_is_asked_for() -> None:
    code = (
        "import sys, coordd.torch; coordd.torch.Pipeline; from coordd.ops.dtypes import dtype_of; dtype_of('float32')\n"
        "before = 'ml_dtypes' in sys.modules\n"
        "print(before, dtype_of('bfloat16').itemsize, 'ml_dtypes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "2", "True"]
