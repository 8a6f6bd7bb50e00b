"""`python -m core_runner.cli`: the command line without its installed script."""

from core_runner.cli import main

main(prog_name="core-runner")
