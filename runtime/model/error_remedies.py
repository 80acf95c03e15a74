"""What to do about errors that model files often raise, by the type and the text of the error."""

from __future__ import annotations

import os

_CUDA_TEXTS = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available")
DEFAULT_REMEDY = "correct the model file"


def remedy_for(error: BaseException) -> str:
    """Returns what a user can do about an error of the model file, `DEFAULT_REMEDY` if nothing is known."""
    try:
        text = str(error)
    except Exception:  # of the user's own class
        return DEFAULT_REMEDY
    if any(known in text for known in _CUDA_TEXTS):
        return (
            'leave `.cuda()` and device="cuda" out: a run moves the model and its batches to the devices of '
            "its ranks; make tensors in forward on the device of an input (`device=x.device`)"
        )
    if isinstance(error, ImportError) and "relative import" in text:
        return (
            "import files of the model file's folder by their names (`from layers import Layer`), or make "
            "the folder a package with an __init__.py"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name} into this environment, or put its folder on PYTHONPATH"
    if isinstance(error, SystemExit):
        return (
            "a model file is imported without command-line arguments: give each option a default, and put "
            'code of a script under `if __name__ == "__main__":`'
        )
    if isinstance(error, FileNotFoundError) and error.filename and not os.path.isabs(error.filename):
        return (
            f"relative paths start at the folder of the command, {os.getcwd()}: start it in the folder of "
            "the data, or write `Path(__file__).parent / ...`"
        )
    return DEFAULT_REMEDY
