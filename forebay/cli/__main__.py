"""`python -m forebay.cli`: the same as the console script."""

from forebay.cli.main import main

main()
