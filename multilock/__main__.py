"""``python -m multilock``: the command line."""

from multilock.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
