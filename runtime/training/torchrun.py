"""torchrun with the exit codes of secc's launcher: `python -m secc.runtime.training.torchrun [torchrun's
arguments]`. launch.sh and slurm.sbatch of plans for several nodes start their ranks by it.

torchrun ends with exit code 1 and a traceback for any failure of its ranks. A scheduler could not tell bad
input, which a restart would meet again, from a lost device.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as run_torchrun
from torch.distributed.run import parse_args

from secc.runtime.errors import UserError
from secc.runtime.plan.compiled_files import check_compiled_code


def main(arguments: Sequence[str]) -> int:
    """Runs this node's ranks by torchrun. Returns 0; 2 if code of the plan is lost or changed, or a rank has
    ended with bad input, which is printed; 1 after a message that names the first rank that failed; 128 + n
    after signal n."""
    try:
        check_compiled_code(Path(parse_args(arguments).training_script).parent)
        run_torchrun(list(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if 2 in codes.values():
            return 2
        rank, failure = error.get_first_failure()
        ended = f"has ended with exit code {failure.exitcode}"
        if failure.exitcode < 0:
            ended = f"was killed by {signal.Signals(-failure.exitcode).name}"
        sys.stderr.write(
            f"error: rank {rank} (process {failure.pid}) {ended}; its node's ranks were stopped\n"
        )
        return 1
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
