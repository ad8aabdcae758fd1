"""`python -m conductor` is the `podium` command."""

from conductor.cli import main

main()
