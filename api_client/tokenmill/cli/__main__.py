"""`python -m tokenmill.cli`: the same as `tokenmill`."""

from tokenmill.cli import main

main()
