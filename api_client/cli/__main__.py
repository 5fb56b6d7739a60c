"""`python -m api_client.cli`: the same as `tokenmill`."""

from api_client.cli import main

main()
