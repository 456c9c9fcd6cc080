"""`python -m paceline`."""

from paceline.cli.app import main

if __name__ == "__main__":
    main()
