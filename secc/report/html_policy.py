"""The content security policy of pages that secc writes: no requests, one style sheet, and no scripts but
secc's own.

Names in a page come from the user's model and dataset. They are escaped; should one get through, the browser
still runs and loads nothing but what the policy names by its digest. Scripts may not turn texts into markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence


def content_policy(style: str, scripts: Sequence[str] = ()) -> str:
    """Returns the value of `Content-Security-Policy` for a page with this text in its `<style>`, and these in
    its `<script>` elements."""
    rules = ["default-src 'none'", f"style-src {_source_digest(style)}"]
    if scripts:
        rules += [f"script-src {' '.join(map(_source_digest, scripts))}"]
        rules += ["require-trusted-types-for 'script'", "trusted-types 'none'"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _source_digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
