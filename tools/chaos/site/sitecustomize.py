"""Python executes this file as it starts; `tools.chaos` puts its folder on the path of the runs it breaks."""

import os

if os.environ.get("SECC_CHAOS_CASE"):
    from tools.chaos.moments import watch_for_moment

    watch_for_moment()
