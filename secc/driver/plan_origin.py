"""Tells plans that this user compiled from those of others.

A plan names the model file that its samples come from, and `secc simulate` runs that file. Whoever compiled a
plan has run it before; a plan that came from elsewhere could name any file, since a digest in the plan can be
written by its author. So a compilation leaves a message authentication code of plan.json, made with a key
that only this user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from secc.errors import UserError

ORIGIN_FILE = "origin.mac"
_KEY_BYTES = 32


def sign_plan(plan_json: str) -> str | None:
    """Returns the code of a plan by this user's key, as the text of `ORIGIN_FILE`; None if there is no place
    for a key."""
    key = _user_key()
    return None if key is None else hmac.new(key, plan_json.encode(), hashlib.sha256).hexdigest() + "\n"


def check_model_is_trusted(directory: Path) -> None:
    """Raises UserError unless this user compiled the plan in `directory`."""
    try:
        code = (directory / ORIGIN_FILE).read_bytes()[: 4 * _KEY_BYTES]
        expected = sign_plan((directory / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        code, expected = b"", None
    if expected is None or not hmac.compare_digest(code.strip(), expected.strip().encode()):
        raise UserError(
            "this user did not compile the plan on this machine, and the command runs its model file",
            str(directory),
            "read the model file that plan.json names, then add --trust-model",
        )


def _user_key() -> bytes | None:
    """Returns this user's key, made at the first call; None if it can be neither read nor written."""
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "secc" / "key"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as made:  # readable by this user only
                made.write(secrets.token_bytes(_KEY_BYTES))
                made.flush()
                with suppress(FileExistsError):  # another compilation was first
                    os.link(made.name, path)
        key = path.read_bytes()
    except (OSError, RuntimeError):
        return None
    return key if len(key) == _KEY_BYTES else None
