"""What the command line does. `cli.py` reads the arguments; the work is here."""
