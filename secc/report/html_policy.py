"""The content security policy of pages that secc writes: no scripts, no requests, one style sheet.

Names in a page come from the user's model and dataset. They are escaped; should one get through, the browser
still runs and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib


def content_policy(style: str) -> str:
    """Returns the value of `Content-Security-Policy` for a page with this text in its `<style>`."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
