"""Cost of calls, sections and transfers as expressions over input sizes, and the time and memory they take
on a cluster."""
