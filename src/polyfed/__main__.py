"""``python -m polyfed``: the command line."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
