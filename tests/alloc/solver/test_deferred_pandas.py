"""Importing the solver leaves pandas alone; series of variables import it when they are used."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from secc.alloc.solver.cpsat_model import cp_model
assert "pandas" not in sys.modules
model = cp_model.CpModel()
model.add(model.new_int_var(0, 3, "a") >= 1)
assert "pandas" not in sys.modules
index = cp_model.pd.Index([1, 2])
import pandas
assert isinstance(index, pandas.Index)
assert list(model.new_bool_var_series("b", index).index) == [1, 2]
"""
IMPORTED_BEFORE = """
import pandas
from secc.alloc.solver.cpsat_model import cp_model
assert cp_model.pd is pandas
"""


def test_pandas_is_imported_when_it_is_used() -> None:
    for script in (SCRIPT, IMPORTED_BEFORE):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
