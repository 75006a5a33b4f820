"""`python -m superpod.cli`: the command `recipes` where it is not on the PATH."""

from superpod.cli import main

if __name__ == "__main__":
    main()
