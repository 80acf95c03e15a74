"""Running a plan's step programs in modelled time, before any process starts, and showing where the time
goes."""
