"""The entry of each rank: calls the rank file's `train` and turns what it raises into an exit code.

A rank exits with 0; with 2 after a UserError, which only one rank prints; with `LOST_HELPER_EXIT_CODE` if
that error says that a helper process was killed; with `LOST_PEER_EXIT_CODE`, silently, if another rank has
gone, because that rank is the cause; with `HANG_EXIT_CODE` after the report of a hang; else with 1 and a
traceback. The launcher (`supervisor`) turns the ranks' exit codes into one message.

Started by torchrun's agents, a rank that has lost a peer with bad input exits with 2, too, so that every
agent knows it (`torchrun`), and ranks that an agent starts again after bad input end at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from secc.runtime.errors import LostProcess, RunComplete, UserError
from secc.runtime.host.output_streams import drop_unwritable_output, open_closed_streams
from secc.runtime.host.parent_death import die_with_launcher
from secc.runtime.training.emulation import emulate_rank
from secc.runtime.training.options import RunOptions, parse_options
from secc.runtime.training.rendezvous import (
    agree_on_restarts,
    connect_agent_store,
    has_torchrun_agent,
    restart_pause,
    torchrun_restarts,
)

LOST_PEER_EXIT_CODE = 75  # of a rank that lost its connection to another rank
LOST_HELPER_EXIT_CODE = 77  # of a rank with a helper process that was killed; a restart may succeed
_STORE_TIMEOUT = timedelta(seconds=5)
_BAD_INPUT_KEY = "secc/bad_input"


def main(train: Callable[[RunOptions], None]) -> int:
    """The entry of a rank's file: calls `train` with the options of the command line. Returns
    0, or exits the process."""
    die_with_launcher()
    open_closed_streams()
    drop_unwritable_output(("stdout", "stderr"))
    if os.environ.get("RANK", "0") != "0":
        _leave_warnings_to_rank_0()
    options = None
    try:
        options = parse_options(sys.argv[1:])
        agree_on_restarts()
        if (
            torchrun_restarts()
        ):  # by its agent, which starts processes again at once and whatever they ended with
            if any(map(has_bad_input, range(torchrun_restarts()))):
                os._exit(2)
            time.sleep(restart_pause(torchrun_restarts()))
        if options.emulate is not None:
            emulate_rank(Path(sys.argv[0]).resolve().parent.parent, options)
        else:
            train(options)
        return 0
    except BaseException as error:
        if isinstance(error, RunComplete) or (options is None and isinstance(error, SystemExit)):
            raise  # the latter of --help
        code = 1
        try:
            code = _report_error(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # no cleanup: it would wait for ranks and loaders that may be gone


def _report_error(error: BaseException) -> int:
    """Says what has ended this rank, if it is the cause. Returns the exit code, or exits."""
    match error:
        case UserError():
            if error.reported_elsewhere:
                _exit_after_peer(is_bad_input=True)
            _report_once(error)
            return LOST_HELPER_EXIT_CODE if isinstance(error, LostProcess) else 2
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case _ if is_lost_peer(error):
            _exit_after_peer()
        case _:
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(f"rank {os.environ.get('RANK', '0')}:\n{text}")
            return 1


def _exit_after_peer(is_bad_input: bool = False) -> NoReturn:
    """Exits silently, after the rank that is the cause, so that the launcher sees that one first."""
    code = LOST_PEER_EXIT_CODE
    if has_torchrun_agent() and (is_bad_input or has_bad_input(torchrun_restarts())):
        code = 2
    time.sleep(1.0)
    os._exit(code)


def has_bad_input(restarts: int) -> bool:
    """Whether a rank has ended with a UserError after this number of restarts by torchrun's agents; False
    under another launcher, which sees the exit codes of all ranks."""
    if not has_torchrun_agent():
        return False
    store = connect_agent_store(_STORE_TIMEOUT, restarts)
    try:
        return store is not None and store.check([_BAD_INPUT_KEY])
    except RuntimeError:  # the agent with the store has gone
        return False


def _leave_warnings_to_rank_0() -> None:
    """Silences what libraries print in every process, unless the environment asks for it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception only reports a broken connection to another rank."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    broken = any(sign in text for sign in ("gloo", "closed by peer", "reset by peer"))
    return isinstance(error, RuntimeError) and broken and "Timed out" not in text


def _report_once(error: UserError) -> None:
    """Prints the message on one rank: the first to register in the run's store."""
    store = connect_agent_store(_STORE_TIMEOUT)
    first = os.environ.get("RANK", "0") == "0" if store is None else store.add("secc/error", 1) == 1
    if first:
        rank = f"rank {os.environ.get('RANK', '0')}: " if isinstance(error, LostProcess) else ""
        sys.stderr.write(f"error: {rank}{error}\n")
        sys.stderr.flush()
    if store is not None and not isinstance(error, LostProcess):
        store.set(_BAD_INPUT_KEY, "1")
    if store is not None and first:
        store.set("secc/error/printed", "1")
    elif store is not None:
        with suppress(RuntimeError):  # the printing rank has exited; the launcher reports that
            store.wait(["secc/error/printed"], _STORE_TIMEOUT)
