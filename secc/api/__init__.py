"""The Python interface: models, plans, and results that print as tables, show as HTML and become data frames.
The command line is a thin layer on it. Imports everything below."""
