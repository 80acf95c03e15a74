"""Lower bounds on step time that hold for every schedule, and the per-sample work that they are computed
from.

Imports `secc.cost.model`, `secc.cluster` and the runtime's plan; nothing here schedules.
"""
