"""`python -m secc`: the command line, where the `secc` script is not on the path."""

from secc.cli import main

main()
