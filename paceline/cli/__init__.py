"""The command line: it parses arguments, calls the library and prints. Everything a command does is also available from
Python."""

from paceline.cli.app import main

__all__ = ["main"]
