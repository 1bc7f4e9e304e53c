"""``python -m polyfed``: the command line."""

from polyfed.cli.app import main

if __name__ == "__main__":
    main()
